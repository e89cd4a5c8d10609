"""Measures: step shapes through the executor on a device, and the commits of the model at work on prompts."""

import os
import platform
from dataclasses import dataclass
from typing import Any

import torch

from ..engine.errors import ModelError, ProfileError
from ..live import weights
from ..live.config import ModelConfig
from ..live.model import Decoder
from .models import ModelShape
from .profile import Device, MemoryModel, Profile


@dataclass(frozen=True)
class Loaded:
    """A model on a device, ready to run, and the two as a profile describes them."""

    name: str  # as it was asked for: a preset or a directory
    model: Decoder
    device: Device
    shape: ModelShape
    memory: MemoryModel
    trained: bool  # whether its weights mean something

    @property
    def settings(self) -> dict[str, Any]:
        """What the figures of a run depend on besides the policy."""
        weight = self.model.embedding.weight
        found: dict[str, Any] = {
            "device": self.device.name, "model": self.model.config.name, "torch": torch.__version__,
            "dtype": str(weight.dtype).removeprefix("torch."), "threads": torch.get_num_threads(),
        }  # fmt: skip
        if weight.is_cuda:
            found |= {"cuda": torch.version.cuda, "driver": driver(), "clock_mhz": torch.cuda.clock_rate(weight.device)}
        return found


def open_model(name: str, device: str | None = None, seed: int = 0) -> Loaded:
    """Load a preset or a directory on a device, the GPU where there is one: bf16 there, fp32 on a CPU.

    Raises ModelError: no such model, its files are wrong, or CUDA was asked for and is not there.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.split(":")[0] not in ("cuda", "cpu"):
        raise ModelError(f"device is {device}, expected cuda or cpu")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ModelError(f"device is {device}, and PyTorch {torch.__version__} finds no CUDA device here: expected cpu")
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    try:
        model = weights.load(name, device, dtype, seed)
    except torch.OutOfMemoryError as error:
        size = 2 * weights.config_of(name).num_params
        raise ModelError(f"{name}: its {size / 1e9:.1f} GB do not fit on {device} ({error})") from None
    config = model.config
    found = describe(device)
    element = dtype.itemsize
    memory = MemoryModel(
        capacity_bytes=found.memory_bytes,
        weight_bytes=element * config.num_params,
        kv_bytes_per_token=2 * element * config.layers * config.kv_heads * config.head_dim,
        vocab=config.vocab,
    )
    return Loaded(name, model, found, shape_of(config), memory, weights.is_trained(name))


def describe(device: str) -> Device:
    """The device as a profile names it."""
    if device.startswith("cuda"):
        properties = torch.cuda.get_device_properties(device)
        return Device(properties.name, 1, properties.total_memory)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Device(f"CPU {processor()}, {torch.get_num_threads()} threads", 1, memory)


def processor() -> str:
    """The CPU's name."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def driver() -> str | None:
    """The GPU driver's version, where it says so."""
    try:
        with open("/proc/driver/nvidia/version", encoding="utf-8") as file:
            return file.readline().strip() or None
    except OSError:
        return None


def shape_of(config: ModelConfig) -> ModelShape:
    """A decoder's dimensions as a profile holds them."""
    return ModelShape(
        name=config.name, layers=config.layers, hidden=config.hidden, heads=config.heads, kv_heads=config.kv_heads,
        head_dim=config.head_dim, ffn=config.ffn, vocab=config.vocab, context_limit=config.context_limit,
        tied=config.tied, qk_norm=config.qk_norm,
    )  # fmt: skip


def check_same_model(profile: Profile, config: ModelConfig) -> None:
    """ProfileError unless the profile is of a model with these dimensions."""
    theirs, ours = profile.model, shape_of(config)
    for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab"):
        if getattr(theirs, name) != getattr(ours, name):
            raise ProfileError(
                f"profile {profile.name} is of {theirs.name} with {name} {getattr(theirs, name)}, "
                f"and the model {config.name} has {getattr(ours, name)}"
            )
