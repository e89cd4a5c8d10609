"""Fields that several questions share, and the worlds that they ask about."""

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeVar

from ..engine.errors import DsimError
from ..files.read import cut
from . import choices
from .declared import Watch

if TYPE_CHECKING:
    from ..profiler.measure import Opened
    from ..results.fleet_file import FleetWords
    from ..results.world import World
    from .objects import PolicyLike, ProfileLike, TraceLike

R = TypeVar("R")


def check_range(name: str, value: float, low: float, high: float) -> None:
    """DsimError outside low to high."""
    if not low <= value <= high:
        raise DsimError(f"{name} is {cut(value)}, expected {low} to {high}")


@dataclass(frozen=True, kw_only=True)
class OfFile:
    """How a trace's file is read."""

    time_unit: str | None = None
    columns: str | None = None
    only: str | None = None
    skip_bad: bool = False


@dataclass(frozen=True, kw_only=True)
class Coded:
    """Code files that may be loaded."""

    allow_code: Sequence[str | Path] = ()


@dataclass(frozen=True)
class OfTrace(OfFile, Coded):
    """A trace, its traffic, and what serves it."""

    trace: "TraceLike"
    _: KW_ONLY
    arrival: str = "trace"
    lengths: str | None = None
    seed: int = 0
    workload: str | None = None
    check_rules: bool = False
    emit: str = "block"


@dataclass(frozen=True, kw_only=True)
class InTwin(OfTrace):
    """Of a twin's replays."""

    frontend: float | None = None
    yields: str | None = None


@dataclass(frozen=True, kw_only=True)
class OnFleet(InTwin):
    """A fleet: one profile with replicas, or pools."""

    profile: "ProfileLike" = choices.PROFILE
    replicas: int | None = None
    router: str = "round-robin"
    pools: Sequence[str] = ()
    links: Sequence[str] = ()
    decider: str = "always"
    fleet: str | Path | None = None

    def fleet_words(self, policies: Sequence[str] | None, **extra: Any) -> "FleetWords":
        """policies: as named, if they are. DsimError for fields that pools replace."""
        from ..results.fleet_file import FleetWords

        words = FleetWords(
            pools=tuple(self.pools), links=tuple(self.links), router=self.router, decider=self.decider, **extra
        ).or_file(self.fleet)
        replaced: dict[str, object] = {"--policy": policies, "--replicas": self.replicas, "--yield": self.yields}
        if self.profile != choices.PROFILE:
            replaced["--profile"] = self.profile
        for name, value in replaced.items():
            if words.pools and value is not None:
                raise DsimError(f"--pool is {cut(words.pools[0])} and {name} is {cut(value)}, expected pools alone")
        return words


@dataclass(frozen=True, kw_only=True)
class Somewhere:
    """Where replays run."""

    ray: str | None = None


@dataclass(frozen=True, kw_only=True)
class Priced:
    """A price, and its unit."""

    gpu_hour: float | None = None
    currency: str = "USD"


@dataclass(frozen=True, kw_only=True)
class Forced:
    """The output's folder, and whether it is replaced."""

    out: str | Path | None = None
    force: bool = False

    @property
    def folder(self) -> Path | None:
        return optional(Path, self.out)


@dataclass(frozen=True, kw_only=True)
class Paced:
    """How many requests, and how fast."""

    rate: float | None = None
    num_requests: int | None = None


@dataclass(frozen=True, kw_only=True)
class OnDevice:
    """A model on a device.

    Model and device:
      --eos: Requests end at the checkpoint's EOS, if it comes before their limit.
    """

    random_weights: str | None = None
    device: str | None = None
    graphs: bool | None = None
    mask_token_id: int | None = None
    block_length: int | None = None
    tokenizer: str | None = None

    def loaded(self, model: str | None, seed: int) -> "Opened":
        """The model, opened on the device."""
        from ..live.config import named  # loads PyTorch, as the next
        from ..profiler.measure import open_any

        name, settings = named(model, self.random_weights, self.mask_token_id, self.block_length)
        return open_any(name, self.device, seed, self.graphs, settings)


def kept_folder(out: Path | None, watch: Watch) -> "tuple[TemporaryDirectory[str] | None, Path | None]":
    """A run's folder; for Python a temporary one, with the object that removes it."""
    if out is not None or not watch.in_python:
        return None, out
    temporary = TemporaryDirectory(prefix="dsim-")
    return temporary, Path(temporary.name) / "run"


# ---- worlds --------------------------------------------------------------------------------------------------


def optional(function: Callable[[Any], R], value: Any) -> R | None:
    """The function's value, or None of None."""
    return None if value is None else function(value)


def world_fields(question: Any, policies: Sequence[str]) -> dict[str, Any]:
    """A question's fields of a World; policies: named by the user, so that their code may be loaded."""
    from ..results.slo import Slo
    from ..results.world import World, named_code

    shared = {field.name for field in fields(question)} & {field.name for field in fields(World)} - FLEET_FIELDS
    return {name: getattr(question, name) for name in shared} | {
        "slos": tuple(str(Slo.parse(text)) for text in question.slos),
        "allow_code": named_code([*policies, getattr(question, "router", "")], question.allow_code),
    }


# Of a World, from FleetWords or named by each question.
FLEET_FIELDS = {"trace", "policy", "profile", "replicas", "pools", "links", "decider", "scaler", "startup"}


def worlds_of(
    question: Any,
    policies: "PolicyLike | Sequence[PolicyLike]",
    profile: "ProfileLike",
    *,
    candidates: Sequence[str] = (),
    **changes: Any,
) -> "list[World]":
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
