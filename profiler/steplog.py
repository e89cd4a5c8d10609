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
from ..engine.part import fields_of, numbers_of
from ..engine.plain import Positive, Range, Share
from ..engine.policies.canvas import MAX_CANVAS
from ..engine.spec import PRESETS, parse
from ..files.read import cut, json_of, parsing, read_lines, shown
from ..files.schema import FileObject, read_as, stored
from .commit_log import CommitLog
from .hardware import capability_of_name
from .logged import (
    FEW_CANVASES,
    ROW_LISTS,
    FinishLine,
    Logged,
    LoggedSteps,
    RequestLine,
    Requests,
    SequenceLine,
    StepLine,
    fault,
)
from .models import ModelShape, model, shape_by_config
from .profile import CommitFit, Device, MemoryModel, Profile, Provenance, Setting, digits, shape_faults
from .samples import Bools, Ints, Samples, samples

SCHEMA, VERSION = "dsim-steplog", 1
NEAREST = 9  # steps that a step's time is compared with
KEYS, *LIKES = map(Features._fields.index, ("sum_kv", "tokens", "batch", "prefill_tokens"))
AT_THE_CAP = 0.95  # share of canvases at the cap above which prompts cannot be text
LINES: dict[str, Any] = {"step": StepLine, "request": RequestLine, "sequence": SequenceLine, "finish": FinishLine}


@dataclass(frozen=True)
class Header:
    """The first line (docs/steplog.md); None: not stated."""

    synthetic: bool  # no device ran the steps
    engine: str
    device: str
    memory_bytes: Positive  # of one device
    model: ModelShape
    block_length: Annotated[int, Range(1, MAX_CANVAS)]
    threshold: Share
    workload: str
    num_devices: Positive = 1
    weight_bytes: int | None = None  # over all devices; None: from the shape, as the next
    kv_bytes_per_token: Positive | None = None
    num_pages: Positive | None = None
    page_size: Positive = 64
    temperature: float | None = None
    strategy: str = "low_confidence_dynamic"
    prompts: str | None = None
    date: str = ""
    torch: str | None = None
    driver: str | None = None
    clocks: str | None = None
    preset: str | None = None  # of the engine's scheduler
    started: float | None = None  # s since 1970, when the log was opened
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
    requests = Requests(windowed.window if windowed else 0, header.block_length)
    for place, values in lines:
        kind = values.get("kind")
        if not isinstance(kind, str) or kind not in LINES:
            raise fault(place, "kind", kind, f"one of {', '.join(LINES)}")
        rows = values.get("requests")
        if isinstance(rows, list):
            repeated = {name: values[name] for name in ROW_LISTS if not isinstance(values.get(name, []), list)}
            values |= {name: [value] * len(rows) for name, value in repeated.items()}
        line = read_as(LINES[kind], place, "", values, ProfileError, ("kind",))
        if kind == "step":
            step, time = _step(place, line, header.block_length)
            if line.requests is not None:
                pairs, keys = requests.step(place, line, len(times))
                step = step._replace(window_q_kv=pairs, window_kv=keys)
            features.append(step)
            times.append(time)
        elif kind == "request":
            requests.open(place, line)
        elif kind == "finish":
            requests.finish(place, line)
        else:
            requests.sequence(place, line)
    if not features:
        raise ProfileError(f"{path} holds no step lines")
    latency, device = np.array(times).T
    commits, commit_steps = requests.commits()
    steps = samples(features, latency, device)
    return StepLog(
        header=header,
        steps=steps,
        commits=commits,
        commit_steps=commit_steps,
        requests=requests.read(),
        rows=requests.steps(),
    )


def profile_of_log(log: StepLog, name: str, source: str, frontend: float = 0.0) -> Profile:
    """The profile fitted to a log's steps, commits and canvases.

    source: the log's name, for provenance and errors. front: the measured front end.
    """
    from .fit import fit_latency, predict  # fits load SciPy, which reading does not need
    from .fit_canvas import fit_canvas_law
    from .fit_commits import fit_commits

    h = log.header
    commits: list[CommitModel] = []
    fits: list[CommitFit] = []
    laws: list[CanvasLaw] = []
    warned = tuple(filter(None, [of_random_tokens(log)]))
    try:
        latency, fit = fit_latency(log.steps[fittable(log.steps)])
        if (late := _late(h)) is not None and len(log.requests.canvases.request):
            law, doubts = fit_canvas_law(
                log.requests.canvases, workload=h.workload, canvas_length=h.block_length, late=late, source=source
            )
            laws = [replace(law, source="; ".join((law.source, *warned)))]
            fit = replace(fit, doubts=(*fit.doubts, *doubts))
        if len(log.commits):
            model, judged = fit_commits(
                log.commits, workload=h.workload, threshold=h.threshold, temperature=h.temperature, source=source
            )
            commits, fits = [model], [judged]
    except ProfileError as error:
        raise ProfileError(f"{source}: {error}") from None
    # A fit to medians underestimates a long tail: scale it to the log's total time.
    scale = digits(float(log.steps.latency.sum() / predict(latency, log.steps.features).sum()))
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
            weight_bytes=h.weight_bytes or h.model.weight_bytes,
            kv_bytes_per_token=h.kv_bytes_per_token or h.model.kv_bytes_per_token,
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


def policy_of(header: Header) -> tuple[str, list[str]]:
    """The SPEC, and logged settings that its preset lacks. ProfileError: unknown preset."""
    if header.preset is None or header.preset not in PRESETS:
        label = "null" if header.preset is None else cut(header.preset)
        raise ProfileError(f"the log's header has preset {label}, expected one of {', '.join(PRESETS)}")
    policy = PRESETS[header.preset].policy
    usual = {field.name: field.default for group in policy.parts() for field in fields_of(group)}
    stated: dict[str, Setting] = dict(header.settings)
    stated["page_size"] = header.page_size
    if header.num_pages is not None:
        stated["num_pages"] = header.num_pages
    if header.block_length > 1:
        stated["canvas_length" if "canvas_length" in usual else "block_length"] = header.block_length
        if policy.unmasking.strategy == "low_confidence_dynamic":
            stated["threshold"] = header.threshold
    changes = []
    for name, value in stated.items():
        if name in usual and value is not None and value != usual[name]:
            changes.append(f"{name}={str(value).lower() if isinstance(value, bool) else value}")
    spec = ",".join([header.preset, *changes])
    parse(spec)
    return spec, [name for name in stated if name not in usual]


def fittable(steps: Samples) -> Bools:
    """The steps [steps] to fit to: all but those in less than a third of their likes' time, and each one before.

    The engine's thread came late for the one before, whose time holds some of the short one's; in relative errors a
    step of 1 % of its time outweighs thousands. Its likes: the nine steps of as many rows and tokens that are nearest
    in keys.
    """
    from scipy.ndimage import median_filter  # imported here: reading a log does not need it

    likes = steps.features[:, LIKES]
    order = np.lexsort((steps.features[:, KEYS], *likes.T))
    short = np.zeros(len(order), np.bool_)
    for rows in np.split(order, np.flatnonzero(np.diff(likes[order], axis=0).any(1)) + 1):
        if len(rows) >= NEAREST:
            short[rows] = steps.latency[rows] < median_filter(steps.latency[rows], NEAREST, mode="nearest") / 3
    keep: Bools = ~(short | np.append(short[1:], False))
    return keep


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
    preset = PRESETS.get(header.preset or "")
    if preset is None or preset.policy.unmasking.strategy != "law":
        return None
    return bool(numbers_of(preset.policy)["late"][0])


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each line's FILE:LINE and object, without empty lines."""
    for number, line in read_lines(path, kind=ProfileError):
        if not line.strip():
            continue
        place = f"{path}:{number}"
        with parsing(place, "JSON", ProfileError):
            value = json_of(line.rstrip())
        if not isinstance(value, dict):
            raise ProfileError(f"{place}: the line is {shown(value)}, expected an object")
        yield place, value


def _header(place: str, values: dict[str, Any]) -> Header:
    if values.get("schema") != SCHEMA:
        raise ProfileError(f"{place}: schema is {cut(values.get('schema'))!r}, expected {SCHEMA!r} in the first line")
    if values.get("version") != VERSION:
        raise ProfileError(f"{place}: version is {cut(values.get('version'))}, expected {VERSION}")
    stated = values.get("model")
    if isinstance(stated, str):
        values = {**values, "model": stored(_named(place, stated))}
    elif isinstance(stated, dict) and "config" in stated:
        config = FileObject(place, "model.config", stated.pop("config"), error=ProfileError)
        values = {**values, "model": stored(shape_by_config(config, "model")) | stated}
    header = read_as(Header, place, "", values, ProfileError, ("schema", "version"))
    for key, value, expected in shape_faults(header.model):
        raise fault(place, key, value, expected)
    return header


def _named(place: str, name: str) -> ModelShape:
    try:
        return model(name)
    except ProfileError as error:
        raise ProfileError(f"{place}: {error}; or give its shape as an object") from None
    except OSError as error:  # a name too long for a path
        raise ProfileError(f"{place}: model is {cut(name)}: {error.strerror}") from None


def _step(place: str, line: StepLine, block_length: int) -> tuple[Features, tuple[float, float]]:
    """A step's features, latency and device time."""
    batch, tokens, prefill, device = line.batch, line.tokens, line.prefill_tokens, line.device
    if tokens < batch:
        raise fault(place, "tokens", tokens, f"at least batch, {batch}")
    if prefill > tokens:
        raise fault(place, "prefill_tokens", prefill, f"at most tokens, {tokens}")
    if device is not None and not 0 < device <= line.latency:
        raise fault(place, "device", device, f"more than 0 and at most latency, {line.latency:g}")
    heads, pairs = line.head_rows, line.sum_q_kv
    if heads is None:
        heads = batch * block_length if prefill else tokens
    if pairs is None:  # assume equally many positions in all rows
        pairs = min(round(line.sum_kv * tokens / batch), 2**62)
    sampled = heads if line.sampled_rows is None else line.sampled_rows
    features = Features(
        tokens=tokens,
        sum_q_kv=pairs,
        sum_kv=line.sum_kv,
        head_rows=heads,
        sampled_rows=sampled,
        batch=batch,
        prefill_tokens=prefill,
        num_forwards=line.num_forwards,
    )
    return features, (line.latency, float("nan") if device is None else device)
