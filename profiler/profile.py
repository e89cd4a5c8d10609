"""The profile: a step's cost and yield on one device, model and implementation, and its JSON file."""

import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

from ..engine.cache_overhead import CACHES, PHASES, implementation_of
from ..engine.commits import CanvasLaw, CommitModel, ImportanceDeltas, choose
from ..engine.errors import ProfileError
from ..engine.latency import LatencyModel
from ..engine.plain import Choice, Positive, Range, Share
from ..engine.spec import Policy
from ..files.read import cut, cut_words, did_you_mean, parsed_json, read_text, shown
from ..files.schema import read_as, stored
from ..files.write import check_file, json_text, write_whole
from .hardware import default_max_batch
from .models import ModelShape
from .precision import BITS, Precision
from .samples import KINDS_OF_STEPS

SCHEMA = "dsim-profile"
VERSION = 1
ORIGINS = ("measured", "calibrated", "roofline")
FAMILIES = ("block-diffusion", "autoregressive", "full-sequence", "canvas")
SHIPPED = Path(__file__).parent / "profiles"
DEFAULT = "a100-sdar-8b"
MIN_PAGES = 16
CLOSE = 0.04  # relative, of weights' bytes
HOST_TIMES = ("host_step", "host_request", "sequence")  # an engine's, on any GPU
COSTS_OF = "costs_of"  # setting: the profiles whose host time an engine's data sheet takes

Setting = str | int | float | bool | None
RelativeError = Annotated[float, Range(-1)]  # predicted / measured - 1
Fault = tuple[str, object, str]  # key, value, what is expected


@dataclass(frozen=True)
class Device:
    """GPUs that run one replica together (tensor parallel)."""

    name: str
    count: Positive
    memory_bytes: Positive  # of one
    compute_capability: str = ""  # NVIDIA's, such as 9.0, or AMD's gfx target; empty: unknown


@dataclass(frozen=True)
class KindError:
    """The errors of held-out steps of one kind."""

    kind: Annotated[str, Choice(KINDS_OF_STEPS)]
    num_points: Positive
    median: RelativeError
    by_time: RelativeError  # of the steps' total time
    low: RelativeError  # first and third quartile
    high: RelativeError
    p95: float  # of the absolute error
    doubted: bool  # beyond a bound of fit.py

    def __str__(self) -> str:
        errors = f"median {self.median:+.1%}, by time {self.by_time:+.1%}, 95 % within {self.p95:.1%}"
        return f"{self.num_points} {self.kind}: {errors}{'; doubted' * self.doubted}"

    @property
    def off(self) -> str:
        """The middle half of the errors in words."""
        if self.low < 0 < self.high:
            return f"{100 * -self.low:.0f} % too fast to {100 * self.high:.0f} % too slow"
        ends = [f"{100 * abs(error):.0f}" for error in sorted((self.low, self.high), key=abs)]
        return f"{' to '.join(dict.fromkeys(ends))} % too {('slow', 'fast')[self.low < 0]}"


@dataclass(frozen=True)
class HeldOut:
    """|predicted / measured - 1| of points outside a latency model's fit."""

    num_points: Positive
    median: float
    p95: float


@dataclass(frozen=True)
class Fit:
    """A latency model's domain and quality; None: not measured."""

    domain: tuple[float, float]  # least and greatest tokens per step, measured or trusted
    residual: float | None  # root mean square of (predicted - measured) / measured
    standard_errors: dict[str, float] | None  # by latency coefficient
    relative_uncertainty: float | None  # of an estimate, as stated
    num_points: Positive | None = None  # fitted; each the median of its repeats
    held_out: HeldOut | None = None
    judged_by: tuple[KindError, ...] = ()  # held-out steps by kind, where there are enough
    unidentified: tuple[str, ...] = ()  # coefficients stored as 0
    doubts: tuple[str, ...] = ()  # failed checks of the whole, which make it invalid, one line each


@dataclass(frozen=True)
class MemoryModel:
    """Memory for a replica's KV pages, over all its GPUs (lmdeploy/pytorch/engine/executor/base.py)."""

    capacity_bytes: Positive
    weight_bytes: int
    kv_bytes_per_token: Positive
    vocab: Positive
    utilisation: Share = 0.8  # of the memory left after weights and runtime (cache_max_entry_count)
    fixed_num_pages: Positive | None = None  # overrides the computed number
    window_bytes_per_token: int = 0  # of windowed layers; kv_bytes_per_token has the others
    workspace_bytes: int = 0  # per row of the maximum batch: the sampler's tensors without logits
    draft_weight_bytes: int = 0  # of a block drafter, without what it shares
    draft_bytes_per_token: int = 0  # its keys and values

    def num_pages(self, page: int, max_batch: int, max_prefill_tokens: int) -> int:
        """KV pages of `page` tokens for sequences; one more is kept for dummy rows."""
        return self.fit(page, max_batch, max_prefill_tokens)[0]

    def fit(self, page: int, max_batch: int, max_prefill_tokens: int, logit_rows: int | None = None) -> tuple[int, int]:
        """Pages, and the prefill budget that leaves room for them: halved until 16 pages fit.

        logit_rows: a step's most logit rows, for engines that compute fewer than a prefill's; None: LMDeploy's.
        """
        if self.fixed_num_pages is not None:
            return self.fixed_num_pages, max_prefill_tokens
        budget, runtime = max_prefill_tokens, 0
        rows, free = max_batch * self.workspace_bytes, self.capacity_bytes - self.weight_bytes
        while budget > 0:
            runtime = self.logit_bytes(max_batch, budget, logit_rows)
            pages = int((free - rows - runtime) * self.utilisation // (page * self.kv_bytes_per_token))
            if pages >= MIN_PAGES:
                return pages - 1, budget
            if logit_rows is not None:
                break
            budget //= 2
        pool = MIN_PAGES * page * self.kv_bytes_per_token / self.utilisation
        fit = int((free - pool) * max_batch // max(1, rows + runtime))
        expected = "more memory"
        if 0 < fit < max_batch:
            expected = f"at most {fit} rows"
        raise ProfileError(
            f"of {gb(self.capacity_bytes)} of memory the weights take {gb(self.weight_bytes)}, {max_batch} rows "
            f"{gb(rows)} and their logits {gb(runtime)}, which leaves no room for {MIN_PAGES} KV pages of "
            f"{gb(page * self.kv_bytes_per_token)}: expected {expected}"
        )

    def logit_bytes(self, max_batch: int, max_prefill_tokens: int, logit_rows: int | None) -> int:
        """Bytes of a step's logits; logit_rows as in `fit`."""
        if logit_rows is None:
            return (max_prefill_tokens + 2 * max_batch) * self.vocab * 2
        return logit_rows * self.vocab * 4

    def with_drafter(self) -> "MemoryModel":
        """The memory beside a block drafter, whose keys and values lie on the same pages."""
        per_token = self.kv_bytes_per_token + self.draft_bytes_per_token
        num_pages = self.fixed_num_pages
        if num_pages is not None:
            num_pages = max(1, num_pages * self.kv_bytes_per_token // per_token)
        return replace(
            self, weight_bytes=self.weight_bytes + self.draft_weight_bytes, kv_bytes_per_token=per_token,
            fixed_num_pages=num_pages,
        )  # fmt: skip

    def usual_rows(self, usual: int) -> int:
        """`usual`, or fewer rows if their workspace exceeds half of the memory after weights."""
        if not self.workspace_bytes:
            return usual
        return max(1, min(usual, (self.capacity_bytes - self.weight_bytes) // 2 // self.workspace_bytes))


@dataclass(frozen=True)
class Provenance:
    """Where a profile came from."""

    sources: tuple[str, ...]
    date: str  # ISO
    tool_version: str
    seed: int | None = None
    torch: str | None = None  # measured with
    driver: str | None = None
    clocks: str | None = None  # of the device while measured
    prompts: str | None = None  # of the commit logs
    settings: dict[str, Setting] = field(default_factory=dict)  # unmasking strategy, dtype, graphs, page size ...


@dataclass(frozen=True)
class Prediction:
    """A yield of held-out commit logs, measured and predicted."""

    name: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1.0


@dataclass(frozen=True)
class CommitFit:
    """How well the commit model of these four keys predicts held-out requests."""

    workload: str
    block_length: Positive
    threshold: Share
    temperature: float | None
    num_requests: Positive  # fitted
    num_steps: Positive  # denoise steps of the fitted sequences
    num_held_out: int  # requests
    standard_errors: dict[str, float]  # of the spreads, the stage's gain and the common log-odds
    predictions: tuple[Prediction, ...]
    doubts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Implementation:
    """Other code for a profile's model and device, with what differs."""

    name: str  # as in policies
    implementation: str  # description
    replaces: dict[str, Any] = field(default_factory=dict)  # keys of the profile's file with other values
    sources: tuple[str, ...] = ()  # of these values


@dataclass(frozen=True)
class Profile:
    """A device, a model and an implementation, as the twin sees them."""

    name: str
    description: str
    origin: Annotated[str, Choice(ORIGINS)]
    family: Annotated[str, Choice(FAMILIES)]
    implementation: str
    device: Device
    model: ModelShape
    latency: LatencyModel
    fit: Fit
    memory: MemoryModel
    commits: tuple[CommitModel, ...]  # the first one's workload is the default
    provenance: Provenance
    commit_fits: tuple[CommitFit, ...] = ()  # of the fitted commit models
    focus: ImportanceDeltas | None = None
    canvas_laws: tuple[CanvasLaw, ...] = ()  # of canvas models; the first one's workload is the default
    frontend: float = 0.0  # s outside the engine, both ways: HTTP, tokenising, hand-over; 0: not measured
    implementations: tuple[Implementation, ...] = ()  # alternatives to its own

    def __post_init__(self) -> None:
        windowed = self.model.windowed
        latency = replace(self.latency, layers=self.model.layers, window=windowed.window if windowed else 0)
        object.__setattr__(self, "latency", latency)  # frozen

    @property
    def is_estimate(self) -> bool:
        return self.origin != "measured"

    @property
    def verdict(self) -> str:
        return "estimated, not measured" if self.is_estimate else "measured"

    @property
    def doubts(self) -> list[str]:
        """Failed checks of all fits, one line each; the profile is valid without any."""
        lines = (f"{f.workload} at threshold {f.threshold:g}: {line}" for f in self.commit_fits for line in f.doubts)
        return [*self.fit.doubts, *lines]

    @property
    def failure(self) -> list[str]:
        """That the fit of its steps failed its own checks, if it did."""
        return [f"{self.name} failed its own checks: {'; '.join(self.fit.doubts)}"] if self.fit.doubts else []

    @property
    def workloads(self) -> tuple[str, ...]:
        names = [m.workload for m in self.commits] + [law.workload for law in self.canvas_laws]
        return tuple(dict.fromkeys(names))

    def commit_fit(self, model: CommitModel) -> CommitFit | None:
        """A commit model's fit; None if it was published."""
        key = (model.workload, model.extrapolated_from or model.block_length, model.threshold, model.temperature)
        fits = (f for f in self.commit_fits if (f.workload, f.block_length, f.threshold, f.temperature) == key)
        return next(fits, None)

    def canvas_law(self, workload: str | None, canvas_length: int, cap: int | None = None) -> CanvasLaw:
        """The law of steps per canvas for a run; ProfileError lists those held.

        Laws of this profile's engine come first, then those whose maximum reaches `cap`. Other canvas lengths use the
        nearest one's (`CanvasLaw.of_length`).
        """
        if not self.canvas_laws:
            raise ProfileError(
                f"profile {self.name} holds no law of steps a canvas (canvas_laws is empty): expected one that does, "
                f"of a file or shipped: {', '.join(name for name, p in _named().items() if p.canvas_laws)}"
            )
        chosen = workload or self.canvas_laws[0].workload
        laws = [law for law in self.canvas_laws if law.workload == chosen]
        if not laws:
            names = ", ".join(dict.fromkeys(law.workload for law in self.canvas_laws))
            hint = did_you_mean(chosen, (law.workload for law in self.canvas_laws))
            raise ProfileError(
                f"profile {self.name} holds laws of steps a canvas for {names}; this run asks for {cut(chosen)}{hint}"
            )
        counted = self.counted_length(chosen, canvas_length)
        laws = [law for law in laws if law.canvas_length == counted]
        laws = [law for law in laws if law.engine and law.engine in self.implementation] or laws
        best = min(laws, key=lambda law: 0 if cap is None else (law.most < cap) * 10**9 + abs(law.most - cap))
        return best.of_length(canvas_length)

    def counted_length(self, workload: str, canvas_length: int) -> int:
        """The nearest canvas length with a law of the workload, else this one."""
        lengths = {law.canvas_length for law in self.canvas_laws if law.workload == workload} or {canvas_length}
        return min(lengths, key=lambda length: (abs(math.log(length / canvas_length)), length))

    @property
    def default_max_batch(self) -> int:
        return default_max_batch(self.device.compute_capability)

    def commit_model(
        self, workload: str | None, block_length: int, threshold: float, temperature: float | None = None
    ) -> CommitModel:
        """The commit model for a run; ProfileError lists those held."""
        return choose(self.commits, f"profile {self.name}", workload, block_length, threshold, temperature)


def load(name: str | Path) -> Profile:
    """A profile by file or shipped name; `NAME/IMPLEMENTATION` selects an implementation."""
    path, implementation = located(name)
    if path is None:
        names = list(_named())
        label, hint = cut_words(str(name)), did_you_mean(str(name), names)
        raise ProfileError(f"no profile file or shipped profile is named {label}{hint}; shipped: {', '.join(names)}")
    profile = _parsed(str(path), read_text(path, kind=ProfileError))
    return implemented(profile, implementation) if implementation else profile


@lru_cache(maxsize=64)
def _parsed(path: str, text: str) -> Profile:
    """Cached: a search reads the same file for many replays."""
    return from_json(parsed_json(path, text, kind=ProfileError), path)


def located(name: str | Path) -> tuple[Path | None, str]:
    """A profile's file or None, and the implementation in the name or ""."""
    path, files = Path(name), _shipped_files()
    if os.path.isfile(path):
        return path, ""
    if str(name) in files:
        return files[str(name)], ""
    base, _, implementation = str(name).rpartition("/")
    if os.path.isfile(base):
        return Path(base), implementation
    return files.get(base), implementation


def with_file_of(name: str, place: Callable[[str], str]) -> str:
    """The name with its file's path replaced, if it is a path."""
    path, implementation = located(name)
    if path is None or path.parent == SHIPPED:
        return name
    return f"{place(str(path))}/{implementation}".removesuffix("/")


def implemented(profile: Profile, name: str) -> Profile:
    """The profile with an implementation's costs; ProfileError if it has none of that name.

    A data sheet without the engine's costs takes the host time of its calibrated builds (`_data_sheet_of`).
    """
    implementation = _implementation(profile, name)
    if implementation is None:
        names = ", ".join(entry.name for entry in profile.implementations) or "none but its own"
        raise ProfileError(f"profile {profile.name} holds implementations: {names}; this run asks for {cut(name)}")
    data: Any = to_json(replace(profile, implementations=()))
    subject = f"{profile.model.name} on {profile.device.name}"
    described = {
        "name": f"{profile.name}/{name}", "description": f"{subject}, {implementation.implementation}",
        "implementation": implementation.implementation,
    }  # fmt: skip
    data = _merged(data, {**described, **implementation.replaces})
    data["provenance"]["sources"] += implementation.sources
    return from_json(data, f"implementation {name} of {profile.name}")


def as_run_by(profile: Profile, policy: Policy) -> Profile:
    """The profile with the costs of a policy's implementation, or unchanged if it has none."""
    name = implementation_of(policy)
    return implemented(profile, name) if _implementation(profile, name) else profile


def _implementation(profile: Profile, name: str) -> Implementation | None:
    """A profile's implementation; for a data sheet also one with its engine's host time."""
    implementation = next((entry for entry in profile.implementations if entry.name == name), None)
    # Named as an implementation, or this engine's already, as a scaled copy is.
    chosen = "/" in profile.name or _engine(profile).lower() == name
    like = nearest(profile, name) if implementation is None and profile.origin == "roofline" and not chosen else None
    if like is None:
        return implementation
    data: Any = to_json(like)
    if _runs_as(like) == _runs_as(profile):
        keys = ("name", "description", "origin", "latency", "fit", "provenance")
        return Implementation(name, like.implementation, {key: data[key] for key in keys})
    return _data_sheet_of(name, like)


def _data_sheet_of(engine: str, like: Profile) -> Implementation:
    """An engine's host time on a data sheet: the geometric mean of the builds that were timed, in the parts of `like`.

    No build is nearer to a third one than another. A shipped data sheet assumes one of them and is taken as it is.
    """
    of_engine = [other for other in _shipped().values() if _engine(other).lower() == engine]
    timed = [other for other in of_engine if other.origin != "roofline" and other.latency.host_step > 0]
    builds = [like] if like.origin == "roofline" else timed
    of_a_row = [build.latency.host_step + build.latency.host_request + build.latency.sequence for build in builds]
    level = math.prod(of_a_row) ** (1 / len(builds)) / of_a_row[builds.index(like)]
    latency = {key: digits(level * getattr(like.latency, key)) for key in HOST_TIMES}
    costs_of = " and ".join(build.name for build in builds) + " (geometric mean)" * (len(builds) > 1)
    description = f"{_engine(like)}, its host time as in {costs_of}, the rest from data sheets"
    provenance = {"settings": {COSTS_OF: costs_of}}
    return Implementation(
        engine, description, {"latency": {**latency, "overlap": like.latency.overlap}, "provenance": provenance}
    )


def nearest(profile: Profile, engine: str) -> Profile | None:
    """The shipped profile that gives a data sheet's host time its parts: of the most similar model, then GPU.

    It is of the same family and tells host time from device time: an engine costs a model the same on every GPU.
    """
    candidates = (
        other for other in _shipped().values()
        if (_engine(other).lower(), other.family) == (engine, profile.family) and other.latency.host_step > 0
    )  # fmt: skip
    return max(
        candidates,
        key=lambda other: [x == y for x, y in zip(_runs_as(other), _runs_as(profile), strict=True)],
        default=None,
    )


def _engine(profile: Profile) -> str:
    return profile.implementation.partition(" ")[0].strip(",")


def _runs_as(profile: Profile) -> tuple[object, ...]:
    """Model, GPUs and precision, by how much of an engine's costs goes by them."""
    model, device = profile.model, profile.device
    return model.name, model.experts is None, device.name, device.count, profile.memory.weight_bytes


def _merged(data: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Values updated from `changes`: objects key by key, settings as a whole."""
    merged = dict(data)
    for key, value in changes.items():
        before = merged.get(key)
        if isinstance(before, dict) and isinstance(value, Mapping) and key != "settings":
            value = _merged(before, value)
        merged[key] = value
    return merged


def save(profile: Profile, path: str | Path, force: bool = False) -> None:
    """Write atomically; the same profile gives the same bytes."""
    path = check_file(path, force=force)
    data = to_json(profile)
    from_json(data, str(path))
    write_whole(path, json_text(data) + "\n")


def shipped() -> dict[str, str]:
    """A line about each shipped profile and implementation, by name."""
    return {name: f"{profile.description} ({profile.verdict})" for name, profile in _shipped().items()}


def to_json(profile: Profile) -> dict[str, Any]:
    """JSON types in reading order."""
    return {"schema": SCHEMA, "version": VERSION, **stored(profile)}


def from_json(data: object, path: str) -> Profile:
    """A checked profile from plain values; `path` names it in errors."""
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        schema = data.get("schema") if isinstance(data, dict) else None
        raise ProfileError(f"{path}: schema is {cut(schema)!r}, expected {SCHEMA!r}")
    if data.get("version") != VERSION or isinstance(data["version"], bool):
        raise ProfileError(f"{path}: version is {shown(data.get('version'))}, expected {VERSION}")
    profile = read_as(Profile, path, "", data, ProfileError, ("schema", "version"))
    for key, value, expected in _faults(profile):
        raise ProfileError(f"{path}: {key} is {shown(value)}, expected {expected}")
    return profile


def _faults(profile: Profile) -> Iterator[Fault]:
    """Values that do not fit others."""
    latency, (low, high) = profile.latency, profile.fit.domain
    yield from shape_faults(profile.model)
    if not latency.knots:
        yield "latency.knots", [], "at least one knot"
    for i, ((tokens, seconds), (x, y)) in enumerate(pairwise(latency.knots), 1):
        if x <= tokens:
            yield f"latency.knots[{i}][0]", x, f"above the knot before, {tokens:g} tokens"
        if y < seconds:
            yield f"latency.knots[{i}][1]", y, f"at least the knot before, {seconds:g} s"
    if high < low:
        yield "fit.domain[1]", high, f"at least domain[0], {low:g}"
    for i, overhead in enumerate(latency.cache_overhead):
        if overhead.cache not in CACHES or overhead.phase not in PHASES:
            words = f"a cache of {', '.join(CACHES)} and a phase of {', '.join(PHASES)}"
            yield f"latency.cache_overhead[{i}]", f"{overhead.cache} {overhead.phase}", words
    for i, model in enumerate(profile.commits):
        if len(model.pass_probability) != model.block_length:
            yield f"commits[{i}].pass_probability", [*model.pass_probability], f"{model.block_length} values"
    for i, law in enumerate(profile.canvas_laws):
        ends = [law.least - 1, *(last for last, _ in law.histogram)]
        if law.histogram and (ends[-1] != law.most or any(after <= before for before, after in pairwise(ends))):
            yield (
                f"canvas_laws[{i}].histogram",
                ends[1:],
                f"rising numbers from least, {law.least}, to most, {law.most}",
            )
    names = [entry.name for entry in profile.implementations]
    if len({*names}) < len(names):
        yield "implementations", names, "each name once"


def shape_faults(shape: ModelShape) -> Iterator[Fault]:
    """Values of a `model` that do not fit others."""
    experts = shape.experts
    if experts is not None and experts.top_k > experts.num:
        yield "model.experts.top_k", experts.top_k, f"at most num, {experts.num}"
    if experts is not None and experts.dense_layers > shape.layers:
        yield "model.experts.dense_layers", experts.dense_layers, f"at most layers, {shape.layers}"
    if experts is not None and experts.by_block is not None:
        admitted = experts.by_block.experts
        if not experts.top_k <= admitted <= experts.num:
            expected = f"from top_k, {experts.top_k}, to num, {experts.num}"
            yield "model.experts.by_block.experts", admitted, expected


def gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.3g} GB"


def weights_of(profile: Profile) -> str:
    """By the profile's bytes: a name of BITS, or bytes a parameter."""
    model, size = profile.model, profile.memory.weight_bytes
    distance = {name: abs(size / Precision(name).weight_bytes(model) - 1) for name in BITS}
    nearest = min(distance, key=lambda name: distance[name])
    return nearest if distance[nearest] < CLOSE else f"{size / model.total_params:.2g} bytes a parameter"


def digits(value: float, num: int = 6) -> float:
    """Round to `num` significant digits: a logarithm's last bit must not change a file."""
    return float(f"{value:.{num}g}")


def rounded(latency: LatencyModel) -> LatencyModel:
    """The model with all its times to six significant digits."""
    values: dict[str, Any] = {name: digits(value) for name, value in vars(latency).items() if isinstance(value, float)}
    return replace(latency, **values, knots=tuple((digits(x), digits(y)) for x, y in latency.knots))


def of_family(family: str) -> list[str]:
    return [name for name, profile in _named().items() if profile.family == family]


def _named() -> dict[str, Profile]:
    """Shipped profiles by name, without NAME/IMPLEMENTATION."""
    return {name: profile for name, profile in _shipped().items() if "/" not in name}


def shipped_for(model: str) -> list[str]:
    """Shipped profiles of a model, by its name."""
    return [name for name, profile in _named().items() if profile.model.name == model]


@cache
def _shipped() -> dict[str, Profile]:
    """Shipped profiles by name, with NAME/IMPLEMENTATION, the default first."""
    profiles = [load(path) for path in _shipped_files().values()]
    profiles += [implemented(profile, entry.name) for profile in profiles for entry in profile.implementations]
    return {p.name: p for p in sorted(profiles, key=lambda p: (p.name != DEFAULT, p.name))}


@cache
def _shipped_files() -> dict[str, Path]:
    return {path.stem: path for path in SHIPPED.glob("*.json")}
