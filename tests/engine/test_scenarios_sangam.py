"""Sangam's worker by hand, and plan for plan against its public rules (fleet.md 2.4) in plain Python."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsim.engine.engine import Limits
from dsim.engine.policy import parse
from dsim.engine.state import MASKED
from dsim.engine.step import StepPlan

from ..serving import Loop, Served
from ..worlds import toy_trace

SMALL = "sangam,block_length=4,page_size=4"


def deficit(world: Served) -> int:
    return int(world.engine._own.record["deficit"][0])


def test_the_pass_that_begins_a_block_commits_and_every_row_decodes_in_every_step() -> None:
    w = Served(SMALL)
    w.submit(0, 10, 8)
    w.submit(1, 3, 4)
    assert w.step() == "0F 1F"
    assert w.features() == (18 + 7, 18 * 18 + 7 * 7, 18 + 7, 8, 8, 2, 0, 1)
    assert w["num_committed"][:2] == [1, 1]
    assert w.steps(3) == ["0r 1r"] * 3
    assert (w["num_tokens"][:2], w["finish"][1]) == ([4, 4], 4.0)
    # The second block of request 0 begins with a pass of its own.
    assert w.steps(5) == ["0F", *["0r"] * 3, "nothing"]
    assert (w["num_tokens"][0], w["num_forwards"][0], w["finish"][0]) == (8, 8, 8.0)


def test_a_long_pass_saves_up_budget_over_forwards() -> None:
    w = Served(f"{SMALL},max_batched_tokens=20")
    w.submit(0, 4, 12)
    assert w.step() == "0F"
    assert deficit(w) == 4  # a forward of 20 tokens less a pass of 16
    w.submit(1, 40, 4)  # 44 tokens
    w.submit(2, 3, 4)  # would fit, and stands behind
    found = []
    for _ in range(2):
        assert w.step() == "0r"
        found.append(deficit(w))
    assert found == [20, 36]  # 16 more each: 20 less a block of 4
    assert w.step() == "0r 1F 2F"
    assert deficit(w) == 36 + 16 - 44 - 7
    # Request 0 waits for the pass of its second block, which does not fit yet.
    assert w.step() == "1r 2r"
    assert deficit(w) == 1 + 12
    assert w.step() == "1r 2r 0F"
    assert deficit(w) == 13 + 12 - 16
    # Nothing waits, and nothing is saved.
    assert w.step() == "1r 2r 0r"
    assert deficit(w) == 0


def test_an_idle_worker_takes_one_pass_of_any_length() -> None:
    w = Served(f"{SMALL},max_batched_tokens=20")
    w.submit(0, 60, 4)
    w.submit(1, 58, 8)
    assert w.step() == "0F"
    assert deficit(w) == 0  # 20 - 64
    assert w.steps(3) == ["0r"] * 3
    assert deficit(w) == 48
    assert w.step() == "1F"
    assert deficit(w) == 20 + 48 - 66


def test_a_deficit_lasts_while_memory_keeps_a_pass_out_and_what_is_admitted_beyond_the_step_uses_it_up() -> None:
    w = Served(f"{SMALL},max_batched_tokens=20", num_pages=9)
    w.submit(0, 10, 4)  # 4 pages and 14 tokens
    assert (w.step(), deficit(w)) == ("0F", 6)
    w.submit(1, 16, 4)  # 5 pages and 20 tokens
    w.submit(2, 3, 4)  # no page is left
    assert w.step() == "0r 1F"  # 16 + 6 hold 20; then memory stops
    assert deficit(w) == 6 - (20 - 16)
    assert w.step() == "0r 1r"
    assert deficit(w) == 2


def test_requests_past_their_pass_wait_with_their_pages_for_a_row_and_the_first_to_arrive_passes_first() -> None:
    w = Served(f"{SMALL},max_batch=2", num_pages=100)
    for request, output in enumerate((8, 8, 4)):
        w.submit(request, 4, output)
    assert w.step() == "0F 1F 2F"
    assert w.engine.pages_held == 3 + 3 + 2
    assert w.steps(3) == ["0r 1r"] * 3
    assert w.step() == "2r 0F 1F"
    assert w.steps(5) == ["2r 0r", "2r 0r", "0r 1r", "1r", "1r"]
    assert w["finish"][:3] == [8, 10, 7]


class OneByOneOrAtOnce:
    """Request 0 commits a position a step, others all of them."""

    def draw(self, plan: StepPlan) -> npt.NDArray[np.bool_]:
        masks: npt.NDArray[np.bool_] = plan.window & (plan.status == MASKED)
        first = np.cumsum(masks, axis=1) == 1
        return masks & (first | (plan.requests > 0)[:, None])


def test_a_request_returns_before_another_that_arrived_later_and_has_returned() -> None:
    w = Served(f"{SMALL},max_batched_tokens=20")
    w.draws = OneByOneOrAtOnce()
    w.submit(0, 4, 8)
    w.submit(1, 30, 8)
    # Request 1 has its first block with its pass, and waits for 38 tokens again when request 0 is back.
    assert w.steps(4) == ["0F", "0r", "0r 1F", "0r"]
    assert w.step() == "0F"


def test_the_pages_of_a_request_are_free_between_its_blocks() -> None:
    w = Served(f"{SMALL},max_batched_tokens=16")
    w.submit(0, 8, 8)
    w.step()
    assert w.engine.pages_held == 4
    w.steps(3)
    assert w.engine.pages_held == 0
    assert w.step() == "0F"
    assert w.engine.pages_held == 4


# ---- the text of fleet.md 2.4 ----------------------------------------------------------------------------------


@dataclass
class Job:
    """A request of the text: its whole sequence, its blocks left, and its steps left in the block."""

    index: int
    submitted: float
    length: int
    blocks: int
    begun: bool = False
    left: int = 0


@dataclass
class Worker:
    """A colocated worker of fleet.md 2.4, one forward a second."""

    tokens: int
    rows: int
    pages: int
    page: int
    block: int
    steps: int  # forwards of a block, its pass included
    waiting: list[Job] = field(default_factory=list)
    ready: list[Job] = field(default_factory=list)  # past their pass, waiting for a row
    decoding: list[Job] = field(default_factory=list)
    deficit: int = 0

    def forward(self) -> tuple[list[tuple[int, bool]], int]:
        """The rows, each a request and whether it prefills, and the pages held."""
        while self.ready and len(self.decoding) < self.rows:
            self.decoding.append(self.ready.pop(0))
        fresh = self.tokens - self.block * len(self.decoding)
        budget = fresh + self.deficit
        free = self.pages - sum(self._pages(job) for job in self.decoding + self.ready)
        waits, batch, memory = bool(self.waiting), [], False
        while self.waiting:
            job, used = self.waiting[0], sum(other.length for other in batch)
            if used + job.length > budget and (self.decoding or batch):
                break
            if memory := self._pages(job) > free:
                break
            batch.append(self.waiting.pop(0))
            free -= self._pages(job)
        used = sum(job.length for job in batch)
        if not waits:
            self.deficit = 0
        elif memory:
            self.deficit = max(0, self.deficit - max(0, used - fresh))
        else:
            self.deficit = max(0, budget - used)
        rows = [(job.index, False) for job in self.decoding] + [(job.index, True) for job in batch]
        held = self.pages - free
        for job in batch:
            job.begun, job.left = True, self.steps
        over = []
        for job in self.decoding + batch:
            job.left -= 1
            if job.left <= 0 or not job.blocks:
                over.append(job)
            elif job in batch:
                self.ready.append(job)
        self.decoding = [job for job in self.decoding if job not in over]
        for job in over:
            job.blocks -= 1
            if job.blocks > 0:
                self.waiting.append(job)
        # At the head those that have begun, by their submit times.
        self.waiting.sort(key=lambda job: (not job.begun, job.submitted, job.index))
        return rows, held

    def _pages(self, job: Job) -> int:
        return -(-job.length // self.page)


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    st.lists(
        st.tuples(st.sampled_from([0, 0, 0, 1, 2, 5, 20]), st.integers(1, 60), st.integers(0, 20)), min_size=1,
        max_size=25,
    ),
    st.integers(8, 120), st.integers(21, 80), st.integers(1, 6), st.sampled_from([1, 2, 4]), st.sampled_from([1, 4, 7]),
)  # fmt: skip
def test_every_plan_is_that_of_the_text(
    requests: list[tuple[int, int, int]], tokens: int, pages: int, rows: int, steps: int, page: int
) -> None:
    gaps, prompts, outputs = zip(*requests, strict=True)
    block, arrival = 4, [float(sum(gaps[1 : i + 1])) for i in range(len(gaps))]
    spec = f"sangam:{tokens},max_batch={rows},block_length={block},page_size={page},denoising_steps={steps}"
    policy = parse(spec)
    num = pages * 4 // page + 20 // page + 60 // page
    loop = Loop(policy, toy_trace(arrival, prompts, outputs), Limits(num, 4096, rows)).run()
    worker = Worker(tokens, rows, num, page, block, steps)
    jobs = [
        Job(i, arrival[i], prompts[i] + -(-outputs[i] // block) * block, -(-outputs[i] // block))
        for i in range(len(prompts))
    ]
    for plan in loop.plans:
        while jobs and jobs[0].submitted <= plan.now:
            worker.waiting.append(jobs.pop(0))
        assert len(plan.requests) > 0
        expected, held = worker.forward()
        lengths = [prompts[request] + -(-outputs[request] // block) * block for request, _ in expected]
        sizes = [length if prefills else block for length, (_, prefills) in zip(lengths, expected, strict=True)]
        assert plan.requests.tolist() == [request for request, _ in expected]
        assert plan.num_tokens.tolist() == sizes
        assert plan.pages == held
    assert not jobs
    assert not worker.waiting
    assert not worker.decoding
    assert not worker.ready


@pytest.mark.parametrize("spec", ["sangam", "sangam,reuse=prefix"])
def test_with_thresholds_no_block_is_computed_once_more(spec: str) -> None:
    w = Served(f"{spec},block_length=4,page_size=4,denoising_steps=1")
    w.submit(0, 8, 8)
    assert w.steps(3) == ["0F", "0F", "nothing"]
