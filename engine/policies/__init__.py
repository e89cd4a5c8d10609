"""One file a system: its fields and their ranges, its rules, and its presets, in the order of `dsim policies`."""

SHIPPED = (
    "ar", "lmdeploy", "sglang", "chunk", "optimus", "delayed_cache", "focus", "llada", "fast_dllm", "dllm_cache",
    "sparse_dllm", "maskkv", "dllm_serve",
)  # fmt: skip
