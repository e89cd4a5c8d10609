"""Where a kernel's tests run: the reference on the CPU, the kernel under the interpreter, and the kernel on a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pytest
import torch

from dsim.kernels import Path, taken, use

GPU = torch.cuda.is_available()


class Place(NamedTuple):
    path: Path
    device: str

    @contextmanager
    def proved(self, *operations: str) -> Iterator[None]:
        """Take this place's path, and hold that it, and it alone, was taken by these operations and no other."""
        before = taken.copy()
        with use(self.path):
            yield
        assert set(taken - before) == {(operation, self.path) for operation in operations}


REFERENCE = Place("reference", "cpu")
KERNEL = [
    pytest.param(
        Place("triton", "cpu"),
        id="interpreter",
        marks=pytest.mark.skipif(GPU, reason="with CUDA kernels are compiled, not interpreted"),
    ),
    pytest.param(
        Place("triton", "cuda"),
        id="gpu",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not GPU, reason="needs a CUDA device")],
    ),
]
EVERYWHERE = [pytest.param(REFERENCE, id="reference"), *KERNEL]
