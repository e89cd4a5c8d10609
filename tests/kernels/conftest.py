"""Without CUDA the kernels run under Triton's interpreter, which must be asked for before triton is imported."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
from . import places

torch.set_num_threads(1)  # the tensors are small: threads would only wait for each other


@pytest.fixture(autouse=True, scope="module")
def _memory_is_never_clean() -> Iterator[None]:
    """Whatever is allocated without a value holds NaN, or an absurd number: what a kernel forgets to write shows."""

    def dirty(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def allocated(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor = allocate(*args, **kwargs)
            return tensor.fill_(torch.nan if tensor.is_floating_point() else 77)

        return allocated

    with torch.device("cpu"):  # PyTorch lists its factories, for later `with torch.device`: these, not ours
        torch.empty(0)
    with pytest.MonkeyPatch.context() as patch:
        for place, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
            patch.setattr(place, name, dirty(getattr(place, name)))
        yield


@pytest.fixture(autouse=True, scope="module")
def _the_last_program_runs_first() -> Iterator[None]:
    """Programs of a launch run in any order; the interpreter's own would hide one that relies on its predecessors."""
    if torch.cuda.is_available():
        yield
        return
    from triton.runtime.interpreter import interpreter_builder

    in_order = interpreter_builder.set_grid_idx

    def backwards(x: int, y: int, z: int) -> None:
        width, height, depth = interpreter_builder.grid_dim
        in_order(width - 1 - x, height - 1 - y, depth - 1 - z)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter_builder, "set_grid_idx", backwards)
        yield


@pytest.fixture(scope="session", params=places.EVERYWHERE)
def place(request: pytest.FixtureRequest) -> places.Place:
    """Every place where a kernel is tested."""
    found: places.Place = request.param
    return found
