"""A policy is one value on each of a few independent axes; a preset is a name for a combination."""

import dataclasses
import difflib
import tomllib
import types
import typing
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from .batching import Batching, BlockSynchronous, Continuous, PhaseMultiplexed, Static
from .cache import Cache, ExactCache, FastCache, MaskKV, NoCache, PeriodicCache, SparseCache
from .errors import PolicyError
from .eviction import DelayedCache, Eviction, Focus, NoEviction
from .granularity import Autoregressive, ElasticChunk, FixedBlock, FixedChunk, Granularity
from .unmasking import Unmasking


@dataclass(frozen=True)
class PagedMemory:
    """The paged KV cache and what is kept of it for a request."""

    page_size: int = 64  # tokens
    num_pages: int | None = None  # pages of the pool; None: what the profile's memory leaves for them

    def __post_init__(self) -> None:
        if self.page_size < 1:
            raise PolicyError(f"page_size is {self.page_size}, expected at least 1")
        if self.num_pages is not None and self.num_pages < 1:
            raise PolicyError(f"num_pages is {self.num_pages}, expected at least 1")


@dataclass(frozen=True)
class Policy:
    """How a replica schedules. `name` is the SPEC it was asked for by."""

    name: str
    batching: Batching = field(default_factory=Continuous)
    granularity: Granularity = field(default_factory=FixedBlock)
    eviction: Eviction = field(default_factory=NoEviction)
    cache: Cache = field(default_factory=ExactCache)
    unmasking: Unmasking = field(default_factory=Unmasking)
    memory: PagedMemory = field(default_factory=PagedMemory)

    def __post_init__(self) -> None:
        multiplexed = isinstance(self.batching, Static | PhaseMultiplexed)
        if self.full_sequence != multiplexed:
            needs = "static or phase-multiplexed" if self.full_sequence else "continuous or synchronous"
            raise PolicyError(
                f"{self.name}: {_kind(self.cache)} needs {needs} batching, and batching is {_kind(self.batching)}"
            )
        if self.full_sequence:
            self._check_full_sequence()
            return
        chunked = isinstance(self.granularity, FixedChunk | ElasticChunk)
        if chunked and not isinstance(self.eviction, DelayedCache):
            raise PolicyError(f"{self.name}: a chunk streams only over a delayed cache, and eviction is none")
        if chunked and self.obs and _neighbour_aware(self.eviction):
            raise PolicyError(f"{self.name}: obs=true needs a plain delayed cache, and neighbour_aware is true")
        if isinstance(self.batching, BlockSynchronous) and not (
            isinstance(self.granularity, FixedBlock) and isinstance(self.eviction, NoEviction)
        ):
            raise PolicyError(f"{self.name}: block-synchronous batching computes whole blocks, without eviction")
        if isinstance(self.eviction, Focus):
            if not isinstance(self.granularity, FixedBlock):
                raise PolicyError(f"{self.name}: FOCUS evicts from the whole block, and a chunk leaves its own out")
            if not self.eviction.neighbour_aware:
                raise PolicyError(f"{self.name}: FOCUS evicts from DC+, and neighbour_aware is false")
            if not isinstance(self.batching, Continuous) or self.batching.group_steps(1, 1) != 1:
                raise PolicyError(
                    f"{self.name}: FOCUS decides anew every step: it needs continuous batching, num_loops=1"
                )
        if isinstance(self.granularity, Autoregressive) and not isinstance(self.eviction, NoEviction):
            raise PolicyError(f"{self.name}: an autoregressive model has no block to evict from")
        if self.autoregressive and isinstance(self.batching, Continuous) and self.batching.num_loops not in (None, 1):
            raise PolicyError(
                f"{self.name}: num_loops is {self.batching.num_loops}, expected 1 where every step is a token"
            )
        page, block = self.memory.page_size, self.block_length
        if page % block:
            raise PolicyError(f"{self.name}: page_size is {page}, expected a multiple of the block length {block}")

    def _check_full_sequence(self) -> None:
        if not (isinstance(self.granularity, FixedBlock) and isinstance(self.eviction, NoEviction)):
            raise PolicyError(f"{self.name}: a full-sequence model computes whole blocks, without eviction inside them")
        steps, block = self.unmasking.denoising_steps, self.block_length
        if steps is not None and steps > block:
            raise PolicyError(f"{self.name}: denoising_steps is {steps}, expected at most the block length {block}")

    @property
    def full_sequence(self) -> bool:
        """Whether the model attends in both directions, over all of a request's tokens."""
        return not isinstance(self.cache, ExactCache)

    @property
    def block_length(self) -> int:
        """Tokens of a block; 1 for an autoregressive model."""
        return 1 if isinstance(self.granularity, Autoregressive) else self.granularity.block_length

    @property
    def obs(self) -> bool:
        """Whether the window may reach into the next block."""
        return isinstance(self.granularity, FixedChunk | ElasticChunk) and self.granularity.obs

    @property
    def autoregressive(self) -> bool:
        """Whether one token follows another."""
        return isinstance(self.granularity, Autoregressive)


def _kind(value: object) -> str:
    return type(value).__name__


def _neighbour_aware(eviction: Eviction) -> bool:
    return isinstance(eviction, DelayedCache) and eviction.neighbour_aware


@dataclass(frozen=True)
class Preset:
    """A named combination, and the field that `name:value` sets."""

    policy: Policy
    main: str
    summary: str


_STREAM = DelayedCache()
_FOCUS_CACHE = DelayedCache(prefill_counts=False, visible="prefix", sample_block=True)
_EVERY_STEP = Continuous(num_loops=1)
# Full-sequence models: as many steps a block as it has tokens, one committed a step; KV pages of dLLM-Serve's size.
_ONE_A_STEP = Unmasking(strategy="low_confidence_static")
_PAGES = PagedMemory(page_size=256)


def _script(name: str, cache: Cache) -> Policy:
    """A published research script: one request at a time."""
    return Policy(name, batching=Static(), cache=cache, unmasking=_ONE_A_STEP, memory=_PAGES)


PRESETS: dict[str, Preset] = {
    "ar": Preset(
        Policy("ar", batching=_EVERY_STEP, granularity=Autoregressive()),
        "max_batch",
        "autoregressive: one token a sequence and step, continuous batching",
    ),
    "lmdeploy-bd32": Preset(
        Policy("lmdeploy-bd32", batching=Continuous(decide_ahead=True)),
        "block_length",
        "LMDeploy: the whole block every step, groups of frozen steps, a pass over each finished block",
    ),
    "sglang-bd32": Preset(
        Policy("sglang-bd32", batching=BlockSynchronous()),
        "block_length",
        "SGLang's sync mode: the batch changes between blocks, each as slow as its slowest",
    ),
    "chunk": Preset(
        Policy("chunk", batching=_EVERY_STEP, granularity=FixedChunk(), eviction=_STREAM),
        "chunk",
        "a fixed chunk of the block, streaming as tokens are cached",
    ),
    "optimus": Preset(
        Policy("optimus", batching=_EVERY_STEP, granularity=ElasticChunk(), eviction=_STREAM),
        "max_chunk",
        "Optimus: the chunk with the best expected commits per second, chosen every step",
    ),
    "delayed-cache": Preset(
        Policy("delayed-cache", batching=_EVERY_STEP, eviction=_FOCUS_CACHE),
        "block_length",
        "the block without the tokens that were computed once as committed",
    ),
    "delayed-cache-plus": Preset(
        Policy("delayed-cache-plus", batching=_EVERY_STEP, eviction=replace(_FOCUS_CACHE, neighbour_aware=True)),
        "block_length",
        "FOCUS's DC+: ... computed once together with a committed right neighbour",
    ),
    "focus": Preset(
        Policy("focus", batching=_EVERY_STEP, eviction=Focus()),
        "alpha",
        "FOCUS: DC+, and of the masks only those whose importance grew most go beyond the second layer",
    ),
    "vanilla": Preset(
        _script("vanilla", NoCache()),
        "max_batch",
        "full-sequence: LLaDA's own loop, the whole sequence every step",
    ),
    "fast-dllm": Preset(
        _script("fast-dllm", FastCache()),
        "reuse",
        "full-sequence: Fast-dLLM, a full pass a block, then the block against all cached keys",
    ),
    "dllm-cache": Preset(
        _script("dllm-cache", PeriodicCache()),
        "prompt_refresh",
        "full-sequence: dLLM-Cache, prompt and response refreshed at their own periods",
    ),
    "sparse-dllm": Preset(
        _script("sparse-dllm", SparseCache()),
        "retention",
        "full-sequence: Sparse-dLLM, two full passes a block, then the block against the keys kept",
    ),
    "maskkv": Preset(
        _script("maskkv", MaskKV(logits="block")),
        "budget",
        "full-sequence: MaskKV, dLLM-Cache with the prompt's keys that masks vote for",
    ),
    "dllm-serve": Preset(
        Policy(
            "dllm-serve",
            batching=PhaseMultiplexed(),
            cache=SparseCache(logits="block", head_centric=True, at_least=1),
            unmasking=_ONE_A_STEP,
            memory=_PAGES,
        ),
        "retention",
        "full-sequence: dLLM-Serve, refreshes and reuses of many requests in a step, under a token budget",
    ),
}

MAX_NUMBER = 2**31 - 1  # of a field: more is a mistake, and does not fit the engine's arrays
AXES = ("batching", "granularity", "eviction", "cache", "unmasking", "memory")


def parse(spec: str) -> Policy:
    """The policy of a SPEC, `name[:value][,field=value...]`, or of a TOML file's path ending in .toml.

    Raises PolicyError, naming what is known, for an unknown name, field or value.
    """
    if spec.endswith(".toml"):
        return _from_toml(spec)
    head, *rest = spec.split(",")
    name, colon, value = head.partition(":")
    preset = _preset(name, spec)
    settings: dict[str, str] = {}
    if colon:
        settings[preset.main] = value
    for item in rest:
        key, equals, value = item.partition("=")
        if not equals:
            raise PolicyError(f"policy {spec!r}: {item!r} is not a field=value")
        if key in settings:
            raise PolicyError(f"policy {spec!r}: {key} is given twice, as {settings[key]} and {value}")
        settings[key] = value
    return _with_settings(preset.policy, spec, settings)


def settings_of(policy: Policy) -> dict[str, Any]:
    """Every field of a policy by name, as `parse` takes them."""
    return {f.name: getattr(getattr(policy, axis), f.name) for axis in AXES for f in fields(getattr(policy, axis))}


def to_toml(policy: Policy, preset: str) -> str:
    """The policy as the text of a TOML file: the preset and every field in which the policy differs from it."""
    base = settings_of(_preset(preset, preset).policy)
    lines = [f'policy = "{preset}"']
    for name, value in settings_of(policy).items():
        if value != base.get(name):
            lines.append(f"{name} = {_toml_value(value)}")
    return "\n".join(lines) + "\n"


def _preset(name: str, spec: str) -> Preset:
    if name not in PRESETS:
        close = difflib.get_close_matches(name, PRESETS, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise PolicyError(f"policy {spec!r}: no preset is named {name!r}{hint}; there are {', '.join(PRESETS)}")
    return PRESETS[name]


def _from_toml(path: str) -> Policy:
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PolicyError(f"{path}: no such policy file") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as e:
        raise PolicyError(f"{path}: cannot be read as TOML: {e}") from None
    name = table.pop("policy", None)
    if not isinstance(name, str):
        raise PolicyError(f'{path}: `policy` is {name!r}, expected a preset\'s name such as "optimus"')
    return _with_settings(_preset(name, path).policy, path, table)


def _with_settings(policy: Policy, spec: str, settings: dict[str, Any]) -> Policy:
    homes = {f.name: axis for axis in AXES for f in fields(getattr(policy, axis))}
    axes: dict[str, dict[str, Any]] = {}
    for name, value in settings.items():
        if name not in homes:
            close = difflib.get_close_matches(name, homes, n=1)
            hint = f" (did you mean {close[0]}?)" if close else ""
            raise PolicyError(f"policy {spec!r}: there is no field {name!r}{hint}; its fields are {', '.join(homes)}")
        axis = homes[name]
        axes.setdefault(axis, {})[name] = _convert(spec, type(getattr(policy, axis)), name, value)
    try:
        # The main parameter of a block may shrink what was sized by the block.
        if "block_length" in axes.get("granularity", {}) and isinstance(policy.granularity, ElasticChunk | FixedChunk):
            size = "max_chunk" if isinstance(policy.granularity, ElasticChunk) else "chunk"
            given = axes["granularity"]
            given.setdefault(size, min(getattr(policy.granularity, size), given["block_length"]))
        changed = {axis: replace(getattr(policy, axis), **given) for axis, given in axes.items()}
        return replace(policy, name=spec, **changed)
    except PolicyError as e:
        raise PolicyError(f"policy {spec!r}: {e}".replace(f"{spec}: ", "", 1)) from None


def _convert(spec: str, owner: type, name: str, value: Any) -> Any:
    """A field's value from a SPEC's text or a TOML value."""
    kind = typing.get_type_hints(owner)[name]
    if isinstance(kind, types.UnionType):  # an optional number
        if value == "none":
            return None
        kind = next(k for k in typing.get_args(kind) if k is not type(None))
    try:
        if kind is bool:
            return {"true": True, "false": False}[str(value).lower()]
        if typing.get_origin(kind) is tuple:
            return tuple(min(int(v), MAX_NUMBER) for v in (value.split("/") if isinstance(value, str) else value))
        if kind in (int, float) and not isinstance(value, bool):
            number = kind(value)
            if kind is int and not isinstance(value, str) and number != value:
                raise ValueError
            if abs(number) > MAX_NUMBER:
                raise PolicyError(f"policy {spec!r}: {name} is {value}, expected at most {MAX_NUMBER}")
            return number
        if kind is str and isinstance(value, str):
            return value
    except (KeyError, ValueError, TypeError, OverflowError):
        pass
    wanted = {bool: "true or false", int: "a whole number", float: "a number", str: "a word"}.get(
        kind, "whole numbers such as 2/8/32"
    )
    raise PolicyError(f"policy {spec!r}: {name} is {value!r}, expected {wanted}")


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str) or value is None:
        return f'"{value or "none"}"'
    if isinstance(value, tuple):
        return "[" + ", ".join(str(v) for v in value) + "]"
    return repr(value)


def describe(policy: Policy) -> dict[str, Any]:
    """The policy's axes and fields as plain values, for a manifest."""
    out: dict[str, Any] = {"name": policy.name}
    for axis in AXES:
        value = getattr(policy, axis)
        out[axis] = {"kind": type(value).__name__, **dataclasses.asdict(value)}
    return out
