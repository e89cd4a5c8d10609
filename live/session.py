"""A live run: one policy's engine and executor over a list of requests, with warm-up, Ctrl-C and failure in hand."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..engine.commits import Commits, LawDraws, ScheduledCommits, TokenDraws
from ..engine.engine import Engine, Limits
from ..engine.journal import Append, RequestTable, StepRecorder, StepTotals
from ..engine.latency import LatencyModel
from ..engine.policy import Policy
from ..engine.request import Request
from ..files.interrupt import asked_to_stop
from ..kernels.compilations import num_compilations
from .cache import PagedCache
from .canvas import CanvasCache
from .canvas_executor import CanvasExecutor
from .canvas_model import CanvasModel
from .executor import ImportanceDelta, ModelExecutor, check_policy
from .forward import Forward
from .full_sequence import FullSequenceExecutor, FullSequenceForward, cache_of, pages_of_use
from .graphs import GraphForward
from .loop import serve
from .model import Decoder
from .parallel import ParallelForward
from .periodic import PeriodicExecutor, PeriodicForward
from .prompts import Prompts
from .sampling import Sampling
from .warm import warm_kernels

Computes = Forward | CanvasCache  # a model and its cache

WARM_UP = 4  # requests served before the clock starts
WARM_CANVASES = 4  # as many tokens have their prompts at most, where a model denoises canvases
BATCH = 256  # steps handed on at a time: the device is slow, and what is handed on survives a crash of the process


@dataclass(frozen=True)
class LiveRun:
    """The outcome of a live run."""

    table: RequestTable
    totals: StepTotals
    seconds: float
    interrupted: bool
    failure: Exception | None  # what ended it; the requests finished before are in the table
    num_made_ready: int = 0  # kernels compiled and graphs captured while the clock ran: the warm-up missed them


class Kept:
    """The captured forward of the last run, with which the next goes on where it can: graphs outlive requests."""

    def __init__(self) -> None:
        self._forward: GraphForward | None = None

    def forward(
        self, model: Decoder, policy: Policy, num_pages: int, longest: int, max_num_logits: int
    ) -> GraphForward:  # fmt: skip
        """A forward with at least so many pages, free all of them, for sequences of at most `longest` tokens."""
        page, temperature = policy.memory.page_size, policy.unmasking.temperature or 1.0
        found = self._forward
        if (
            found is None
            or found.model is not model
            or (found.cache.page_size, found.temperature, found.max_num_logits) != (page, temperature, max_num_logits)
            or found.cache.num_pages < num_pages
            or found.pages < -(-longest // page)
        ):
            self._forward = found = None  # its memory is wanted
            weight = model.embedding.weight
            cache = PagedCache(model.config, num_pages, page, str(weight.device), weight.dtype)
            self._forward = found = GraphForward(model, cache, temperature, max_num_logits, longest)
        found.cache.clear()
        found.sampling = None
        found.meanwhile = []
        return found


def run(
    model: Decoder | CanvasModel,
    policy: Policy,
    limits: Limits,
    requests: Sequence[Request],
    prompts: Prompts,
    *,
    draws: Commits | None = None,
    latency: LatencyModel | None = None,
    emit: str = "block",
    append: Append | None = None,
    progress: Callable[[int, float], None] | None = None,
    max_num_logits: int = 8192,
    graphs: Kept | None = None,
    watch: Callable[[ImportanceDelta], None] | None = None,
    stop: Callable[[], bool] = lambda: False,
    sampling: Sampling | None = None,
    eos: Sequence[int] = (),
    seed: int = 0,
    sample: Callable[[], None] | None = None,
) -> LiveRun:
    """Serve requests (in order of arrival, s from the start) in real time on the model's device.

    draws: a profile's keyed draws decide what commits; without, the weights do. latency: what an elastic chunk is
    chosen by. append: receives the journal's steps in batches. graphs: decode steps of blocks are captured CUDA
    graphs, kept there for the next run; None: they are not.
    max_num_logits: rows of logits that may exist at once; a full-sequence policy says so itself. sampling: how tokens
    are drawn; without, they are the likeliest. eos: tokens that end a request; none: it has all that it asked for.
    seed: of a canvas's noise and draws.
    sample: called once a step while the device works on it, of a decoder's steps (profiler/clocks.py).
    watch: told how the importance of each decode step's masks grew (see ModelExecutor). stop: asked between steps;
    true ends the run. Ctrl-C ends it between two steps, too, and so does a step that fails: the journal keeps what was
    done, and `failure` says why. An `append` that fails ends the journal and not the run; `failure` says that, too.
    """
    # Tokens that are drawn are drawn eagerly.
    forward = open_forward(model, policy, limits, requests, max_num_logits, graphs if sampling is None else None)
    if isinstance(forward, Forward):
        forward.sampling = sampling
    executor = open_steps(forward, policy, limits, prompts, draws, watch, eos, seed)
    table = RequestTable(len(requests))
    engine = Engine(policy, limits, table, latency=latency, emit=emit, eos=bool(eos))
    width = policy.block_length * (2 if policy.obs else 1)
    lost: list[Exception] = []  # why the journal has ended before the run
    recorder = None if append is None else StepRecorder(_until_it_fails(append, lost), width, BATCH)
    failure: Exception | None = None
    told = threading.Event()
    ready = made_ready(forward)
    with asked_to_stop(told.set):
        begin = time.monotonic()
        try:
            if isinstance(forward, GraphForward):
                forward.prepare(policy, min(limits.max_batch, len(requests)), draws is not None)
            _warm_up(forward, policy, limits, latency, requests, prompts)
            ready = made_ready(forward)
            begin = time.monotonic()
            meanwhile = None
            if isinstance(forward, Forward):
                meanwhile = forward.meanwhile = [] if sample is None else [sample]
            serve(
                engine, executor, requests, recorder=recorder, sleep=told.wait,
                stop=lambda: told.is_set() or stop(), progress=progress, meanwhile=meanwhile,
                prepare=executor.prepare if isinstance(executor, ModelExecutor) else None,
            )  # fmt: skip
        except Exception as error:  # whatever it was, what is done is not lost: the caller writes it, then raises this
            failure = error
    seconds = time.monotonic() - begin
    if recorder is not None:
        recorder.flush()
    failure = next(iter(lost), None) if failure is None else failure
    return LiveRun(table, engine.totals, seconds, told.is_set(), failure, made_ready(forward) - ready)


def _until_it_fails(append: Append, failures: list[Exception]) -> Append:
    """`append` up to its first failure, which is added to `failures`; later steps are not journalled."""

    def appended(columns: Mapping[str, Any], lists: Mapping[str, Any]) -> None:
        if failures:
            return
        try:
            append(columns, lists)
        except Exception as error:  # of the disk, whatever it is: the device goes on serving
            failures.append(error)

    return appended


def made_ready(forward: Computes) -> int:
    """Kernels compiled and graphs captured so far."""
    return num_compilations() + (forward.num_captures if isinstance(forward, GraphForward) else 0)


def open_executor(
    model: Decoder | CanvasModel, policy: Policy, limits: Limits, requests: Sequence[Request], prompts: Prompts, *,
    draws: Commits | None = None, latency: LatencyModel | None = None, warm_up: Prompts,
    max_num_logits: int = 8192, graphs: Kept | None = None, eos: Sequence[int] = (), seed: int = 0,
) -> ModelExecutor | CanvasExecutor:  # fmt: skip
    """An executor for requests that are yet to come, none of them larger than `requests`, on a model that is warm.

    eos, seed: see `run`.
    """
    forward = open_forward(model, policy, limits, requests, max_num_logits, graphs)
    if isinstance(forward, GraphForward):
        forward.prepare(policy, limits.max_batch, draws is not None)
    _warm_up(forward, policy, limits, latency, requests, warm_up)
    return open_steps(forward, policy, limits, prompts, draws, eos=eos, seed=seed)


def open_forward(
    model: Decoder | CanvasModel, policy: Policy, limits: Limits, requests: Sequence[Request],
    max_num_logits: int = 8192, graphs: Kept | None = None,
) -> Computes:  # fmt: skip
    """`make_forward` of a decoder, or a canvas model's cache."""
    if not isinstance(model, CanvasModel):
        return make_forward(model, policy, limits, requests, max_num_logits, graphs)
    tokens = max(policy.batching.reserved(policy, r.input_length, r.limit) for r in requests)
    num_pages = min(limits.num_pages, limits.max_batch * -(-int(tokens) // policy.memory.page_size))
    weight = model.embedding
    return CanvasCache(model, (num_pages, num_pages), policy.memory.page_size, str(weight.device), weight.dtype)


def open_steps(
    forward: Computes, policy: Policy, limits: Limits, prompts: Prompts, draws: Commits | None = None,
    watch: Callable[[ImportanceDelta], None] | None = None, eos: Sequence[int] = (), seed: int = 0,
) -> ModelExecutor | CanvasExecutor:  # fmt: skip
    """`make_executor` of a decoder's forward, or what runs a canvas model's plans."""
    if isinstance(forward, Forward):
        return make_executor(forward, policy, limits, prompts, draws, watch, eos)
    assert draws is None or isinstance(draws, LawDraws), "canvases commit by law"
    return CanvasExecutor(forward, policy, prompts, draws, seed, eos)


def make_forward(
    model: Decoder, policy: Policy, limits: Limits, requests: Sequence[Request], max_num_logits: int = 8192,
    graphs: Kept | None = None,
) -> Forward:  # fmt: skip
    """The model and a cache with as many pages as the requests may touch; `graphs`: as in `run`."""
    weight, config, page = model.embedding.weight, model.config, policy.memory.page_size
    if policy.family == "full-sequence":
        num_pages, scratch = pages_of_use(policy, limits, requests)
        cache = PagedCache(config, num_pages, page, str(weight.device), weight.dtype, scratch)
        runs = PeriodicForward if cache_of(policy).keeps_outputs else FullSequenceForward
        return runs(model, cache, policy)
    num_pages = min(limits.num_pages, _pages_of_use(policy, limits, requests))
    if graphs is not None:
        return graphs.forward(model, policy, num_pages, _longest(policy, limits, requests), max_num_logits)
    if model.ranks is not None:
        config = model.ranks.config  # of a share
    cache = PagedCache(config, num_pages, page, str(weight.device), weight.dtype)
    kind = Forward if model.ranks is None else ParallelForward
    return kind(model, cache, policy.unmasking.temperature or 1.0, max_num_logits)


def make_executor(
    forward: Forward, policy: Policy, limits: Limits, prompts: Prompts,
    draws: Commits | None = None, watch: Callable[[ImportanceDelta], None] | None = None,
    eos: Sequence[int] = (),
) -> ModelExecutor:  # fmt: skip
    """The executor of the policy's plans; PolicyError where a policy asks for what no executor does."""
    check_policy(policy)
    assert not (eos and policy.family == "full-sequence"), "a full-sequence policy denoises a canvas of fixed length"
    assert not isinstance(draws, TokenDraws), "of policies refused above"
    assert watch is None or policy.family != "full-sequence", "a full-sequence policy evicts nothing"
    if isinstance(forward, PeriodicForward | FullSequenceForward):
        assert not isinstance(draws, LawDraws), "a law is of blocks that are edited, or of canvases"
        if isinstance(forward, PeriodicForward):
            return PeriodicExecutor(forward, policy, prompts, draws)
        return FullSequenceExecutor(forward, policy, prompts, draws)
    assert not isinstance(draws, ScheduledCommits), "a schedule is of full-sequence policies"
    budget = limits.max_prefill_tokens or policy.batching.max_prefill_tokens
    return ModelExecutor(forward, policy, prompts, draws, budget, watch, eos)


def _pages_of_use(policy: Policy, limits: Limits, requests: Sequence[Request]) -> int:
    """More pages than the largest batch of the longest requests takes are never touched."""
    return max(1, limits.max_batch * -(-_longest(policy, limits, requests) // policy.memory.page_size))


def _longest(policy: Policy, limits: Limits, requests: Sequence[Request]) -> int:
    """Tokens of the longest request's canvas."""
    longest = max(request.input_length + request.limit for request in requests)
    return -(-min(longest, limits.context_limit) // policy.block_length) * policy.block_length


def _warm_up(
    forward: Computes, policy: Policy, limits: Limits, latency: LatencyModel | None, requests: Sequence[Request],
    prompts: Prompts,
) -> None:  # fmt: skip
    """Serve some of the requests with the clock's hands off, so that the first measured step compiles nothing."""
    # Attention of a canvas model is PyTorch's own, compiled for no length, and a long prompt's mask is its square.
    longest = WARM_CANVASES * policy.block_length if isinstance(forward, CanvasCache) else limits.context_limit
    few = [
        Request(i, 0.0, min(r.input_length, longest), min(r.output_length, 2 * policy.block_length))
        for i, r in enumerate(requests[:WARM_UP])
    ]
    if isinstance(forward, Forward):
        budget = limits.max_prefill_tokens or policy.batching.max_prefill_tokens
        warm_kernels(forward, policy, max(budget, limits.max_batch * policy.width))
    engine = Engine(policy, limits, RequestTable(len(few)), latency=latency)
    serve(engine, open_steps(forward, policy, limits, prompts), few)
    engine.make_ready()
    (forward.cache if isinstance(forward, Forward) else forward).clear()
