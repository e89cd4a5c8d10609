"""One file a system: its fields and their ranges, its rules, and its presets. `dsim policies` lists them in this order."""

SHIPPED = (
    "ar", "lmdeploy", "sglang", "chunk", "optimus", "delayed_cache", "focus", "llada", "fast_dllm", "dllm_cache",
    "sparse_dllm", "maskkv", "dllm_serve",
)  # fmt: skip
