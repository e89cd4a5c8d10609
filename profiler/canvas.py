"""A canvas model on a device, ready to run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..engine.errors import ModelError
from ..live.canvas_model import CanvasModel, is_canvas, num_params, read_canvas_model
from ..live.config_file import AS_IT_SAYS, Given
from .clocks import Clocks
from .measure import Loaded, check_device, describe, open_model, select, settings_of
from .profile import Device, MemoryModel


@dataclass(frozen=True)
class LoadedCanvas:
    """A canvas model on a device, as `Loaded` is a decoder. Nothing is captured."""

    name: str  # as it was asked for
    model: CanvasModel
    device: Device
    memory: MemoryModel

    trained = True
    graphs = False
    kept = None
    clocks = Clocks(None)  # nor are its steps sampled

    @property
    def on_gpu(self) -> bool:
        return bool(self.model.embedding.is_cuda)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that a run's figures depend on, next to the policy."""
        return settings_of(self.device, self.model.config.name, self.model.embedding, graphs=False)


Opened = Loaded | LoadedCanvas


def open_any(
    name: str, device: str | None = None, seed: int = 0, graphs: bool | None = None, given: Given = AS_IT_SAYS,
    tp: int = 1,
) -> Opened:  # fmt: skip
    """Open a decoder (`open_model`) or a canvas model (`open_canvas`). Raises ModelError."""
    if is_canvas(Path(name)):
        return open_canvas(name, device, given, graphs=graphs, tp=tp)
    return open_model(name, device, seed, graphs, given, tp)


def open_canvas(
    name: str, device: str | None, given: Given, *, graphs: bool | None = None, tp: int = 1
) -> LoadedCanvas:
    """Open a DiffusionGemma directory on a device. Raises ModelError."""
    check_asked(name, given)
    for wanted, says, expected in (
        (not graphs, "--graphs is asked for", "none: its steps are not captured"),
        (tp == 1, f"--tp is {tp}", "1"),
    ):
        if not wanted:
            raise ModelError(f"{name}: denoises canvases, and {says}: expected {expected}")
    device = check_device(device)
    free = select(device)
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    model = read_canvas_model(Path(name), device, dtype)
    found, config = describe(device), model.config
    memory = MemoryModel(
        capacity_bytes=free or found.memory_bytes,
        weight_bytes=dtype.itemsize * num_params(config),
        # Both kinds of layers have as many pages: what a window leaves behind comes back, but is held at first.
        kv_bytes_per_token=dtype.itemsize * sum(config.kv_elements(kind) for kind in (True, False)),
        vocab=config.vocab,
    )
    return LoadedCanvas(name, model, found, memory)


def check_asked(name: str, given: Given) -> None:
    """ModelError for a setting that a canvas model does not have."""
    for asked, option, expected in (
        (given.mask_token, "--mask-token-id", "none: it knows no mask"),
        (given.block_length, "--block-length", "the policy's canvas_length"),
    ):
        if asked is not None:
            raise ModelError(f"{name}: denoises canvases, and {option} is {asked}: expected {expected}")
