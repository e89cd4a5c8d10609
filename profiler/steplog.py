"""Read a step log, the JSONL format that any engine can write (docs/steplog.md), and fit a profile to it."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from .. import __version__
from ..engine.commits import CanvasLaw, CommitModel
from ..engine.errors import ProfileError
from ..engine.latency import Features
from ..engine.plain import Positive, Range, Share
from ..engine.policies.canvas import MAX_CANVAS
from ..engine.policy import PRESETS
from ..files.read import cut, json_of, parsing, read_lines, shown
from ..files.schema import FileObject
from .commit_log import CommitLog
from .hardware import capability_of_name
from .logged import FEW_CANVASES, TOKENS, Logged, LoggedSteps, Requests, blocks_done
from .models import ModelShape, model
from .profile import CommitFit, Device, MemoryModel, Profile, Provenance, Setting, digits, shape_faults
from .samples import Bools, Ints, Samples, samples

SCHEMA, VERSION = "dsim-steplog", 1
NEAREST = 9  # steps that a step's time is compared with
KEYS, *LIKES = map(Features._fields.index, ("sum_kv", "tokens", "batch", "prefill_tokens"))
AT_THE_CAP = 0.95  # share of canvases at the cap above which prompts cannot be text
KINDS = ("step", "request", "sequence", "finish")
# Optional keys of a line with defaults; None: derived, or unknown.
HEADER: dict[str, Any] = {
    "num_devices": 1, "weight_bytes": None, "kv_bytes_per_token": None, "num_pages": None, "page_size": 64,
    "temperature": None, "strategy": "low_confidence_dynamic", "prompts": None, "date": "", "torch": None,
    "driver": None, "clocks": None, "settings": {}, "preset": None, "started": None,
}  # fmt: skip
STEP: dict[str, Any] = {
    "device": None, "sum_q_kv": None, "prefill_tokens": 0, "head_rows": None, "sampled_rows": None, "num_forwards": 1,
    "start": None, "requests": None, "phases": None, "row_tokens": None, "row_keys": None, "emitted": None,
    "graph": None, "waiting": None, "running": None, "pages": None,
}  # fmt: skip
REQUEST: dict[str, Any] = {
    "id": None, "output_length": None, "received": None, "arrival": None, "hash_ids": None, "block_size": None,
    "diffusion_max_steps": None,
}  # fmt: skip
SEQUENCE: dict[str, Any] = {"computed": None}
ROWS, SOME_ROWS = Range(0, 2**31 - 1), Range(1, 2**31 - 1)  # per step, as in a journal's columns
PAIRS = Range(0, 2**62)  # query-key pairs and keys per step
LASTING = Range(0, 3600, above=True)  # s: a longer step is a time in another unit


@dataclass(frozen=True)
class Header:
    synthetic: bool  # no device ran the steps
    engine: str
    device: str
    num_devices: Positive
    memory_bytes: Positive  # of one device
    model: ModelShape
    weight_bytes: int  # over all devices
    kv_bytes_per_token: Positive
    num_pages: Positive | None
    page_size: Positive
    block_length: Annotated[int, Range(1, MAX_CANVAS)]
    threshold: Share
    temperature: float | None
    strategy: str
    workload: str
    prompts: str | None
    date: str
    torch: str | None
    driver: str | None
    clocks: str | None
    preset: str | None  # of the engine's scheduler
    started: float | None  # s since 1970, when the log was opened
    settings: dict[str, Setting] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class StepLog:
    header: Header
    steps: Samples
    commits: CommitLog
    commit_steps: Ints  # step number of each row of `commits`
    requests: Logged
    rows: LoggedSteps


def read_log(path: str | Path) -> StepLog:
    """Read and check a log; ProfileError names file, line and both values."""
    return log_of(path, _lines(Path(path)))


def log_of(path: str | Path, lines: Iterator[tuple[str, dict[str, Any]]]) -> StepLog:
    """Of each line's place and object."""
    header = _header(*next(lines, (f"{path}:1", {})))
    features: list[Features] = []
    times: list[tuple[float, float]] = []
    windowed = header.model.windowed
    sequences = _Sequences(header.block_length)
    requests = Requests(windowed.window if windowed else 0, header.block_length)
    for where, values in lines:
        if "kind" not in values:
            raise ProfileError(f"{where}: kind is missing, expected one of {', '.join(KINDS)}")
        kind = values["kind"]
        if not isinstance(kind, str) or kind not in KINDS:
            _section(where, values).text("kind", *KINDS)
        if kind == "step":
            found, time, s = _step(where, values, header.block_length)
            times.append(time)
            if not s.is_null("requests"):
                start = s.number("start")
                pairs, keys = requests.step(s, start, start + time[0], found.batch, len(times) - 1)
                found = found._replace(window_q_kv=pairs, window_kv=keys)
            features.append(found)
        elif kind == "request":
            s = _section(where, values, ("kind", "request", "input_length"), REQUEST)
            request, input_length = s.integer("request"), s.integer("input_length", TOKENS)
            sequences.open(s, request, input_length)
            requests.open(s, request, input_length)
        elif kind == "finish":
            requests.finish(_section(where, values, ("kind", "request", "time")))
        else:
            sequences.step(_section(where, values, ("kind", "request", "step", "block_start", "committed"), SEQUENCE))
    if not features:
        raise ProfileError(f"{path} holds no step lines")
    latency, device = np.array(times).T
    commits, commit_steps = sequences.log()
    rows = requests.steps()
    taken = samples(features, latency, device, blocks_done(rows, len(times), header.block_length))
    return StepLog(header, taken, commits, commit_steps, requests.read(), rows)


def profile_of_log(log: StepLog, name: str, source: str, frontend: float = 0.0) -> Profile:
    """The profile fitted to a log's steps, commits and canvases.

    source: the log's name, for provenance and errors. front: the measured front end.
    """
    from .fit import fit_latency, predict  # fits load SciPy, which reading does not need
    from .fit_canvas import fit_canvas_law
    from .fit_commits import at_fixed_length, fit_commits

    h = log.header
    commits: list[CommitModel] = []
    fits: list[CommitFit] = []
    laws: list[CanvasLaw] = []
    warned = tuple(filter(None, [of_random_tokens(log)]))
    try:
        latency, fit = fit_latency(log.steps[whole(log.steps)])
        if (late := _late(h)) is not None and len(log.requests.canvases.request):
            law, doubts = fit_canvas_law(
                log.requests.canvases, workload=h.workload, canvas_length=h.block_length, late=late, source=source
            )
            laws = [replace(law, source="; ".join((law.source, *warned)))]
            fit = replace(fit, doubts=(*fit.doubts, *doubts))
        if len(log.commits):
            found, judged = fit_commits(
                log.commits, workload=h.workload, threshold=h.threshold, temperature=h.temperature, source=source
            )
            commits, fits = list(at_fixed_length(found, judged)), [judged]
    except ProfileError as error:
        raise ProfileError(f"{source}: {error}") from None
    # A fit to medians underestimates a long tail: scale it to the log's total time.
    scale = digits(float(log.steps.latency.sum() / predict(latency, log.steps.features, log.steps.blocks).sum()))
    latency = replace(latency.scaled(scale), early=digits(h.model.early))
    synthetic = "synthetic log, no device ran it" if h.synthetic else "measured"
    return Profile(
        name=name,
        description=f"{h.model.name} on {h.device}, {h.engine}, from a step log ({synthetic})",
        origin="calibrated" if h.synthetic else "measured",
        family="canvas" if laws else "block-diffusion" if h.block_length > 1 else "autoregressive",
        implementation=h.engine,
        device=Device(h.device, h.num_devices, h.memory_bytes, capability_of_name(h.device)),
        model=h.model,
        latency=latency,
        fit=fit,
        memory=MemoryModel(
            capacity_bytes=h.num_devices * h.memory_bytes,
            weight_bytes=h.weight_bytes,
            kv_bytes_per_token=h.kv_bytes_per_token,
            window_bytes_per_token=h.model.window_bytes_on(h.num_devices),
            vocab=h.model.vocab,
            fixed_num_pages=h.num_pages,
        ),
        commits=tuple(commits),
        provenance=Provenance(
            sources=(source, *warned),
            date=h.date,
            tool_version=__version__,
            torch=h.torch,
            driver=h.driver,
            clocks=h.clocks,
            prompts=h.prompts,
            settings={
                "strategy": h.strategy, "page_size": h.page_size, "block_length": h.block_length,
                "mean_over_fit": scale, **h.settings,
            },
        ),
        commit_fits=tuple(fits),
        canvas_laws=tuple(laws),
        frontend=digits(frontend),
    )  # fmt: skip


def whole(taken: Samples) -> Bools:
    """The steps [steps] to fit to: all but those in less than a third of their likes' time, and each one before.

    The engine's thread came late for the one before, whose time holds some of the short one's; in relative errors a
    step of 1 % of its time outweighs thousands. Its likes: the nine steps of as many rows and tokens that are nearest
    in keys.
    """
    from scipy.ndimage import median_filter  # imported here: reading a log does not need it

    likes = taken.features[:, LIKES]
    order = np.lexsort((taken.features[:, KEYS], *likes.T))
    short = np.zeros(len(order), np.bool_)
    for rows in np.split(order, np.flatnonzero(np.diff(likes[order], axis=0).any(1)) + 1):
        if len(rows) >= NEAREST:
            short[rows] = taken.latency[rows] < median_filter(taken.latency[rows], NEAREST, mode="nearest") / 3
    kept: Bools = ~(short | np.append(short[1:], False))
    return kept


def of_random_tokens(log: StepLog) -> str:
    """A warning if a log's prompts are, or seem to be, random tokens; else empty.

    Random tokens drive every canvas to its cap: their yield is not that of text (changes-2026-11.md 1).
    """
    prompts = log.header.prompts or log.header.workload
    if log.header.block_length > 1 and "random" in prompts.lower():
        return f"its prompts are {prompts}: their yield is not that of text"
    steps = log.requests.canvases.num_steps - log.requests.canvases.flushed
    if _late(log.header) is None or len(steps) < FEW_CANVASES or (steps == steps.max()).mean() < AT_THE_CAP:
        return ""
    return (
        f"{(steps == steps.max()).mean():.0%} of {len(steps)} canvases took {steps.max()} forwards, the maximum, as "
        "with prompts of random tokens or a fixed number of steps: their yield is not that of text"
    )


def _late(header: Header) -> bool | None:
    """Whether the pass that writes a canvas's KV emits it; None for other policies."""
    known = PRESETS.get(header.preset or "")
    if known is None or known.policy.unmasking.strategy != "law":
        return None
    return bool(getattr(known.policy.granularity, "late", False))


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each line's FILE:LINE and object, without empty lines."""
    for number, line in read_lines(path, kind=ProfileError):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        with parsing(where, "JSON", ProfileError):
            value = json_of(line.rstrip())
        if not isinstance(value, dict):
            raise ProfileError(f"{where}: the line is {shown(value)}, expected an object")
        yield where, value


def _section(
    where: str, values: dict[str, Any], keys: tuple[str, ...] | None = None, optional: dict[str, Any] | None = None
) -> FileObject:
    return FileObject(where, "", values, keys, optional=optional, error=ProfileError)


def _header(where: str, values: dict[str, Any]) -> Header:
    if values.get("schema") != SCHEMA:
        raise ProfileError(f"{where}: schema is {cut(values.get('schema'))!r}, expected {SCHEMA!r} in the first line")
    if values.get("version") != VERSION:
        raise ProfileError(f"{where}: version is {cut(values.get('version'))}, expected {VERSION}")
    needed = (
        "schema", "version", "synthetic", "engine", "device", "memory_bytes", "model", "block_length", "threshold",
        "workload",
    )  # fmt: skip
    s = _section(where, values, needed, HEADER)
    if isinstance(s.values["model"], str):
        shape = _named(where, s.text("model"))
    else:
        shape = s.get("model", ModelShape)
        for key, value, expected in shape_faults(shape):
            raise ProfileError(f"{where}: {key} is {value}, expected {expected}")
    derived = {"weight_bytes": shape.weight_bytes, "kv_bytes_per_token": shape.kv_bytes_per_token}
    derived = {key: value for key, value in derived.items() if s.is_null(key)}
    return s.read(Header, model=shape, **derived)


def _named(where: str, name: str) -> ModelShape:
    try:
        return model(name)
    except ProfileError as error:
        raise ProfileError(f"{where}: {error}; or give its shape as an object") from None


def _step(where: str, values: dict[str, Any], block_length: int) -> tuple[Features, tuple[float, float], FileObject]:
    """A step's features, latency and device time, and its checked line."""
    s = _section(where, values, ("kind", "step", "latency", "batch", "tokens", "sum_kv"), STEP)
    s.integer("step")
    batch, tokens = (s.integer(key, SOME_ROWS) for key in ("batch", "tokens"))
    sum_kv = s.integer("sum_kv", PAIRS)
    prefill = s.integer("prefill_tokens")
    if tokens < batch:
        raise s.error("tokens", tokens, f"at least batch, {batch}")
    if prefill > tokens:
        raise s.error("prefill_tokens", prefill, f"at most tokens, {tokens}")
    heads, sampled, pairs = (
        s.get(name, int | None, bounds)
        for name, bounds in (("head_rows", ROWS), ("sampled_rows", ROWS), ("sum_q_kv", PAIRS))
    )
    if heads is None:
        heads = batch * block_length if prefill else tokens
    if pairs is None:  # assume equally many positions in all rows
        pairs = min(round(sum_kv * tokens / batch), 2**62)
    latency = s.number("latency", LASTING)
    device = float("nan") if s.is_null("device") else s.number("device")
    if device <= 0 or device > latency:
        raise s.error("device", device, f"more than 0 and at most latency, {latency:g}")
    features = Features(
        tokens, pairs, sum_kv, heads, heads if sampled is None else sampled, batch, prefill,
        num_forwards=s.integer("num_forwards", SOME_ROWS),
    )  # fmt: skip
    return features, (latency, device), s


class _Sequences:
    """Each request's remaining masks, updated line by line."""

    def __init__(self, block_length: int) -> None:
        self._block = block_length
        self._left: dict[int, tuple[int, int, Bools]] = {}  # prompt, first position, masks
        self._rows: list[tuple[int, int, int]] = []
        self._marks: list[Bools] = []  # per row: masks, computed, committed

    def open(self, s: FileObject, request: int, input_length: int) -> None:
        if request in self._left:
            raise ProfileError(f"{s.path}: request {request} is given twice, expected one line a request")
        self._left[request] = (input_length, -1, np.zeros(self._block, np.bool_))

    def step(self, s: FileObject) -> None:
        """Apply a step's commits to a request's block."""
        request, start, size = s.integer("request"), s.integer("block_start"), self._block
        number = s.integer("step")
        if request not in self._left:
            raise ProfileError(f"{s.path}: request is {request}, expected one that a request line has named before")
        prompt, before, masks = self._left[request]
        if start % size or start < prompt // size * size:
            raise s.error("block_start", start, f"a multiple of {size} from {prompt // size * size} on")
        if start != before:
            if start < before:
                raise s.error("block_start", start, f"at least {before}, the block of the line before")
            if masks.any():
                raise s.error("block_start", start, f"{before}, whose block has {int(masks.sum())} masks left")
            masks = np.arange(start, start + size) >= prompt
        committed = self._positions(s, "committed")
        computed = np.ones(size, np.bool_) if s.is_null("computed") else self._positions(s, "computed")
        wrong = np.flatnonzero(committed & ~(computed & masks))
        if len(wrong):
            where = int(wrong[0])
            why = "computed" if not computed[where] else "a mask"
            raise ProfileError(f"{s.path}: committed holds {where}, expected a position that is {why}")
        self._left[request] = (prompt, start, masks & ~committed)
        if (computed & masks).any():
            self._rows.append((request, start, number))
            self._marks.append(np.stack([masks, computed & masks, committed]))

    def log(self) -> tuple[CommitLog, Ints]:
        """The commits, and each row's step number."""
        request, start, number = np.array(self._rows, np.int64).reshape(-1, 3).T
        marks = np.array(self._marks, np.bool_).reshape(-1, 3, self._block)
        return CommitLog(self._block, request, start, marks[:, 0], marks[:, 1], marks[:, 2]), number

    def _positions(self, s: FileObject, key: str) -> Bools:
        """Mask of the listed positions of the block, from 0."""
        marks = np.zeros(self._block, np.bool_)
        marks[s.get(key, list[int], Range(0, self._block - 1))] = True
        return marks
