"""config.json, read into a ModelConfig by its family's declaration, and written from one."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..engine.errors import ModelError
from ..files import read
from ..files.read import cut, shown
from .config import Experts, ModelConfig
from .families import CANVAS, FAMILIES, Family

NUMBERS = {"rope_theta": 1e4, "norm_eps": 1e-6, "experts.scale": 1.0}  # our fields, and what an absent key means
TRUTHS = ("tied", "experts.normed")  # false where absent
FROM_NOUGHT = {"mask_token": None, "experts.shared": 0, "experts.dense_layers": 0}
# Far beyond any model: what is larger is a mistake, and would take memory and hours before it is told.
MOST = 1 << 16
MOST_OF = {
    "hidden": 1 << 20, "ffn": 1 << 20, "experts.ffn": 1 << 20, "vocab": 1 << 24, "mask_token": 1 << 24,
    "context_limit": 1 << 30, "layers": 1 << 10, "experts.num": 1 << 10, "experts.shared": 1 << 10,
}  # fmt: skip
FOLLOW = ("kv_heads", "head_dim", "block_length")  # from other fields, or from what the user says


@dataclass(frozen=True)
class Given:
    """The user's settings of a checkpoint where its directory lacks them, or to run it otherwise; None: as it says."""

    mask_token: int | None = None
    block_length: int | None = None


AS_IT_SAYS = Given()


def read_config(folder: Path, given: Given = AS_IT_SAYS) -> ModelConfig:
    """A directory's config.json; a ModelError names what is missing or not supported."""
    path = folder / "config.json"
    found = read_json(path)
    if found is None:
        raise ModelError(f"{folder}: has no config.json")
    named = found.get("architectures")
    architecture: Any = named[0] if isinstance(named, list) and named else None
    if not isinstance(architecture, str) or architecture not in FAMILIES:
        known = ", ".join((*FAMILIES, CANVAS))
        raise ModelError(f"{path}: architecture is {cut(architecture)}, expected one of: {known}")
    check_plain(path, found)
    family = FAMILIES[architecture]
    _check_fixed(path, found, family)
    values = _values(path, found, family)
    heads, hidden = values["heads"], values["hidden"]
    values.setdefault("kv_heads", heads)
    values.setdefault("head_dim", hidden // heads)
    _check_block(path, values, given)
    values["mask_token"] = values["mask_token"] if given.mask_token is None else given.mask_token
    vocab, mask = values["vocab"], values["mask_token"]
    if not 0 <= mask < vocab:
        raise ModelError(f"{path}: mask_token_id is {mask}, expected below vocab_size, {vocab}")
    rotary = _rotary(path, values["head_dim"], _rope(path, found).get("partial_rotary_factor", family.rotary))
    of_experts = {name.partition(".")[2]: values.pop(name) for name in list(values) if name.startswith("experts.")}
    config = ModelConfig(
        **values,
        name=cut(found.get("name") or folder.resolve().name),
        rotary=None if rotary == values["head_dim"] else rotary,
        experts=None if family.experts is None else _experts(path, {**family.experts, **of_experts}),
        architecture=architecture,
    )
    eos = dict.fromkeys((*_eos(folder, found), *config.eos))
    return replace(config, eos=tuple(token for token in eos if token < vocab))


def config_written(config: ModelConfig) -> dict[str, Any]:
    """A config.json of a ModelConfig that its family reads back."""
    family = FAMILIES[config.architecture]
    written: dict[str, Any] = {"name": config.name, "architectures": [config.architecture]}
    for ours, theirs in family.keys.items():
        key = theirs if isinstance(theirs, str) else theirs[0]
        of, _, name = ours.rpartition(".")
        written[key] = getattr(config.experts if of else config, name)
    if config.rotary is not None:
        written["partial_rotary_factor"] = config.rotary / config.head_dim
    if config.eos:
        written["eos_token_id"] = list(config.eos)
    return written


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object of a model's directory; None where there is no such file."""
    if not os.path.lexists(path):
        return None
    found = read.read_json(path, kind=ModelError)
    if not isinstance(found, dict):
        raise ModelError(f"{path}: is {shown(found)}, expected an object")
    return found


def check_plain(path: Path, found: Mapping[str, Any]) -> None:
    """ModelError where a config.json says that the weights are quantised."""
    for key in ("quantization_config", "compression_config"):
        if said := found.get(key):
            method = said.get("quant_method") if isinstance(said, dict) else None
            named = f"quant_method {cut(method)}" if method else key
            raise ModelError(
                f"{path}: the checkpoint is quantised ({named}), expected plain weights: dsim loads bf16, fp16 and fp32"
            )


def _values(path: Path, found: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Our fields' values, those of experts by "experts.NAME"."""
    values: dict[str, Any] = dict(family.defaults)
    for ours, theirs in family.keys.items():
        names = (theirs,) if isinstance(theirs, str) else theirs
        key = next((name for name in names if found.get(name) is not None), names[0])
        value = _rope(path, found).get(key) if ours == "rope_theta" else found.get(key)
        value = values.get(ours, FROM_NOUGHT.get(ours)) if value is None else value
        if ours in TRUTHS:
            values[ours] = bool(value)
        elif ours in NUMBERS:
            values[ours] = _number(path, key, NUMBERS[ours] if value is None else value)
        elif value is not None or ours not in FOLLOW:
            least = 0 if ours in FROM_NOUGHT else 1
            values[ours] = _whole(path, key, value, least, MOST_OF.get(ours, MOST))
    return values | dict(family.trained)


def _experts(path: Path, values: Mapping[str, Any]) -> Experts:
    found = Experts(**values)
    if found.top_k > found.num:
        raise ModelError(f"{path}: num_experts_per_tok is {found.top_k}, expected at most num_experts, {found.num}")
    if found.num % found.groups or found.top_groups > found.groups:
        raise ModelError(
            f"{path}: n_group is {found.groups} and topk_group {found.top_groups}, expected the first to divide "
            f"num_experts, {found.num}, and to be at least the second"
        )
    within = found.num // found.groups
    if found.groups > 1 and (within < 2 or found.top_groups * within < found.top_k):
        raise ModelError(
            f"{path}: topk_group is {found.top_groups}, of groups of {within} experts, expected as many as "
            f"num_experts_per_tok, {found.top_k}, and at least 2 a group"
        )
    return found


def _check_fixed(path: Path, found: Mapping[str, Any], family: Family) -> None:
    rope = _rope(path, found)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ModelError(f"{path}: rope_type is {cut(kind)}, expected default")
    for key, wanted in family.fixed.items():
        if found.get(key, wanted) != wanted:
            raise ModelError(f"{path}: {key} is {cut(found[key])}, expected {wanted}")


def _check_block(path: Path, values: dict[str, Any], given: Given) -> None:
    """The block length that the checkpoint was trained with: config.json's, or the user's where it has none."""
    block = values.get("block_length")
    if given.block_length is not None and values.get("both_ways"):
        raise ModelError(
            f"{path}: was trained in both directions, and --block-length is {given.block_length}: expected none, for "
            "the policy's block_length says how far it denoises at a time"
        )
    if block is None and given.block_length is None:
        raise ModelError(f"{path}: has no block_size, which the checkpoint was trained with: say it (--block-length)")
    if block is not None and given.block_length not in (None, block):
        raise ModelError(f"{path}: was trained with blocks of {block}, and --block-length is {given.block_length}")
    values["block_length"] = given.block_length or block


def _rope(path: Path, found: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of RoPE, of old in several places."""
    own = {key: found[key] for key in ("rope_theta", "partial_rotary_factor") if found.get(key) is not None}
    for key in ("rope_scaling", "rope_parameters"):
        said = found.get(key) or {}
        if not isinstance(said, dict):
            raise ModelError(f"{path}: {key} is {shown(said)}, expected an object")
        own |= said
    return own


def _rotary(path: Path, head_dim: int, share: Any) -> int:
    """How many of a head's components turn."""
    rotary = int(head_dim * _number(path, "partial_rotary_factor", share))
    if rotary % 2 or not 0 < rotary <= head_dim:
        raise ModelError(
            f"{path}: partial_rotary_factor is {cut(share)}, of heads of {head_dim}: expected an even number of "
            "components"
        )
    return rotary


def _eos(folder: Path, found: Mapping[str, Any]) -> tuple[int, ...]:
    """Tokens that end an answer, by generation_config.json and config.json."""
    said: list[Any] = []
    for source in (read_json(folder / "generation_config.json") or {}, found):
        ids = source.get("eos_token_id")
        said += ids if isinstance(ids, list) else [ids]
    return tuple(dict.fromkeys(i for i in said if isinstance(i, int) and not isinstance(i, bool)))


def _number(path: Path, key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e300:
        raise ModelError(f"{path}: {key} is {cut(value)}, expected a positive number")
    return float(value)


def _whole(path: Path, key: str, value: Any, least: int, most: int = MOST) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ModelError(f"{path}: {key} is {cut(value)}, expected a whole number of at least {least}")
    if value > most:
        raise ModelError(f"{path}: {key} is {cut(value)}, expected at most {most}")
    return value
