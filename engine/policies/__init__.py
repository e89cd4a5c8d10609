"""One file per system: fields, ranges, rules and presets, in the order of `dsim policies`."""

SHIPPED = (
    "ar", "lmdeploy_2025", "lmdeploy_0_18", "sglang_0_5", "chunk", "optimus", "multi_block", "delayed_cache", "focus",
    "llada", "fast_dllm", "dllm_cache", "sparse_dllm", "maskkv", "dllm_serve", "vllm_0_33",
)  # fmt: skip

# Default parts: file and name.
DEFAULTS = {
    "batching": ("lmdeploy_2025", "Continuous"), "granularity": ("whole_block", "FixedBlock"),
    "eviction": ("whole_block", "NoEviction"),
}  # fmt: skip

# Each family's baseline: the full cache in use today, or the only published server.
CANVAS_ROUNDS = "sglang-gemma"  # of prefills or of canvases, never of both
BASELINES = {
    "block-diffusion": "lmdeploy-bd32", "full-sequence": "dllm-serve", "canvas": "vllm-diffusion",
    "autoregressive": "ar",
}  # fmt: skip
