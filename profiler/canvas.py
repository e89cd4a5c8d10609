"""A canvas model on a device, ready to run."""

from dataclasses import dataclass

import torch

from ..engine.errors import ModelError
from ..live import weights
from ..live.canvas_model import CanvasModel, canvas_config, num_params, random_canvas_model, read_canvas_model
from ..live.config_file import AS_IT_SAYS, Given
from .clocks import clocks_of
from .measure import Loaded, OnDevice, check_device, check_room, describe, open_model, select, tell_made, uuid_of
from .profile import MemoryModel


@dataclass(frozen=True, kw_only=True)
class LoadedCanvas(OnDevice):
    """A canvas model; for decoders, `Loaded`."""

    model: CanvasModel

    @property
    def weight(self) -> torch.Tensor:
        return self.model.embedding


Opened = Loaded | LoadedCanvas


def open_any(
    name: str, device: str | None = None, seed: int = 0, graphs: bool | None = None, given: Given = AS_IT_SAYS
) -> Opened:
    """Open a decoder or a canvas model. Raises ModelError."""
    if weights.is_canvas(name, given):
        return open_canvas(name, device, given, seed, graphs=graphs)
    return open_model(name, device, seed, graphs, given)


def open_canvas(
    name: str, device: str | None, given: Given, seed: int = 0, *, graphs: bool | None = None
) -> LoadedCanvas:
    """Load a DiffusionGemma, with random weights if there is no checkpoint. Raises ModelError."""
    check_asked(name, given)
    device = check_device(device)
    free = select(device)
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    source, trained = weights.source_of(name, given), weights.is_trained(name, given)
    config = canvas_config(source, given)
    check_room(name, dtype.itemsize * num_params(config), device, free)
    if trained:
        model = read_canvas_model(weights.folder_of(name), device, dtype)
    else:
        model = random_canvas_model(source, device, dtype, seed, given)
    made = weights.made(seed, trained=trained, has_experts=True)
    tell_made(name, made)
    found = describe(device)
    memory = MemoryModel(
        capacity_bytes=free or found.memory_bytes,
        weight_bytes=dtype.itemsize * num_params(config),
        # A windowed layer gets as many pages as the others: it frees pages only later.
        kv_bytes_per_token=dtype.itemsize * sum(config.kv_elements(kind) for kind in (True, False)),
        vocab=config.vocab,
    )
    return LoadedCanvas(
        name=name, model=model, device=found, memory=memory, trained=trained, made=made,
        graphs=device.startswith("cuda") if graphs is None else graphs,
        clocks=clocks_of(uuid_of(model.embedding.device)),
    )  # fmt: skip


def check_asked(name: str, given: Given) -> None:
    """ModelError for a setting that canvas models lack."""
    for asked, option, expected in (
        (given.mask_token, "--mask-token-id", "none: it knows no mask"),
        (given.block_length, "--block-length", "the policy's canvas_length"),
    ):
        if asked is not None:
            raise ModelError(f"{name}: denoises canvases, and {option} is {asked}: expected {expected}")
