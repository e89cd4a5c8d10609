"""Where a kernel's tests run: the reference on the CPU, the kernel under the interpreter, and the kernel on a GPU."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from dsim.kernels import Path, taken, use

GPU = torch.cuda.is_available()
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


class Place(NamedTuple):
    path: Path
    device: str

    @contextmanager
    def proved(self, *operations: str) -> Iterator[None]:
        """Take this place's path, and hold that these operations took it, and no other operation took any."""
        before = taken.copy()
        with use(self.path):
            yield
        assert set(taken - before) == {(operation, self.path) for operation in operations}

    def call(self, launcher: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A launcher's results, on the CPU, called on this device by this path; it leaves its inputs as they were."""
        given = moved(args, self.device), moved(kwargs, self.device)
        before = moved(args, "cpu")
        with self.proved(launcher.__name__):
            found = launcher(*given[0], **given[1])
        assert all(map(same, tensors(given[0]), tensors(before)))
        return moved(found, "cpu")


def named_only(capability: int) -> SimpleNamespace:
    """A driver that only names a GPU, for kernels that are compiled, or asked for, where there is none."""
    from triton.backends.compiler import GPUTarget

    target = GPUTarget("cuda", capability, 32)
    answers = {"get_current_target": lambda: target, "get_current_device": lambda: 0, "get_current_stream": lambda _: 0}
    return SimpleNamespace(**answers)


def moved(x: Any, device: str) -> Any:
    """Copies of the tensors among these values on a device."""
    if isinstance(x, torch.Tensor):
        # A copy with the same strides: rows may be columns of a wider tensor.
        held = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
        return held.copy_(x)
    if isinstance(x, dict):
        return {name: moved(value, device) for name, value in x.items()}
    if isinstance(x, tuple | list):
        parts = [moved(part, device) for part in x]
        return type(x)(*parts) if hasattr(x, "_fields") else type(x)(parts)
    return x


def tensors(x: Any) -> Iterator[torch.Tensor]:
    """The tensors among these values."""
    if isinstance(x, torch.Tensor):
        yield x
    elif isinstance(x, tuple | list):
        for part in x:
            yield from tensors(part)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.cpu().nan_to_num(7.0), other.cpu().nan_to_num(7.0))


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def starts(lengths: list[int]) -> torch.Tensor:
    """Where each sequence of these lengths begins, and where the last one ends, int32."""
    return torch.tensor([0, *lengths]).cumsum(0).int()


def attended(q: torch.Tensor, pages: tuple[torch.Tensor, torch.Tensor], at: Any, scale: float) -> torch.Tensor:
    """What a query's heads [H, D] read of the keys and values at these (page, slot), in fp64."""
    where = tuple(torch.as_tensor(at).T)
    k, v = (x[where].double().repeat_interleave(len(q) // x.shape[2], 1) for x in pages)
    return torch.einsum("hk,khd->hd", (torch.einsum("hd,khd->hk", q.double(), k) * scale).softmax(-1), v)


def normal(seed: int, *shape: int, dtype: torch.dtype = FP32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


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
