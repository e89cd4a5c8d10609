"""GPUs by their data sheets (gpus.csv), and the share of each peak that serving code reaches.

Peaks are dense bf16 with fp32 accumulation; a link is one direction of one GPU, its latency assumed. Memory in whole
MiB is nvidia-smi's, in whole GB the data sheet's. B300, GB10, H800 and RTX PRO 6000 are from NVIDIA's tables of
measured kernels (precisions-and-cards.md 2). Users describe other GPUs in a TOML file (docs/plan.md).

Efficiencies are assumed. Matrix products: 0.75 on an A100, between the 0.71 of FOCUS's baseline and what its slope
implies for the layers; 0.65 on Hopper and Blackwell, whose peaks are larger; 0.80 on a 4090, from the 112-131 TFLOP/s
of LLaDA-8B in Sparse-dLLM's Table 1; 0.5 on an MI300X. Bandwidth: 0.8, and 0.85 for GDDR6X (about 15.5 ms to read
LLaDA-8B). Links: 0.7.
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, get_type_hints

from ..engine.errors import ProfileError
from ..engine.plain import Range
from ..files.read import cut, read_csv, read_toml
from ..files.schema import read_as

ATTENTION_EFFICIENCY = 0.3  # of the peak, for short windows over paged keys
# Beyond a key's first 64 queries (more than a block), as in a dense pass: FlashAttention-2 reaches 0.5 to 0.73 of an
# A100's peak and 0.35 of an H100's, FlashAttention-3 0.75 of it (arXiv 2307.08691, 2407.08608).
DENSE_EFFICIENCY = 0.6
MOE_SHARE = 0.36  # of the dense efficiency: LLaDA2.0-mini's steps (FOCUS, Fig. 6) imply 0.27 of an A100's peak
LINK_EFFICIENCY = 0.7
SHEETS = Path(__file__).parent / "gpus.csv"


@dataclass(frozen=True)
class Gpu:
    name: str
    peak: float  # FLOP/s
    bandwidth: float  # bytes/s
    memory_bytes: int
    link: float  # bytes/s, one direction
    link_latency: float  # s of an all-reduce without data: assumed
    matmul_efficiency: float
    bandwidth_efficiency: float
    source: str = ""  # of the figures
    compute_capability: str = ""  # NVIDIA's, such as 9.0, or AMD's gfx target; empty: unknown
    driver_name: str = ""  # as nvidia-smi prints it


_KINDS = get_type_hints(Gpu)
_SHIPPED = [Gpu(**{name: kind(row[name]) for name, kind in _KINDS.items()}) for _, row in read_csv(SHEETS, _KINDS)]
GPUS: dict[str, Gpu] = {gpu.name: gpu for gpu in _SHIPPED}
ALIASES = {"a100": "A100-80GB"}

# Relative: an H200 has 141 GB by its data sheet, 150.8 by its driver; two kinds of GPU differ by 0.24.
SAME = 0.1
Figure = Annotated[float, Range(0, 1e9, above=True)]
Efficiency = Annotated[float, Range(0, 1, above=True)]


@dataclass(frozen=True)
class Sheet:
    """A data sheet's TOML (docs/plan.md); defaults are assumed."""

    name: str
    source: str
    bf16_tflops: Figure
    bandwidth_gb_s: Figure
    memory_gb: Figure
    link_gb_s: Figure = 31.5
    link_latency_us: Figure = 30.0
    matmul_efficiency: Efficiency = 0.65
    bandwidth_efficiency: Efficiency = 0.8
    compute_capability: str | float = ""  # such as 9.0 or gfx942


def gpu(name: str) -> Gpu:
    """A GPU by name, however spaced, or from a TOML data sheet; ProfileError lists the known names."""
    if name.endswith(".toml"):
        return read_gpu(name)
    by_name = {_plain(spelling): row for row in GPUS.values() for spelling in (row.driver_name, row.name)}
    if match := by_name.get(_plain(ALIASES.get(name.lower(), name))):
        return match
    # No hint: a similar name is another chip.
    raise ProfileError(
        f"no GPU is named {cut(name)}; the known ones are {', '.join(GPUS)}, and a data sheet's TOML (docs/plan.md)"
    )


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]", "", name).lower()


def read_gpu(path: str | Path) -> Gpu:
    """A GPU from a TOML file. `compute_capability` defaults to that of a known GPU with about the same figures."""
    sheet = read_as(Sheet, str(path), "", read_toml(path, kind=ProfileError), ProfileError)
    # They are used in messages and file names.
    name, source = cut(sheet.name.strip()), sheet.source.strip()
    for key, text in (("name", name), ("source", source)):
        if not text:
            raise ProfileError(f'{path}: {key} is "", expected a text')
    gpu = Gpu(
        name=name,
        peak=1e12 * sheet.bf16_tflops,
        bandwidth=1e9 * sheet.bandwidth_gb_s,
        memory_bytes=round(1e9 * sheet.memory_gb),
        link=1e9 * sheet.link_gb_s,
        link_latency=1e-6 * sheet.link_latency_us,
        matmul_efficiency=sheet.matmul_efficiency,
        bandwidth_efficiency=sheet.bandwidth_efficiency,
        source=source,
        compute_capability=str(sheet.compute_capability).strip(),
    )
    return gpu if gpu.compute_capability else replace(gpu, compute_capability=_like(gpu))


def product_of(name: str) -> str:
    """The label that NVIDIA's operator gives a Kubernetes node with such GPUs; empty: unknown."""
    row = GPUS.get(name)
    return "" if row is None else row.driver_name.replace(" ", "-")


def _like(sheet: Gpu) -> str:
    """The compute capability of the known GPU with about these figures, or empty."""
    for row in GPUS.values():
        pairs = ((getattr(sheet, name), getattr(row, name)) for name in ("peak", "bandwidth", "memory_bytes"))
        if all(abs(figure / reference - 1.0) <= SAME for figure, reference in pairs):
            return row.compute_capability
    return ""


def default_max_batch(compute_capability: str) -> int:
    """LMDeploy's default batch by capability: A100 and A800, then Hopper (lmdeploy/utils.py)."""
    return {"8.0": 384, "9.0": 1024}.get(compute_capability, 128)


def capability_of_name(device: str) -> str:
    """The compute capability by a GPU's name, for step logs, which do not hold it."""
    name = device.upper()
    if "A100" in name or "A800" in name:
        return "8.0"
    if any(word in name for word in ("H100", "H800", "H20", "L20Y")):
        return "9.0"
    return next((gpu.compute_capability for gpu in GPUS.values() if device in (gpu.name, gpu.driver_name)), "")
