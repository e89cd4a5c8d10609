"""Fields that several questions share, and the worlds that they ask about."""

from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from typing import Annotated as A

from ..engine.errors import DsimError
from ..files.read import cut, float_of
from . import choices
from .declared import Opt, Watch

if TYPE_CHECKING:
    from ..results.fleet_file import FleetWords
    from ..results.world import World
    from .objects import PolicyLike, ProfileLike, TraceLike

# The panels of a command's help, in order.
PANELS = (
    "What to do", "Traffic", "Trace file", "Policy and profile", "Model and device", "Fleet and price",
    "SLOs and quality", "Search", "Measurement", "Server", "Logs", "Following", "Execution", "Output",
)  # fmt: skip
SPEC = "name[:value][,field=value...] or a TOML file"


def policies() -> Iterable[str]:
    from ..engine.policy import PRESETS

    return PRESETS


def profiles() -> Iterable[str]:
    from ..profiler.profile import shipped

    return shipped()


def percent(name: str, text: str) -> float:
    """`2%` or `0.02`."""
    value = float_of(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    if not 0 < value <= 1:
        raise DsimError(f"{name} is {cut(text)}, expected a share above 0% and up to 100%, such as 2%")
    return value


def check_range(name: str, value: float, low: float, high: float) -> None:
    """DsimError outside low to high."""
    if not low <= value <= high:
        raise DsimError(f"{name} is {cut(value)}, expected {low} to {high}")


def shares(name: str, text: str) -> tuple[float, ...]:
    return tuple(percent(name, item) for item in text.split(","))


# Options that several questions declare, each with its own default.
ONE_POLICY = Opt(f"{SPEC}.", "SPEC", "Policy and profile", ("--policy",), policies)
MANY_POLICIES = Opt(f"{SPEC}; repeat to compare.", "SPEC", "Policy and profile", ("--policy",), policies)
TRACE = Opt(f"A trace file, or: {', '.join(choices.TRACES)}.", "TRACE", values=lambda: choices.TRACES)
CHECK_RULES = Opt("A rule of your own runs checked in Python to the end, not only at first.", "", "Policy and profile")
WORKLOAD = Opt("The profile's commit model to draw from; its first by default.", "W", "Policy and profile")
FRONTEND = Opt(
    "Time between client and engine, both directions; the profile's by default.", "SECONDS", "Policy and profile"
)
EMIT = Opt(
    f"What reaches the client when: {', '.join(choices.EMIT)}.", "E", "SLOs and quality", values=lambda: choices.EMIT
)
PROFILE = Opt("A profile file, or one that `dsim profiles` lists.", "P", "Policy and profile", values=profiles)
YIELD = Opt(
    "A yield in place of the profile's commit models: tokens a denoise step (3.2), per-forward:X, "
    "a .csv by threshold, or a step log.", "Y", "Policy and profile", ("--yield",),
)  # fmt: skip
OVERWRITE = Opt("Overwrite the file.", "", "Output")
LENGTHS = Opt(
    f"Other lengths than the trace's: {', '.join(choices.LENGTHS)}, {choices.LENGTH_FORMS}, or a trace; "
    "then ,max_tokens=N: a limit for all.", "L", "Traffic",
)  # fmt: skip
ARRIVAL = Opt(
    f"One of: {', '.join(choices.ARRIVALS)}; gamma and weibull with ,cv=C: of their gaps.", "A", "Traffic",
    values=lambda: choices.ARRIVALS,
)  # fmt: skip
RATE = Opt("Requests per second; the trace's own by default.", "R", "Traffic")
PER_REPLAY = Opt("Requests in a replay; by default enough for one pass over the trace, 6000 to 24000.", "N", "Traffic")
SLO = Opt(
    "[class/][stat:]metric=bound: ttft=2s, 50ms/token, p90:tpot_chunk=50ms, chat/95%:ttft=2s; repeat.", "SLO",
    "SLOs and quality", ("--slo",),
)  # fmt: skip
MISSING_FAILS = Opt("A request without a metric misses bounds on it.", "", "SLOs and quality", needs=("slos",))
ROUTER = Opt(
    f"One of: {', '.join(choices.ROUTERS)}; or your own: ./mine.py:ROUTER.",
    "R",
    "Fleet and price",
    values=lambda: choices.ROUTERS,
)
REPLICAS = Opt("Replicas behind the router; by default the policy file's number, or 1.", "N", "Fleet and price")
ATTAINMENT = Opt(
    "Share of arrivals that must meet all SLOs without a statistic.", "X%", "SLOs and quality", read=percent, text="99%"
)
GPU_HOUR = Opt("Price of one GPU per hour; adds costs to the result.", "PRICE", "Fleet and price")
TIME_UNIT = Opt("Unit of the file's times, if its format has none.", "|".join(choices.TIME_UNITS), "Trace file")
COLUMNS = Opt("The trace's own columns, such as arrival=sent,input=num_in,output=num_out.", "ours=C,...", "Trace file")
ONLY = Opt("Keep this model's rows of a log, or the rows with COLUMN=VALUE.", "model=NAME", "Trace file")
SEED = Opt("Same seed, same bytes.", "S", "Execution")
JOBS = Opt("Replays at once; by default all cores, on Ray all its CPUs.", "N", "Execution")
EOS = Opt(
    "Requests end at an EOS that no scheduler foresees; the default if --lengths names a workload.", "", "Traffic"
)
ENDS_AT_EOS = Opt("Requests end at the checkpoint's EOS, if it comes before their limit.", "", "Model and device")
ENSEMBLE = Opt(
    "Also use N profiles drawn from the profile's uncertainty; 19 or more give 90 % intervals.",
    "N",
    "Policy and profile",
)
FAIL_ON_SLO = Opt(
    "End with 1 if an SLO is missed; without a statistic, by over 1 % of requests.", "", "SLOs and quality",
    ("--fail-on-slo",), needs=("slos",),
)  # fmt: skip
COMMIT_MODELS = Opt(
    "A profile that provides the commit models and importance deltas, for random weights.", "P", "Policy and profile"
)
MIN_QUALITY = Opt("Least quality relative to the full cache, such as 98%.", "Q", "SLOs and quality")
QUALITY_TABLE = Opt("Your own scores instead of the published ones.", "CSV", "SLOs and quality")
WEIGHTS = Opt(
    f"Of a data sheet's model: {', '.join(choices.WEIGHTS)}; by default its checkpoint's.", "W", "Model and device",
    needs=("gpu", "roofline"),
)  # fmt: skip
KV = Opt("Its keys and values: bf16 or fp8.", "K", "Model and device", needs=("gpu", "roofline"))
TP = Opt("Of a data sheet: GPUs of a replica (tensor parallel).", "N", "Model and device", needs=("gpu", "roofline"))


def out(text: str) -> Opt:
    return Opt(text, "DIR", "Output", ("-o", "--out"))


RUN_OUT = out("Write the run and report.html.")


@dataclass(frozen=True, kw_only=True)
class OfFile:
    """How a trace's file is read."""

    time_unit: A[str | None, TIME_UNIT] = None
    columns: A[str | None, COLUMNS] = None
    only: A[str | None, ONLY] = None
    skip_bad: A[bool, Opt("Leave bad rows out and count them.", "", "Trace file")] = False


@dataclass(frozen=True, kw_only=True)
class Coded:
    allow_code: A[
        Sequence[str | Path],
        Opt(
            "A code file that a TOML file, a table or a run may load; repeat (docs/security.md).", "FILE.py",
            "Policy and profile", exists=True, needs=("spec",),
        ),
    ] = ()  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What clients see."""

    emit: A[
        str,
        EMIT,
    ] = "block"
    missing_fails: A[bool, MISSING_FAILS] = False


@dataclass(frozen=True)
class OfTrace(OfFile, Coded, Seen):
    """A trace, its traffic, and what serves it."""

    trace: A[
        "TraceLike",
        TRACE,
    ]
    _: KW_ONLY
    arrival: A[str, ARRIVAL] = "trace"
    lengths: A[str | None, LENGTHS] = None
    seed: A[int, SEED] = 0
    workload: A[str | None, WORKLOAD] = None
    check_rules: A[bool, CHECK_RULES] = False


@dataclass(frozen=True, kw_only=True)
class InTwin(OfTrace):
    """Of a twin's replays."""

    frontend: A[
        float | None,
        FRONTEND,
    ] = None
    yields: A[
        str | None,
        YIELD,
    ] = None
    ensemble: A[int | None, ENSEMBLE] = None


@dataclass(frozen=True, kw_only=True)
class OnFleet(InTwin):
    """A fleet: one profile with replicas, or pools."""

    profile: A["ProfileLike", PROFILE] = choices.PROFILE
    replicas: A[int | None, REPLICAS] = None
    router: A[str, ROUTER] = "round-robin"
    pools: A[
        Sequence[str],
        Opt(
            "[NAME:]COUNT@PROFILE,POLICY: a pool of the fleet, in place of --policy; repeat.",
            "POOL",
            "Fleet and price",
            ("--pool",),
        ),
    ] = ()
    links: A[
        Sequence[str],
        Opt(
            "BANDWIDTH[,LATENCY][,field=value...], such as 450GB/s,10us: from a prefill pool to another; repeat.",
            "LINK", "Fleet and price", ("--link",),
        ),
    ] = ()  # fmt: skip
    decider: A[
        str,
        Opt(
            f"Which requests a prefill pool takes: {', '.join(choices.DECIDERS)}, or ./mine.py:DECIDER; then "
            ",field=value...", "D", "Fleet and price", values=lambda: choices.DECIDERS,
        ),
    ] = "always"  # fmt: skip
    fleet: A[
        str | Path | None,
        Opt("A TOML file with pools, links, router, decider, scaler and startup.", "FILE", "Fleet and price"),
    ] = None

    def fleet_words(self, policies: Sequence[str] | None, **extra: str) -> "FleetWords":
        """policies: as named, if they are. DsimError for fields that pools replace."""
        from ..results.fleet_file import FleetWords

        words = FleetWords(tuple(self.pools), tuple(self.links), self.router, self.decider, **extra).or_file(self.fleet)
        if words.pools:
            for name, value, usual in (
                ("--policy", policies, None), ("--replicas", self.replicas, None),
                ("--profile", self.profile, choices.PROFILE), ("--yield", self.yields, None),
            ):  # fmt: skip
                if value != usual:
                    raise DsimError(f"--pool is {cut(words.pools[0])} and {name} is {cut(value)}, expected pools alone")
        return words


@dataclass(frozen=True, kw_only=True)
class Somewhere:
    """Where replays run."""

    ray: A[str | None, Opt("HOST:PORT of a running Ray cluster to replay on, or auto.", "ADDR", "Execution")] = None


@dataclass(frozen=True, kw_only=True)
class Priced:
    currency: A[str, Opt("Currency of the price.", "C", "Fleet and price", needs=("gpu_hour",))] = "USD"


@dataclass(frozen=True, kw_only=True)
class Forced:
    force: A[bool, Opt("Replace the output.", "", "Output", needs=("out",))] = False

    @property
    def folder(self) -> Path | None:
        return path_of(getattr(self, "out"))  # noqa: B009  (each question has its own)


@dataclass(frozen=True, kw_only=True)
class Paced:
    """How many requests, and how fast."""

    rate: A[float | None, RATE] = None
    num_requests: A[int | None, Opt("How many requests to replay.", "N", "Traffic")] = None
    time_scale: A[float | None, Opt("Multiply the trace's gaps.", "X", "Traffic")] = None


@dataclass(frozen=True, kw_only=True)
class OnDevice:
    """A model on a device."""

    random_weights: A[
        str | None,
        Opt(
            "Instead of --model: random weights for a config.json, or sdar-8b ... (docs/checkpoints.md).",
            "CONFIG",
            "Model and device",
        ),
    ] = None
    device: A[str | None, Opt("cuda or cpu; by default the GPU, if there is one.", "D", "Model and device")] = None
    graphs: A[
        bool | None,
        Opt("Decode steps are captured CUDA graphs; the default on a GPU and of a data sheet.", "", "Model and device"),
    ] = None
    mask_token_id: A[
        int | None, Opt("The mask token's id, if the directory does not state it.", "N", "Model and device")
    ] = None
    block_length: A[
        int | None, Opt("The block that the directory's weights were trained with.", "N", "Model and device")
    ] = None
    tokenizer: A[
        str | None, Opt("tokenizer.json or its folder; the model's own by default.", "PATH", "Model and device")
    ] = None


def kept_folder(out: Path | None, watch: Watch) -> "tuple[TemporaryDirectory[str] | None, Path | None]":
    """A run's folder; for Python a temporary one, with the object that removes it."""
    if out is not None or not watch.in_python:
        return None, out
    temporary = TemporaryDirectory(prefix="dsim-")
    return temporary, Path(temporary.name) / "run"


# ---- worlds --------------------------------------------------------------------------------------------------


def path_of(path: str | Path | None) -> Path | None:
    return None if path is None else Path(path)


def world_fields(question: Any, policies: Sequence[str]) -> dict[str, Any]:
    """A question's fields of a World; policies: named by the user, so that their code may be loaded."""
    from ..results.slo import Slo
    from ..results.world import World, named_code

    of_files = question.allow_code or any(".py:" in spec or spec.endswith(".toml") for spec in policies)
    if getattr(question, "check_rules", False) and policies and not of_files:
        raise DsimError(f"--check-rules is given and --policy is {', '.join(policies)}, expected one of a file")
    shared = {field.name for field in fields(question)} & {field.name for field in fields(World)} - FLEET_FIELDS
    return {name: getattr(question, name) for name in shared} | {
        "slos": tuple(str(Slo.parse(text)) for text in question.slos),
        "missing_passes": not question.missing_fails,
        "allow_code": named_code([*policies, getattr(question, "router", "")], question.allow_code),
    }


# Of a World, from FleetWords or named by each question.
FLEET_FIELDS = {"trace", "policy", "profile", "replicas", "pools", "links", "decider", "scaler", "startup"}


def worlds_of(
    question: Any, policies: "PolicyLike | Sequence[PolicyLike]", profile: "ProfileLike", *,
    candidates: Sequence[str] = (), **changes: Any,
) -> "list[World]":  # fmt: skip
    """One a policy, in names and files, which other processes can read.

    candidates: further policies of the user, whose code may be loaded. changes: other values than the question's.
    """
    from ..planner.grid import check_together
    from ..results.world import World, different
    from .objects import READING, profile_name, spec_of, trace_name

    specs = different(list(map(spec_of, listed(policies))))
    values = world_fields(question, [*specs, *candidates])
    if not isinstance(question.trace, str | Path):  # read with these options
        values = {name: value for name, value in values.items() if name not in READING}
    values |= {"trace": trace_name(question.trace, vars(question)), "profile": profile_name(profile)}
    first = World(**{**values, "policy": specs[0], **changes})
    check_together(first)
    return [replace(first, policy=spec) for spec in specs]


def listed(policies: "PolicyLike | Sequence[PolicyLike]") -> "Sequence[PolicyLike]":
    if isinstance(policies, str) or not isinstance(policies, Sequence):
        return [policies]
    if policies == []:
        raise DsimError("no policy is given, expected at least one")
    return policies


def name_of(value: "PolicyLike | ProfileLike") -> str:
    return str(value) if isinstance(value, str | Path) else value.name
