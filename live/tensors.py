"""The tensors of a directory's safetensors files."""

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..engine.errors import ModelError
from ..files.read import cut, shown
from .config import read_json

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


class StoredTensor(NamedTuple):
    """A tensor of an open file."""

    path: Path
    name: str
    shape: tuple[int, ...]
    read: Callable[[], Tensor]


def stored_tensors(folder: Path, device: str) -> Iterator[StoredTensor]:
    """Every tensor of a directory, to be read to a device. Raises ModelError."""
    for path in _shards(folder):
        try:
            with safe_open(path, framework="pt", device=device) as shard:
                for name in shard.keys():  # noqa: SIM118 - a shard is no dictionary
                    header = shard.get_slice(name)
                    kind = header.get_dtype()
                    if kind not in ("BF16", "F16", "F32"):  # config.json names no quantisation
                        raise ModelError(f"{path}: {cut(name)} is {kind}, expected bf16, fp16 or fp32 weights")
                    yield StoredTensor(path, name, tuple(header.get_shape()), partial(shard.get_tensor, name))
        except SafetensorError as error:
            raise ModelError(f"{path}: not a safetensors file: {cut(error)}") from None


def _shards(folder: Path) -> list[Path]:
    index = folder / INDEX
    names = [WEIGHTS]
    if (values := read_json(index)) is not None:
        listed = values.get("weight_map")
        if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()):
            raise ModelError(f"{index}: weight_map is {shown(listed)}, expected weights and the files they are in")
        names = sorted(set(listed.values()))
        outside = [name for name in names if Path(name).name != name]
        if outside:
            raise ModelError(f"{index}: weight_map names {cut(outside[0])}, expected a file of the folder itself")
    elif not (folder / WEIGHTS).is_file():
        raise ModelError(f"{folder}: has neither {WEIGHTS} nor {INDEX}")
    missing = [name for name in names if not os.path.isfile(folder / name)]  # Path.is_file raises for too long a name
    if missing:
        raise ModelError(f"{folder}: lacks {cut(missing[0])} ({len(missing)} of {len(names)} shards are missing)")
    return [folder / name for name in names]
