"""Checkpoints with FP8 weights, multiplied by their scales as they are read."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..engine.errors import ModelError
from ..files.read import cut

FP8 = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}  # by safetensors' names
SCALES = ("_scale_inv", "_scale")  # of DeepSeek and compressed-tensors; both multiply
# Of weights; of activations and KV caches, which bf16 does not need.
SCALE = re.compile(r"(_scale_inv|\.(weight|input|output|activation|q|k|v)_scale|_proj_scale)$")
KEYS = ("quantization_config", "compression_config")
FORMATS = ("float-quantized", "naive-quantized")  # of compressed-tensors


@dataclass(frozen=True)
class Fp8:
    """FP8 weights with a scale a block, a tensor or a row."""

    method: str
    block: tuple[int, int] | None = None  # rows and columns of a scale; None: a tensor or a row

    def __str__(self) -> str:
        each = "tensor or row" if self.block is None else "block of {} x {}".format(*self.block)
        return f"FP8 by {self.method} with a scale for each {each}"


def quantisation(path: Path, found: Mapping[str, Any]) -> Fp8 | None:
    """The format of FP8 weights; None: plain weights. ModelError if they do not load."""
    for key in KEYS:
        if not (settings := found.get(key)):
            continue
        method = settings.get("quant_method") if isinstance(settings, dict) else None
        if method == "fp8" and (block := settings.get("weight_block_size")) is None:
            return Fp8(method)
        if method == "fp8" and _is_block(block):
            return Fp8(method, (block[0], block[1]))
        if method == "compressed-tensors" and (fp8 := _compressed(settings)) is not None:
            return fp8
        named = f"quant_method {cut(method)}" if method else key
        raise ModelError(
            f"{path}: the checkpoint is quantised ({named}), expected plain weights or FP8: dsim loads bf16, fp16, "
            "fp32, FP8 with weight_block_size, and compressed-tensors of 8-bit floats"
        )
    return None


def _compressed(settings: Mapping[str, Any]) -> Fp8 | None:
    """The format of compressed-tensors' FP8; None: integers, fewer bits, or packed."""
    groups = settings.get("config_groups")
    if settings.get("format") not in FORMATS or not isinstance(groups, dict) or not groups:
        return None
    blocks = set()
    for group in groups.values():
        of_weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(of_weights, dict) or (of_weights.get("num_bits"), of_weights.get("type")) != (8, "float"):
            return None
        block: Any = of_weights.get("block_structure")
        blocks.add(tuple(block) if _is_block(block) else None)
    return Fp8("compressed-tensors", blocks.pop()) if len(blocks) == 1 else None


def _is_block(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(type(n) is int and n > 0 for n in value)


def scale_name(name: str, stored: Mapping[str, Any]) -> str | None:
    """The name of a weight's scale among the stored tensors; None without one."""
    return next((name + end for end in SCALES if name + end in stored), None)


def check_scale(path: Path, name: str, shape: list[int], scale: list[int], fp8: Fp8) -> None:
    """ModelError unless the scale fits a weight [..., rows, columns]."""
    *lead, rows, columns = [1, *shape] if len(shape) == 1 else shape
    known = [[], [1], [*lead, 1, 1], [*lead, rows], [*lead, rows, 1]]
    if fp8.block is not None:
        known = [[*lead, -(-rows // fp8.block[0]), -(-columns // fp8.block[1])]]
    if scale not in known:
        raise ModelError(f"{path}: the scale of {cut(name)} is {scale}, expected {known[-1]} for a weight of {shape}")


def widened(weight: Tensor, scale: Tensor, fp8: Fp8, row: int = 0, column: int = 0) -> Tensor:
    """A weight [..., rows, columns] times its scales, in fp32; row, column: where a part begins."""
    out = weight.float()
    scale = scale.to(weight.device, torch.float32)
    for part, factor in _matrices(out, scale):
        if fp8.block is None:
            each = factor.reshape(-1, 1)
            part.mul_(each if len(each) == 1 else each[row : row + len(part)])
            continue
        for dim, first in enumerate((row, column)):
            blocks = torch.arange(first, first + part.shape[dim], device=part.device) // fp8.block[dim]
            factor = factor.index_select(dim, blocks)
        part.mul_(factor)
    return out


def _matrices(weight: Tensor, scale: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    if weight.ndim < 3:
        yield weight, scale
        return
    for i in range(len(weight)):
        yield weight[i], scale if scale.numel() == 1 else scale[i]
