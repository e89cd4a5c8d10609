"""Compare `sangam` plan for plan with Sangam's public worker (UT-InfraAI/sangam, commit 0a694373).

    git clone https://github.com/UT-InfraAI/sangam DIR
    python -m dsim.benchmarks.sangam_scheduler DIR     # needs PyTorch, no GPU

The worker's own code runs unchanged: its queue, its budget, what it admits, its batch and what it ends
(src/sangam/worker/colocated_worker.py). A forward commits the masks of dsim's schedule and takes 1 s. Empty modules
replace imported packages that no decision uses (gRPC, the models, kernels and metrics).
"""

import importlib.util
import queue
import sys
import types
from pathlib import Path
from types import SimpleNamespace as Made
from typing import Any

import numpy as np

from dsim.engine.commits import ScheduledCommits
from dsim.engine.engine import Engine, Limits
from dsim.engine.journal import RequestTable
from dsim.engine.policy import parse
from dsim.engine.request import Request
from dsim.engine.step import Phase, StepOutcome

EMPTY = (
    "grpc", "sangam.logger", "sangam.metrics", "sangam.metrics.constants", "sangam.kv_cache",
    "sangam.kv_cache.kv_cache_transfer", "sangam.kv_cache.paged_kv_cache", "sangam.model", "sangam.model.model_runner",
    "sangam.model.cuda_graph_runner", "sangam.metrics.utils", "sangam.metrics.utils.cuda_timer", "sangam.proto",
    "sangam.sampler", "sangam.sampling_parameters", "sangam.batch", "sangam.worker.base_worker",
    "sangam.worker.gpu_queue", "sangam.worker.model_operation_metrics", "sangam.worker.shared_gpu_resources",
    "sangam.worker.worker_config",
)  # fmt: skip
MEMBERS = (
    "BATCH_PHASE_MIXED", "BATCH_PHASE_PREFILL", "BATCH_PHASE_DECODE", "ColocatedWorkerServiceServicer",
    "DecodeWorkerServiceServicer", "WorkerStateSnapshot", "EnqueueColocatedRequest",
)  # fmt: skip
BLOCK, PAGE, MASK, TOKEN = 4, 4, -1, 1
Row = tuple[int, bool]  # a request, and whether the row is a pass over its whole sequence


class Anything(types.ModuleType):
    """A module with a class of every name, which takes any arguments and has any attributes."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        nothing = lambda *args, **more: None  # noqa: E731
        made = type(name, (), {
            "__init__": lambda self, *args, **more: self.__dict__.update(more), "from_proto": nothing,
        })  # fmt: skip
        for member in MEMBERS:
            setattr(made, member, type(member, (), {}))
        setattr(self, name, made)
        return made


def worker_of(folder: Path) -> Any:
    """The module of the public worker."""
    for name in ("sangam", "sangam.worker"):
        sys.modules[name] = types.ModuleType(name)
    for name in EMPTY:
        sys.modules[name] = Anything(name)
    sys.modules["sangam.logger"].__dict__["init_logger"] = lambda name: Made(
        debug=lambda *args: None, warning=print, error=print, exception=_fail
    )
    metrics = sys.modules["sangam.worker.model_operation_metrics"]
    metrics.__dict__["batch_operation_metric_values"] = lambda **more: (None, None, None)
    found = None
    for name in ("types", "worker.prefill_queue_policy", "worker.colocated_worker"):
        path = folder / "src" / "sangam" / f"{name.replace('.', '/')}.py"
        spec = importlib.util.spec_from_file_location(f"sangam.{name}", path)
        assert spec is not None
        assert spec.loader is not None
        found = sys.modules[f"sangam.{name}"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found)
    return found


def _fail(*said: Any) -> None:
    """Raise what the worker's code caught."""
    error = sys.exc_info()[1]
    assert error is not None
    raise error


class Pool:
    """A pool of pages."""

    def __init__(self, pages: int) -> None:
        self.max_pages, self.page_size, self.allocator = pages, PAGE, Made(num_free=pages, num_used=0)

    def allocate(self, tokens: int) -> list[int]:
        pages = -(-tokens // PAGE)
        assert pages <= self.allocator.num_free, "the worker admits what has no pages"
        self.allocator.num_free -= pages
        return [0] * pages

    def free(self, pages: list[int]) -> None:
        self.allocator.num_free += len(pages)


class Theirs:
    """The public worker, a forward at a time."""

    def __init__(self, module: Any, tokens: int, rows: int, pages: int, quotas: list[int]) -> None:
        self._quotas = quotas  # masks that commit in each forward of a block
        self.pool = Pool(pages)
        self.worker = worker = module.ColocatedWorkerServicer.__new__(module.ColocatedWorkerServicer)
        worker.device, worker._kv_pool, worker._kv_page_size = "cpu", self.pool, PAGE
        worker._max_batch_size, worker._max_tokens_per_iteration, worker._deficit_tokens = rows, tokens, 0
        worker._prefill_queue_policy = module.PrefillQueuePolicy.ARRIVAL_ORDER
        worker._waiting_heap, worker._decode_ready_queue, worker._active_batch, worker._state = [], [], [], {}
        worker._incoming_queue, worker._external_decode_queue = queue.Queue(), queue.Queue()
        worker._state_lock, worker._report_batch = None, _fail
        worker._gpu_queue = Made(submit=lambda step, passes, decodes: self._forward(passes, decodes))
        worker._make_batch_report = self._report
        worker._build_state_snapshot = worker._current_worker_state = lambda *args: None
        self._blocks: dict[str, int] = {}  # of each request
        self._asked: dict[str, Any] = {}  # its last one
        self._rows: list[Row] = []

    def submit(self, index: int, arrival: float, prompt: int, blocks: int) -> None:
        name = f"{index:04}"
        self._blocks[name] = blocks
        self._enqueue(name, arrival, [TOKEN] * prompt + [MASK] * BLOCK * blocks, 0)

    def _enqueue(self, name: str, arrival: float, sequence: list[int], index: int) -> None:
        start = len(sequence) - (self._blocks[name] - index) * BLOCK
        self._asked[name] = asked = Made(
            request_id=name, sequence_ids=sequence, block_start=start, block_end=start + BLOCK, block_index=index,
            arrival_time=arrival, total_generation_blocks=self._blocks[name], request_seed=0, mask_id=MASK,
            prefill_enqueue_time=0.0, sampling_parameters=None, HasField=lambda name: False,
        )  # fmt: skip
        self.worker._incoming_queue.put(asked)

    def forward(self) -> list[Row]:
        """One round of the worker's loop: its rows; empty without any."""
        worker, self._rows = self.worker, []
        worker._drain_incoming()
        worker._drain_external_decodes()
        worker._admit_ready_decode_requests()
        if worker._active_batch or worker._waiting_heap or worker._decode_ready_queue:
            passes = worker._collect_prefill_batch()
            worker._run_batch(passes, [row for row in worker._active_batch if row.step_index > 0])
            worker._evict_completed()
        return self._rows

    def _forward(self, passes: list[Any], decodes: list[Any]) -> tuple[Any, ...]:
        self._rows = [(int(row.request_id), False) for row in decodes] + [(int(row.request_id), True) for row in passes]
        for row in decodes:
            self._commit(row.sequence_ids[0], row, row.step_index)
        results = []
        for row in passes:
            sequence = list(row.sequence_ids)
            self._commit(sequence, row, 0)
            pages = self.pool.allocate(len(sequence))
            results.append(
                {"kv_state": Made(page_ids=pages), "sampled_sequence": sequence, "num_unmasked_tokens": self._quotas[0]}
            )
        self.held = self.pool.max_pages - self.pool.allocator.num_free
        return results, [Made(request_id=row.request_id) for row in decodes], 0, 0.0, None

    def _commit(self, sequence: Any, row: Any, step: int) -> None:
        begin = row.block_start + sum(self._quotas[:step])
        for at in range(begin, min(begin + self._quotas[step], row.block_end)):
            sequence[at] = TOKEN

    def _report(self, *, request_updates: list[Any], **more: Any) -> None:
        """As the scheduler does: the next block of a request whose block is complete waits."""
        for update in request_updates:
            asked = self._asked[update.request_id]
            if getattr(update, "block_completed", False) and asked.block_index + 1 < self._blocks[update.request_id]:
                sequence = [TOKEN] * asked.block_end + [MASK] * (len(asked.sequence_ids) - asked.block_end)
                self._enqueue(update.request_id, asked.arrival_time, sequence, asked.block_index + 1)


def compare(folder: Path, seed: int = 0, worlds: int = 300) -> tuple[int, int]:
    """Run random worlds through both; the numbers of worlds and of steps, all with the same plans and deficits."""
    module, random, steps = worker_of(folder), np.random.default_rng(seed), 0
    for _ in range(worlds):
        count, rows, forwards = (int(random.integers(1, high)) for high in (25, 7, 5))
        tokens, pages = int(random.integers(8, 120)), int(random.integers(21, 80))
        arrival = np.cumsum(random.choice([0, 0, 0, 1, 2, 5, 20], count)).astype(float)
        prompts, blocks = random.integers(1, 60, count), random.integers(1, 6, count)
        spec = f"sangam:{tokens},max_batch={rows},block_length={BLOCK},page_size={PAGE},denoising_steps={forwards}"
        policy, commits = parse(spec), ScheduledCommits(BLOCK, forwards)
        engine = Engine(policy, Limits(pages, 4096, rows), RequestTable(count))
        theirs = Theirs(module, tokens, rows, pages, commits.arrays.schedule.tolist())
        now, came = 0.0, 0
        while came < count or not engine.idle:
            if engine.idle:
                now = max(now, float(arrival[came]))
            while came < count and arrival[came] <= now:
                prompt, answer = int(prompts[came]), BLOCK * int(blocks[came])
                engine.submit(Request(came, float(arrival[came]), prompt, answer))
                theirs.submit(came, float(arrival[came]), prompt, int(blocks[came]))
                came += 1
            plan, expected = engine.schedule(now), theirs.forward()
            assert plan is not None
            rows_of_plan = zip(plan.requests.tolist(), (plan.phases != Phase.REUSE).tolist(), strict=True)
            assert list(rows_of_plan) == expected, (spec, now)
            assert plan.pages == theirs.held, (spec, now)
            assert int(engine._own.record["deficit"][0]) == theirs.worker._deficit_tokens, (spec, now)
            now, steps = now + 1.0, steps + 1
            engine.commit(StepOutcome(1.0, commits.draw(plan)), now)
        assert not theirs.forward(), "the public worker has more to run"
    return worlds, steps


if __name__ == "__main__":
    print("{} worlds, {} steps: the same rows, pages and deficits in each".format(*compare(Path(sys.argv[1]))))
