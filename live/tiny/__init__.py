"""The shipped byte-level block-diffusion model: its weights and its two workloads. research/tiny/ made them."""
