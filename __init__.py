"""dsim: which scheduler settings, on how many GPUs, meet a latency target for a diffusion language model's traffic."""

__version__ = "0.1.0"
