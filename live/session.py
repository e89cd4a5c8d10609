"""A live run: a policy's engine and executor serve requests, with a warm-up and a clean end."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ..engine.commits import CanvasLaw, Commits, LawDraws, ScheduledCommits, TokenDraws
from ..engine.engine import Engine, Limits
from ..engine.journal import Append, RequestTable, StepRecorder, StepTotals
from ..engine.latency import LatencyModel
from ..engine.rehearsal import rehearse
from ..engine.request import Request
from ..engine.spec import Policy
from ..files.interrupt import asked_to_stop
from ..kernels.device import num_compilations
from .cache import PagedCache
from .canvas_executor import CanvasExecutor
from .canvas_forward import CanvasCache
from .canvas_graphs import GraphCanvasCache
from .canvas_model import CanvasModel
from .device_loop import serve
from .executor import ModelExecutor
from .forward import Forward
from .full_sequence import FullSequenceExecutor, FullSequenceForward, pages_of_use
from .graphs import GraphForward
from .model import Decoder
from .periodic import PeriodicExecutor, PeriodicForward
from .prompts import Prompts
from .refused import check_caps, check_policy
from .warm import warm_attention, warm_experts, warm_kernels

Computes = Forward | CanvasCache  # a model with its cache

WARM_UP = 4  # requests before the clock starts
WARM_CANVASES = 4  # longest warm-up prompt, in canvases
BATCH = 256  # steps journalled at a time, which survive a crash


@dataclass(frozen=True)
class LiveRun:
    table: RequestTable
    totals: StepTotals
    seconds: float
    interrupted: bool
    failure: Exception | None  # the error that ended the run
    num_made_ready: int = 0  # kernels and graphs that the warm-up missed


class GraphCache:
    """The last run's captured forward, reused if it fits."""

    def __init__(self) -> None:
        self._forward: GraphForward | None = None
        self._canvases: GraphCanvasCache | None = None

    def canvases(self, model: CanvasModel, num_pages: int, page: int, longest: int) -> GraphCanvasCache:
        """A captured cache with `num_pages` or more free pages of each kind, for sequences up to `longest` tokens."""
        entry = self._canvases
        if (
            entry is None
            or (entry.model, entry.page_size) != (model, page)
            or entry.pages < -(-longest // page)
            or any(cache.num_pages < num_pages for cache in entry.caches.values())
        ):
            self._canvases = entry = None  # frees memory
            entry = GraphCanvasCache(model, (num_pages, num_pages), page, longest=longest, **place_of(model.embedding))
            self._canvases = entry
        entry.clear()
        return entry

    def forward(
        self, model: Decoder, policy: Policy, num_pages: int, longest: int, max_num_logits: int
    ) -> GraphForward:
        """A captured forward with at least `num_pages` free pages, for sequences of at most `longest` tokens."""
        page, temperature = policy.memory.page_size, policy.unmasking.temperature or 1.0
        entry = self._forward
        if (
            entry is None
            or entry.model is not model
            or (entry.cache.page_size, entry.temperature, entry.max_num_logits) != (page, temperature, max_num_logits)
            or entry.cache.num_pages < num_pages
            or entry.pages < -(-longest // page)
        ):
            self._forward = entry = None  # frees memory
            cache = PagedCache(model.config, num_pages, page, **place_of(model.embedding.weight))
            entry = GraphForward(model, cache, temperature, max_num_logits, longest=longest)
            self._forward = entry
        entry.cache.clear()
        entry.meanwhile = []
        return entry


def place_of(weight: Tensor) -> dict[str, Any]:
    return {"device": str(weight.device), "dtype": weight.dtype}


@dataclass(frozen=True)
class Serving:
    """A policy on a model's device, and what decides tokens and commits."""

    model: Decoder | CanvasModel
    policy: Policy
    limits: Limits
    prompts: Prompts
    draws: Commits | None = None  # None: the weights decide commits
    latency: LatencyModel | None = None  # for elastic chunks
    max_num_logits: int = 8192  # rows of logits at once; full-sequence policies have their own
    graphs: GraphCache | None = None  # of captured steps, for the next run; None: eager
    eos: Sequence[int] = ()  # tokens that end a request
    seed: int = 0  # of canvases' noise and draws

    def engine(self, table: RequestTable, emit: str = "block") -> Engine:
        return Engine(self.policy, self.limits, table, latency=self.latency, emit=emit, eos=bool(self.eos))

    def forward(self, requests: Sequence[Request]) -> Computes:
        model, policy, limits, page = self.model, self.policy, self.limits, self.policy.memory.page_size
        if isinstance(model, CanvasModel):
            tokens = int(max(policy.batching.reserved(policy, r.input_length, r.limit) for r in requests))
            num_pages = min(limits.num_pages, limits.max_batch * -(-tokens // page))
            if self.graphs is not None:
                return self.graphs.canvases(model, num_pages, page, tokens + model.config.canvas_length)
            return CanvasCache(model, (num_pages, num_pages), page, **place_of(model.embedding))
        config, place = model.config, place_of(model.embedding.weight)
        if policy.family == "full-sequence":
            num_pages, scratch = pages_of_use(policy, limits, requests)
            cache = PagedCache(config, num_pages, page, num_scratch=scratch, **place)
            kind: Any = policy.cache  # of those that the executor runs
            if kind.votes:
                return PeriodicForward(model, cache, policy)
            return FullSequenceForward(model, cache, policy)
        longest = min(max(r.input_length + r.limit for r in requests), limits.context_limit)
        longest = -(-longest // policy.block_length) * policy.block_length
        num_pages = min(limits.num_pages, max(1, limits.max_batch * -(-longest // page)))
        if self.graphs is not None:
            return self.graphs.forward(model, policy, num_pages, longest, self.max_num_logits)
        cache = PagedCache(config, num_pages, page, **place)
        return Forward(model, cache, policy.unmasking.temperature or 1.0, self.max_num_logits)

    def executor(self, forward: Computes) -> ModelExecutor | CanvasExecutor:
        """The policy's executor; PolicyError if none runs it."""
        policy, draws = self.policy, self.draws
        if isinstance(forward, CanvasCache):
            assert draws is None or isinstance(draws, LawDraws), "canvases commit by law"
            check_caps(policy)
            return CanvasExecutor(forward, policy, self.prompts, draws, seed=self.seed, eos=self.eos)
        check_policy(policy)
        assert not isinstance(draws, TokenDraws | LawDraws), "of policies refused above"
        if isinstance(forward, FullSequenceForward):
            assert not self.eos, "a full-sequence policy denoises a canvas of fixed length"
            if isinstance(forward, PeriodicForward):
                return PeriodicExecutor(forward, policy, self.prompts, draws)
            return FullSequenceExecutor(forward, policy, self.prompts, draws)
        assert not isinstance(draws, ScheduledCommits), "a schedule is of full-sequence policies"
        return ModelExecutor(
            forward, policy, self.prompts, draws, max_prefill_tokens=self._max_prefill_tokens, eos=self.eos
        )

    @property
    def _max_prefill_tokens(self) -> int:
        return self.limits.max_prefill_tokens or self.policy.batching.max_prefill_tokens

    def warm_up(self, forward: Computes, requests: Sequence[Request], max_batch: int) -> None:
        """Capture graphs for up to `max_batch` sequences; serve a few requests, so that no measured step compiles."""
        policy, limits = self.policy, self.limits
        if isinstance(forward, GraphForward):
            forward.prepare(policy, max_batch)
        if isinstance(forward, GraphCanvasCache):
            forward.prepare(max_batch)
        rehearse(policy, limits, requests, self.latency)
        most_tokens = max(self._max_prefill_tokens, limits.max_batch * policy.width)
        plain = replace(self, draws=None, eos=(), seed=0)
        longest = limits.context_limit
        if isinstance(forward, Forward):
            warm_kernels(forward, policy, most_tokens)
        else:
            warm_experts(*forward.model.experts(), forward.model.config.top_k, "gelu", most_tokens)
            for sliding, cache in forward.caches.items():
                keys, window = cache.keys[0], sliding * forward.model.config.window
                group = forward.model.config.heads // keys.shape[2]
                warm_attention(keys, cache.values[0], group, window=window, scale=1.0)
            longest = WARM_CANVASES * policy.block_length  # kernels do not depend on it
            # All steps of a canvas are alike.
            law = CanvasLaw("warm-up", policy.block_length, 2, least=2, most=2)
            plain = replace(plain, draws=LawDraws(law, 0, WARM_UP))
        few = [
            Request(i, 0.0, min(r.input_length, longest), min(r.output_length, 2 * policy.block_length))
            for i, r in enumerate(requests[:WARM_UP])
        ]
        serve(plain.engine(RequestTable(len(few))), plain.executor(forward), few)
        if isinstance(forward, Forward):
            forward.cache.clear()
        else:
            forward.clear()


def run(
    serving: Serving,
    requests: Sequence[Request],
    *,
    emit: str = "block",
    concurrency: int | None = None,
    append: Append | None = None,
    progress: Callable[[int, float], None] | None = None,
    stop: Callable[[], bool] = lambda: False,
    sample: Callable[[], None] | None = None,
) -> LiveRun:
    """Serve requests (by arrival, s from the start) in real time on the model's device.

    concurrency: of a closed loop, as in `live.device_loop.serve`.
    append: receives the journal's steps in batches. stop: called between steps; true ends the run. sample: called once
    a decoder step, while the device works (profiler/clocks.py). Ctrl-C ends the run between steps, as does a failing
    step: the journal keeps earlier ones, and `failure` is the error. If `append` fails, only the journal ends.
    """
    policy = serving.policy
    forward = serving.forward(requests)
    executor = serving.executor(forward)
    table = RequestTable(len(requests))
    engine = serving.engine(table, emit)
    failures: list[Exception] = []

    def append_until_it_fails(columns: Mapping[str, Any], lists: Mapping[str, Any]) -> None:
        assert append is not None
        if not failures:
            try:
                append(columns, lists)
            except Exception as error:  # a disk error: the device keeps serving
                failures.append(error)

    recorder = None
    if append is not None:
        recorder = StepRecorder(append_until_it_fails, policy.width, BATCH)
    interrupted = threading.Event()
    ready = made_ready(forward)
    with asked_to_stop(interrupted.set):
        begin = time.monotonic()
        try:
            serving.warm_up(forward, requests, min(serving.limits.max_batch, len(requests)))
            ready = made_ready(forward)
            begin = time.monotonic()
            meanwhile = None
            if isinstance(forward, Forward):
                meanwhile = forward.meanwhile = [] if sample is None else [sample]
            serve(
                engine,
                executor,
                requests,
                concurrency=concurrency,
                recorder=recorder,
                sleep=interrupted.wait,
                stop=lambda: interrupted.is_set() or stop(),
                progress=progress,
                meanwhile=meanwhile,
            )
        except Exception as error:  # any: the caller writes the run, then raises it
            failures.insert(0, error)
    seconds = time.monotonic() - begin
    if recorder is not None:
        recorder.flush()
    return LiveRun(
        table,
        engine.totals,
        seconds,
        interrupted=interrupted.is_set(),
        failure=next(iter(failures), None),
        num_made_ready=made_ready(forward) - ready,
    )


def made_ready(forward: Computes) -> int:
    """Kernels compiled and graphs captured so far."""
    num = num_compilations()
    if isinstance(forward, GraphForward | GraphCanvasCache):
        num += forward.graphs.num_captures
    return num


def open_executor(serving: Serving, largest: Sequence[Request], warm_up: Prompts) -> ModelExecutor | CanvasExecutor:
    """An executor on a warm model, for requests no larger than `largest`; warm_up: prompts."""
    forward = serving.forward(largest)
    replace(serving, prompts=warm_up).warm_up(forward, largest, serving.limits.max_batch)
    return serving.executor(forward)
