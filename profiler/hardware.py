"""GPUs one may not own: data-sheet figures, and the shares of them that serving code reaches.

Peaks are dense bf16 with fp32 accumulation, bandwidths are the memory's, and a link is one direction of one GPU.
Memory is what nvidia-smi reports. Sources: NVIDIA's data sheets of the A100 80GB SXM, H100 SXM, H200 SXM and L40S,
and its Ada architecture white paper for the RTX 4090 (whose 48 GB card is a modified one, used by Sparse-dLLM).

The efficiencies are assumptions. Matrix products: the A100's 0.75 lies between the 0.71 that FOCUS's baseline reaches
with everything included and what its slope implies for the layers alone; Hopper reaches less of its larger peak (0.65);
the 4090's 0.80 follows from the 112-131 TFLOP/s of the LLaDA-8B runs in Sparse-dLLM's Table 1.
Bandwidth: 0.8 of the data sheet, 0.85 for GDDR6X cards (about 15.5 ms to read LLaDA-8B). Links: 0.7.
"""

from dataclasses import dataclass

from ..engine.errors import ProfileError
from ..files.read import cut

ATTENTION_EFFICIENCY = 0.3  # of the peak: short windows over paged keys
MOE_SHARE = 0.36  # of the dense efficiency: LLaDA2.0-mini's steps (FOCUS, Fig. 6) imply 0.27 of an A100's peak
LINK_EFFICIENCY = 0.7
MIB = 2**20


@dataclass(frozen=True)
class Gpu:
    """One GPU."""

    name: str
    peak: float  # FLOP/s
    bandwidth: float  # bytes/s
    memory_bytes: int
    link: float  # bytes/s, one direction
    link_latency: float  # s for one all-reduce of nothing: an assumption
    matmul_efficiency: float
    bandwidth_efficiency: float


_NVLINK, _PCIE = 10e-6, 30e-6  # s

_GPUS = (
    #    name             FLOP/s     bytes/s   memory        link B/s  latency  matmul  bandwidth
    Gpu("A100-80GB", 312.0e12, 2.039e12, 81920 * MIB, 300e9, _NVLINK, 0.75, 0.80),
    Gpu("H100", 989.4e12, 3.350e12, 81559 * MIB, 450e9, _NVLINK, 0.65, 0.80),
    Gpu("H200", 989.4e12, 4.800e12, 143771 * MIB, 450e9, _NVLINK, 0.65, 0.80),
    Gpu("L40S", 362.1e12, 0.864e12, 46068 * MIB, 31.5e9, _PCIE, 0.65, 0.80),
    Gpu("RTX4090", 165.2e12, 1.008e12, 24564 * MIB, 31.5e9, _PCIE, 0.80, 0.85),
    Gpu("RTX4090-48GB", 165.2e12, 1.008e12, 49140 * MIB, 31.5e9, _PCIE, 0.80, 0.85),
)
GPUS: dict[str, Gpu] = {gpu.name: gpu for gpu in _GPUS}
ALIASES = {"a100": "A100-80GB"}


def gpu(name: str) -> Gpu:
    """The GPU of that name, in any case of letters, or a ProfileError that lists the known ones."""
    wanted = ALIASES.get(name.lower(), name)
    for known, found in GPUS.items():
        if known.lower() == wanted.lower():
            return found
    raise ProfileError(f"no GPU is named {cut(name)}; the known ones are {', '.join(GPUS)}")


def default_max_batch(device: str) -> int:
    """LMDeploy's default for a GPU of that name (lmdeploy/utils.py)."""
    name = device.upper()
    if "A100" in name or "A800" in name:
        return 384
    if any(known in name for known in ("H100", "H800", "H200", "L20Y")):
        return 1024
    return 128
