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
from typing import Any, get_type_hints

from ..engine.errors import ProfileError
from ..engine.plain import Range
from ..files.read import cut, read_csv, read_toml
from ..files.schema import FileObject

ATTENTION_EFFICIENCY = 0.3  # of the peak, for short windows over paged keys
# Beyond a key's first 64 queries (more than a block), as in a dense pass: FlashAttention-2 reaches 0.5 to 0.73 of an
# A100's peak and 0.35 of an H100's, FlashAttention-3 0.75 of it (arXiv 2307.08691, 2407.08608).
DENSE_EFFICIENCY, DENSE_FROM = 0.6, 64
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

# Keys of a data sheet's TOML: field, and factor to its unit. Those in ASSUMED are optional.
KEYS: dict[str, tuple[str, float]] = {
    "bf16_tflops": ("peak", 1e12),
    "bandwidth_gb_s": ("bandwidth", 1e9),
    "memory_gb": ("memory_bytes", 1e9),
    "link_gb_s": ("link", 1e9),
    "link_latency_us": ("link_latency", 1e-6),
    "matmul_efficiency": ("matmul_efficiency", 1.0),
    "bandwidth_efficiency": ("bandwidth_efficiency", 1.0),
}
# Relative: an H200 has 141 GB by its data sheet, 150.8 by its driver; two kinds of GPU differ by 0.24.
SAME = 0.1
ASSUMED = {"link_gb_s": 31.5, "link_latency_us": 30.0, "matmul_efficiency": 0.65, "bandwidth_efficiency": 0.8}


FIGURE, SHARE = Range(0, 1e9, above=True), Range(0, 1, above=True)


def gpu(name: str) -> Gpu:
    """A GPU by name, however spaced, or from a TOML data sheet; ProfileError lists the known names."""
    if name.endswith(".toml"):
        return read_gpu(name)
    known = {_plain(spelling): row for row in GPUS.values() for spelling in (row.driver_name, row.name)}
    if found := known.get(_plain(ALIASES.get(name.lower(), name))):
        return found
    # No hint: a similar name is another chip.
    raise ProfileError(
        f"no GPU is named {cut(name)}; the known ones are {', '.join(GPUS)}, and a data sheet's TOML (docs/plan.md)"
    )


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]", "", name).lower()


def read_gpu(path: str | Path) -> Gpu:
    """A GPU from a TOML file: `name`, `source` and KEYS; keys in ASSUMED are optional.

    `compute_capability` defaults to that of a known GPU with about the same figures.
    """
    needed = ["name", "source", *(key for key in KEYS if key not in ASSUMED)]
    optional = {"compute_capability": "", **ASSUMED}
    given = FileObject(str(path), "", read_toml(path, kind=ProfileError), needed, optional=optional, error=ProfileError)
    figures: dict[str, Any] = {
        ours: given.number(key, SHARE if key.endswith("_efficiency") else FIGURE) * unit
        for key, (ours, unit) in KEYS.items()
    }
    # It is used in messages and file names.
    texts: dict[str, Any] = {"name": cut(given.text("name").strip()), "source": given.text("source").strip()}
    for key, text in texts.items():
        if not text:
            raise given.error(key, text, "a text")
    kind = given.values["compute_capability"]
    if not isinstance(kind, str | float):
        raise given.error("compute_capability", kind, "a text such as 9.0 or gfx942")
    memory = round(figures.pop("memory_bytes"))
    found = Gpu(**texts, memory_bytes=memory, compute_capability=str(kind).strip(), **figures)
    return found if found.compute_capability else replace(found, compute_capability=_like(found))


def product_of(name: str) -> str:
    """The label that NVIDIA's operator gives a Kubernetes node with such GPUs; empty: unknown."""
    known = GPUS.get(name)
    return "" if known is None else known.driver_name.replace(" ", "-")


def _like(sheet: Gpu) -> str:
    """The compute capability of the known GPU with about these figures, or empty."""
    for known in GPUS.values():
        pairs = ((getattr(sheet, name), getattr(known, name)) for name in ("peak", "bandwidth", "memory_bytes"))
        if all(abs(given / own - 1.0) <= SAME for given, own in pairs):
            return known.compute_capability
    return ""


def default_max_batch(compute_capability: str) -> int:
    """LMDeploy's default batch by capability: A100 and A800, then Hopper (lmdeploy/utils.py)."""
    return {"8.0": 384, "9.0": 1024}.get(compute_capability, 128)


def capability_of_name(device: str) -> str:
    """The compute capability by a GPU's name, for step logs, which do not hold it."""
    name = device.upper()
    if "A100" in name or "A800" in name:
        return "8.0"
    if any(known in name for known in ("H100", "H800", "H20", "L20Y")):
        return "9.0"
    return next((gpu.compute_capability for gpu in GPUS.values() if device in (gpu.name, gpu.driver_name)), "")
