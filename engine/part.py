"""A policy and its parts: what each part declares, and which of the engine's questions it answers."""

import dataclasses
import sys
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from .errors import PolicyError
from .hooks import leap
from .jit import is_ours
from .plain import Choice as Choice  # for policies' files
from .plain import Range as Range
from .plain import bounds_of, words_of
from .policies import DEFAULTS
from .rows import blocks
from .rows.kind import Kind

if TYPE_CHECKING:
    from .view import RequestView, View

MAX_BLOCK = 64  # of published checkpoints
UNLIMITED = 2**31 - 1


class Wrapping(NamedTuple):
    """A rule that calls `inner`, the answer of the parts before its own."""

    rule: Callable[..., Any]


wraps = Wrapping
Answers = Mapping[Any, Callable[..., Any] | Wrapping]  # placeholder of hooks.py -> rule


@dataclass(frozen=True)
class FieldInfo:
    """A policy's field, for `dsim policies SPEC`."""

    name: str
    default: Any
    bounds: str  # its range, words or type
    meaning: str


class Part:
    """One axis of a policy: a frozen dataclass whose fields are the policy's.

    A field is `name: Annotated[kind, Range or Choice, "meaning"] = default`; other values raise PolicyError. A subclass
    with its own __post_init__ calls this one first.
    """

    neutral: ClassVar[frozenset[str]] = frozenset()  # see `Policy.neutral`
    columns: ClassVar[tuple[tuple[str, str], ...]] = ()  # added to state.SEQUENCE: name and dtype

    def __post_init__(self) -> None:
        kind: Any = type(self)  # Any: the cache needs no type's __hash__
        for name, (bounds, optional) in bounds_of(kind).items():
            value = getattr(self, name)
            if value not in bounds and not (optional and value is None):
                raise PolicyError(f"{name} is {value!r}, expected {bounds.wanted}")

    def answers(self, policy: "Policy") -> Answers:
        """Rules that answer the engine's placeholders."""
        return {}

    def check(self, policy: "Policy") -> None:
        """PolicyError if the other parts do not suit this one."""

    def numbers(self, policy: "Policy") -> Mapping[str, bool | int | float]:
        """`policy.fields` entries in addition to numeric fields."""
        return {}

    def record(self, policy: "Policy") -> Mapping[str, Any]:
        """Initial values of `policy.record`: numbers or arrays."""
        return {}


class OnDevice(typing.Protocol):
    """What engines' defaults depend on of a GPU."""

    @property
    def memory_bytes(self) -> int: ...
    @property
    def compute_capability(self) -> str: ...  # NVIDIA's, such as 9.0; AMD's gfx target; empty: unknown


class Scheduler(Part):
    """When requests join and leave the batch."""

    families: ClassVar[tuple[str, ...]] = ("block-diffusion", "autoregressive", "canvas")  # of checkpoints scheduled
    rows: ClassVar[Kind | None] = None  # overrides the other parts' kind
    first_token = False  # a block's first step always commits its first token
    pads = False  # pads a batch's requests to the longest
    pieces = False  # may prefill a prompt over several steps
    idles_finished = False  # rows of a step planned ahead may finish before it
    hides_host = False  # the host plans a step while the device runs the last
    frees_windows = False  # layers with a window free pages that leave it
    hashes_all = False  # the prefix cache keeps second copies of a page
    open_to: ClassVar[frozenset[str]] = frozenset({"order"})  # questions of a discipline that it asks

    max_batch: int | None
    max_prefill_tokens: int

    def length(self, policy: "Policy", prompt: int, output: int) -> int:
        """Tokens that count against the context limit."""
        return prompt + output

    def reserved(self, policy: "Policy", prompt: Any, output: Any, state_tokens: int = 1) -> Any:
        """Most tokens with pages, as numbers or arrays; state_tokens: as in Limits."""
        block = policy.block_length
        before = 0 if policy.granularity.on_a_grid else prompt
        return before + -(-(prompt + output - before) // block) * block

    def at_once(self, policy: "Policy", prompt: int, output: int) -> int:
        """Most positions of a request in steps in flight."""
        return prompt + output

    def batch_on(self, device: OnDevice, usual: int, block_length: int) -> int:
        """max_batch by default on a device; usual: LMDeploy's."""
        # LMDeploy's limit: one prefill's block rows (block-diffusion.md 1.1).
        return min(usual, max(1, self.max_prefill_tokens // block_length))

    def on(self, device: OnDevice) -> Self:
        """Itself, with the release's defaults for a card where none is set."""
        return self

    def logit_rows(self, policy: "Policy", max_batch: int) -> int | None:
        """Most logit rows of a step; None: every row of a prefill."""
        return max_batch * policy.width if self.pieces else None

    def group_steps(self, page_size: int, block_length: int) -> int:
        """Steps that a batch stays frozen."""
        return 1

    @property
    def most_tokens(self) -> int | None:
        """Most query positions of a step; None: unbounded."""
        return None

    def most_reused(self, policy: "Policy", prompt: int) -> int:
        """First prompt tokens that it would reuse from a full prefix cache."""
        return prompt - 1

    def shares_prefixes(self, policy: "Policy") -> bool:
        """Whether it can reuse other requests' pages (prefix.py)."""
        return False

    def refuses_quantised(self, family: str) -> str:
        """Why its engine refuses a quantised checkpoint of a profile's family; empty: it does not."""
        return ""

    def fits(self, policy: "Policy", length: int) -> bool:
        """Whether it could ever run a request of this length, output in whole blocks."""
        return True


@dataclass(frozen=True)
class Discipline(Part):
    """What a scheduler leaves open: first come, first served, unless a subclass overrides some of these methods.

    Each is plain Python and asked before each decision that it may change, which a scheduler that hides its host makes
    a step ahead. All answers of a decision refer to the same view, whose `num_rows` is 0: no row is chosen yet.
    """

    def order(self, view: "View") -> npt.NDArray[np.int64]:
        """Order in which to consider waiting requests, as places in `view.waiting()`."""
        return np.arange(view.num_waiting)

    def holds(self, view: "View") -> npt.NDArray[np.bool_]:
        """Which waiting requests may not be admitted yet, [waiting]; those behind them may."""
        return np.zeros(view.num_waiting, np.bool_)

    def most_admitted(self, view: "View") -> int:
        """Most requests that this decision admits: for at most n at once `max(0, n - view.num_running)`."""
        return UNLIMITED

    def most_prompt_tokens(self, view: "View") -> int:
        """Most tokens of the step besides those that running requests with whole prompts may want."""
        return UNLIMITED

    def rests(self, view: "View") -> npt.NDArray[np.bool_]:
        """Which running requests the step leaves out, [running]; they keep their pages."""
        return np.zeros(view.num_running, np.bool_)

    def steps(self, view: "View") -> npt.NDArray[np.int64]:
        """Most denoising steps of each canvas of a waiting request, [waiting]; its last answer before it runs holds."""
        return np.full(view.num_waiting, UNLIMITED)

    def steps_now(self, view: "View") -> npt.NDArray[np.int64]:
        """The same of running requests, [running], for this step: a canvas that has had as many ends with it."""
        return np.full(view.num_running, UNLIMITED)

    @property
    def questions(self) -> frozenset[str]:
        """Names of the overridden methods; no other is asked."""
        return frozenset(name for name in QUESTIONS if getattr(type(self), name) is not getattr(Discipline, name))

    @property
    def neutral(self) -> frozenset[str]:  # type: ignore[override]
        """All its fields, unless it caps steps: an order or a limit of admission never changes tokens."""
        return frozenset() if self.questions & CAPS else frozenset(vars(self))

    def check(self, policy: "Policy") -> None:
        batching, name = policy.batching, f"{policy.name}: {type(self).__name__} answers"
        if unasked := self.questions - batching.open_to:
            only = ", ".join(sorted(batching.open_to))
            raise PolicyError(f"{name} {min(unasked)}, and {type(batching).__name__} asks only {only}")
        capped = self.questions & CAPS
        if capped and policy.commits_by != "law":
            raise PolicyError(f"{name} {min(capped)}, expected a policy of canvases, whose steps a law draws")


QUESTIONS = ("order", "holds", "most_admitted", "most_prompt_tokens", "rests", "steps", "steps_now")
CAPS = frozenset({"steps", "steps_now"})  # which end canvases early


@dataclass(frozen=True)
class Rows:
    """The rows of a decode step being planned, for plain NumPy."""

    status: npt.NDArray[np.uint8]  # [rows, width] MASKED, PENDING or CACHED
    reach: npt.NDArray[np.int64]  # [rows] leftmost positions that may be computed
    start: npt.NDArray[np.int32]  # [rows] absolute position of column 0
    requests: "RequestView"  # arrays [rows]


class Granularity(Part):
    """Which positions a sequence computes in a step.

    For block diffusion it answers `hooks.select`, or has `select` in plain NumPy.
    """

    rows: ClassVar[Kind] = blocks.BLOCKS
    family: ClassVar[str] = "block-diffusion"  # of its checkpoints (profile.FAMILIES)
    acceptances: tuple[float, ...] = (1.0,)  # of each next token of a step, given the earlier ones
    whole_block = False  # every position, every step
    sized_by_block = ""  # field that is at most the block length
    needs_latency = False  # chooses by steps' cost
    caution = ""  # on what its predictions rest, for a run to say
    drafts_blocks = False  # a drafter with keys and values of its own runs beside it
    num_blocks = 1  # that a window may reach into
    static = False  # a decoding row computes all columns, those outside its window for nothing
    under_budget = False  # a token budget can schedule it
    on_a_grid = True  # blocks begin at multiples of their length
    block_length: int

    @property
    def num_columns(self) -> int:
        """Columns of a window."""
        return self.block_length * self.num_blocks

    @property
    def ahead_of(self) -> tuple[float, ...]:
        """draw.Draws.ahead: how blocks behind a half-filled one commit."""
        return ()

    @property
    def idle(self) -> frozenset[str]:
        """Fields without effect beside the values of the others."""
        return frozenset()

    def most_rows(self, policy: "Policy") -> int:
        """Most running sequences that its forwards have room for."""
        return sys.maxsize

    def select(self, view: "View", rows: Rows) -> npt.NDArray[np.bool_]:
        """Positions that each row computes, [rows, width] bool; plain NumPy, once a step."""
        raise NotImplementedError  # see `given`

    @property
    def given(self) -> bool:
        """Whether windows come from `select`."""
        return type(self).select is not Granularity.select


class Eviction(Part):
    """Which committed tokens of a block are no longer computed."""

    evicts = False
    delayed = False  # committed tokens leave one by one, each once its KV is final
    neighbour_aware = False
    by_importance = False  # draws evictions with a profile's ImportanceDeltas


class Cache(Part):
    """Keys and values that a step sees, and their memory."""

    rows: ClassVar[Kind | None] = None  # overrides the other parts' kind
    family: ClassVar[str | None] = None  # of its checkpoints; None: the granularity's
    first_layer_whole = False  # the first layer always computes all positions
    # For a user's cache: the shipped cache with measured overhead, or "none" (cache_overhead.py).
    overhead: ClassVar[str | None] = None


@dataclass(frozen=True)
class ExactCache(Cache):
    """Exact keys and values of all tokens before the block."""


@dataclass(frozen=True)
class PagedMemory(Part):
    page_size: typing.Annotated[int, Range(1), "tokens of a KV page, a multiple of the block length"] = 64
    num_pages: typing.Annotated[int | None, Range(1), "pages of the pool; none: as the profile's memory allows"] = None

    shares_pages: typing.ClassVar[bool] = False  # between requests that begin alike (prefix.py)

    def pools(self, num_pages: int, window_bytes: int, kv_bytes: int) -> tuple[int, int]:
        """Pages of `num_pages` in use, and how many of them layers with a window reserve; 0: one pool.

        Bytes: of a token, in layers with a window and in the others.
        """
        return num_pages, 0

    def cache(self, num_pages: int, prefixes: Any) -> Any:
        """A replica's `policy.cache`: a prefix.Cache, or () for none."""
        return ()


def _default(axis: str) -> Callable[[], Any]:
    """An axis's default part, imported on use: parts' files import this one."""

    def component() -> Any:
        module, name = DEFAULTS[axis]
        return getattr(import_module(f".policies.{module}", __package__), name)()

    return component


KINDS: Mapping[str, type[Part]] = {
    "batching": Scheduler,
    "granularity": Granularity,
    "eviction": Eviction,
    "cache": Cache,
    "unmasking": Part,
    "memory": PagedMemory,
    "discipline": Discipline,
}
AXES = tuple(KINDS)
# A part wraps the answers of those before it.
ANSWERING = ("unmasking", "granularity", "eviction", "cache", "batching", "memory", "discipline")


@dataclass(frozen=True)
class Policy:
    """How a replica schedules: a part for each axis. `name` is its SPEC."""

    name: str
    batching: Scheduler = field(default_factory=_default("batching"))
    granularity: Granularity = field(default_factory=_default("granularity"))
    eviction: Eviction = field(default_factory=_default("eviction"))
    cache: Cache = field(default_factory=ExactCache)
    unmasking: Any = field(default_factory=lambda: import_module(".unmasking", __package__).Unmasking())
    memory: PagedMemory = field(default_factory=PagedMemory)
    discipline: Discipline = field(default_factory=Discipline)
    implementation: str = ""  # code that runs it, for costs in profiles; empty: any
    checked: bool = False  # its rules from outside stay in Python, where they are checked

    def __post_init__(self) -> None:
        for axis, kind in KINDS.items():
            piece = getattr(self, axis)
            if not isinstance(piece, kind):
                raise PolicyError(f"{self.name}: {axis} is {piece!r}, expected a {kind.__name__}")
            params = vars(type(piece)).get("__dataclass_params__")
            if params is None or not params.frozen:
                raise PolicyError(
                    f"{self.name}: {type(piece).__name__} is not a frozen dataclass, expected @dataclass(frozen=True)"
                )
        homes: dict[str, str] = {}
        for piece in (getattr(self, axis) for axis in KINDS):
            for f in dataclasses.fields(piece):
                if any(callable(vars(base).get(f.name)) for base in type(piece).__mro__ if is_ours(base)):
                    owner = f"{self.name}: {type(piece).__name__}"
                    raise PolicyError(f"{owner} has a field {f.name}, which the engine uses: expected another name")
                if (other := homes.setdefault(f.name, type(piece).__name__)) != type(piece).__name__:
                    pair = f"{other} and {type(piece).__name__}"
                    raise PolicyError(f"{self.name}: {pair} both have a field {f.name}, expected another name in one")
        if self.family not in self.batching.families:
            batching, families = type(self.batching).__name__, ", ".join(self.batching.families)
            raise PolicyError(f"{self.name}: {batching} schedules {families} models, and this one is {self.family}")
        self.unmasking.check(self)
        self.cache.check(self)
        self.discipline.check(self)
        if self.cache.family:  # blocks only order its unmasking
            return
        for axis in ("granularity", "batching", "eviction", "memory"):
            getattr(self, axis).check(self)
        page, block = self.memory.page_size, self.block_length
        if page % block and self.granularity.on_a_grid:
            raise PolicyError(f"{self.name}: page_size is {page}, expected a multiple of the block length {block}")

    def parts(self) -> tuple[Part, ...]:
        """In the order in which they answer."""
        return tuple(getattr(self, axis) for axis in ANSWERING)

    @property
    def rows(self) -> Kind:
        return self.batching.rows or self.cache.rows or self.granularity.rows

    @property
    def leaps(self) -> bool:
        """Whether steps that differ only by counts can run at once (rows/leap.py)."""
        if not all(is_ours(type(piece)) for piece in self.parts()):  # users' rules may look at each step
            return False
        return leap in self.rows.rules or leap in self.granularity.answers(self)

    @property
    def neutral(self) -> frozenset[str]:
        """Fields that never change the tokens produced: those of shipped schedulers and memories, and named ones."""
        kinds: list[Any] = [type(self.batching), type(self.memory)]
        scheduling = ({f.name for f in dataclasses.fields(kind)} - _own_fields(kind) for kind in kinds)
        return frozenset().union(*scheduling, *(piece.neutral for piece in self.parts()))

    @property
    def family(self) -> str:
        """Of checkpoints served: one of profile.FAMILIES."""
        return self.cache.family or self.granularity.family

    @property
    def commits_by(self) -> str:
        """What decides commits: acceptance (of next tokens), law, schedule or confidence."""
        if self.rows.commits == "tokens":
            return "acceptance"
        if self.unmasking.strategy == "law":
            return "law"
        return "schedule" if self.unmasking.scheduled(self) else "confidence"

    @property
    def frees_windows(self) -> bool:
        """Whether layers with a window free pages that leave it; not where requests share pages."""
        return self.batching.frees_windows and not self.memory.shares_pages

    @property
    def block_length(self) -> int:
        """Tokens; 1 for an autoregressive model."""
        return self.granularity.block_length

    @property
    def width(self) -> int:
        return self.granularity.num_columns


@dataclass(frozen=True)
class Preset:
    """A named policy, and the field that `name:value` sets."""

    policy: Policy
    main: str = ""
    summary: str = ""
    citation: str = ""  # paper or source file
    space: Mapping[str, Any] | None = None  # default search space; None: not tuned
    tested: Mapping[str, tuple[int, str]] = field(default_factory=dict)  # field -> its engine's largest, who says so
    reference: bool = False  # full cache, the quality reference
    engine: str = ""  # release that serves it, a key of ENGINES (planner/deploy.py); empty: none
    serve: str = ""  # fixed arguments of its command
    flags: Mapping[str, str] = field(default_factory=dict)  # field -> engine's flag (planner/deploy.py)
    probe: str = ""  # a SPEC that soon reaches all phases of its cache; empty: `dsim live` does not run it

    def __post_init__(self) -> None:
        if self.engine and not self.policy.implementation:
            labelled = dataclasses.replace(self.policy, implementation=self.engine.partition("-")[0])  # of any release
            object.__setattr__(self, "policy", labelled)  # frozen


# In a space: values at which the profile's commit models were fitted.
FITTED = "fitted"
# Default search space of continuous batching.
BATCHING_SPACE: Mapping[str, Any] = {"max_batch": ["none", 16, 32, 64, 128], "max_prefill_tokens": [2048, 4096, 8192]}


def fields_of(piece: Any) -> list[FieldInfo]:
    hints = typing.get_type_hints(type(piece), include_extras=True)
    infos = []
    for f in dataclasses.fields(piece):
        kind, *extras = typing.get_args(typing.Annotated[hints[f.name], ""])
        bounds = " ".join(str(extra) for extra in extras if isinstance(extra, Range | Choice))
        meaning = "".join(extra for extra in extras if isinstance(extra, str))
        infos.append(FieldInfo(f.name, getattr(piece, f.name), bounds or words_of(kind), meaning))
    return infos


@cache
def _own_fields(kind: Any) -> set[str]:
    """Fields that a class from outside adds to a shipped one."""
    shipped = [base.__annotations__ for base in kind.__mro__ if is_ours(base)]
    return {f.name for f in dataclasses.fields(kind)}.difference(*shipped)


def numbers_of(policy: "Policy") -> np.ndarray[Any, np.dtype[Any]]:
    """`policy.fields`: numbers, words by index, `Part.numbers`; None is -1."""
    values: dict[str, Any] = {
        "given": policy.granularity.given,
        "listed": False,
        "sample_block": False,
        "once_more": False,
        "late": False,
        "final": False,
        "first_layer_whole": False,
        "ordered": False,
        "static": False,
    }
    numbers = [piece.numbers(policy) for piece in policy.parts()]
    # A part from outside with `numbers` of its own may give its fields another form.
    shipped = [record for piece, record in zip(policy.parts(), numbers, strict=True) if is_ours(type(piece).numbers)]
    used = set(values).union(*shipped)
    for piece in policy.parts():
        kind: Any = type(piece)  # Any: the caches need no type's __hash__
        for name in (f.name for f in dataclasses.fields(kind)):
            value, (bounds, _) = getattr(piece, name), bounds_of(kind).get(name, (None, False))
            if name in used & _own_fields(kind):
                raise PolicyError(
                    f"{policy.name}: {kind.__name__} has a field {name}, which the engine uses: expected another name"
                )
            if isinstance(value, str) and isinstance(bounds, Choice):
                value = bounds.words.index(value)
            if value is None or isinstance(value, bool | int | float):
                values[name] = -1 if value is None else value
    for record in numbers:
        values.update(record)
    kinds = [(bool, "?"), (int, "i8"), (float, "f8")]
    types = [(name, next(code for kind, code in kinds if isinstance(value, kind))) for name, value in values.items()]
    array = np.zeros(1, np.dtype(types, align=True))
    for name, value in values.items():
        array[name] = value
    return array
