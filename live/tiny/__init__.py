"""The shipped byte-level block-diffusion model: its two workloads, its training script and its weights."""
