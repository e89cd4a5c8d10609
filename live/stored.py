"""The tensors of a directory's safetensors files."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..engine.errors import ModelError
from ..files.read import cut, shown
from .config import read_json

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
AT_ONCE = 4096  # rows compared at once


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of an open file."""

    path: Path
    name: str
    shape: tuple[int, ...]
    shard: Any

    def read(self) -> Tensor:
        """The tensor, on its file's device."""
        tensor: Tensor = self.shard.get_tensor(self.name)
        return tensor


def alike(first: tuple[Path, str], other: tuple[Path, str]) -> bool:
    """Whether two stored tensors are equal, a few rows at a time."""
    with safe_open(first[0], framework="pt") as file, safe_open(other[0], framework="pt") as second:
        a, b = file.get_slice(first[1]), second.get_slice(other[1])
        if a.get_shape() != b.get_shape():
            return False
        slices = [slice(low, low + AT_ONCE) for low in range(0, a.get_shape()[0], AT_ONCE)]
        return all(torch.equal(a[rows].float(), b[rows].float()) for rows in slices)


def stored_tensors(folder: Path, device: str) -> Iterator[StoredTensor]:
    """Every tensor of a directory, to be read to a device."""
    index = folder / INDEX
    files = [WEIGHTS]
    if (values := read_json(index)) is not None:
        listed = values.get("weight_map")
        if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()):
            raise ModelError(f"{index}: weight_map is {shown(listed)}, expected weights and the files they are in")
        files = sorted(set(listed.values()))
        outside = [name for name in files if Path(name).name != name]
        if outside:
            raise ModelError(f"{index}: weight_map names {cut(outside[0])}, expected a file of the folder itself")
    elif not (folder / WEIGHTS).is_file():
        raise ModelError(f"{folder}: has neither {WEIGHTS} nor {INDEX}")
    missing = [name for name in files if not os.path.isfile(folder / name)]  # Path.is_file raises for too long a name
    if missing:
        raise ModelError(f"{folder}: lacks {cut(missing[0])} ({len(missing)} of {len(files)} shards are missing)")
    for name in files:
        path = folder / name
        with _opened(path, device) as shard:
            for key in shard.keys():  # noqa: SIM118 - a shard is no dictionary
                tensor = shard.get_slice(key)  # the header has shape and dtype
                kind, shape = tensor.get_dtype(), tensor.get_shape()
                if kind.startswith("F8"):  # config.json names no quantisation
                    raise ModelError(f"{path}: {cut(key)} is {kind}, expected bf16, fp16 or fp32 weights")
                yield StoredTensor(path, key, tuple(shape), shard)


@contextmanager
def _opened(path: Path, device: str) -> Iterator[Any]:
    """Open a safetensors file. Raises ModelError."""
    try:
        with safe_open(path, framework="pt", device=device) as shard:
            yield shard
    except SafetensorError as error:
        raise ModelError(f"{path}: not a safetensors file: {cut(error)}") from None
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # no memory to map the file
        raise ModelError(f"{path}: cannot be read: {cut(error)}") from None
