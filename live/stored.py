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
from .config_file import read_json

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True)
class Held:
    """A tensor of an open file."""

    path: Path
    name: str
    shape: tuple[int, ...]
    shard: Any

    def read(self) -> Tensor:
        """The tensor, on its file's device."""
        tensor: Tensor = self.shard.get_tensor(self.name)
        return tensor


def held_in(folder: Path, device: str) -> Iterator[Held]:
    """Every tensor of a directory, to be read to a device."""
    index = folder / INDEX
    files = [WEIGHTS]
    if (found := read_json(index)) is not None:
        listed = found.get("weight_map")
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
                part = shard.get_slice(key)  # the header has shape and dtype
                kind, shape = part.get_dtype(), part.get_shape()
                if kind.startswith("F8"):  # config.json names no quantisation
                    raise ModelError(f"{path}: {cut(key)} is {kind}, expected bf16, fp16 or fp32 weights")
                yield Held(path, key, tuple(shape), shard)


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
