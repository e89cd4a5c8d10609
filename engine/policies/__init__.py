"""One file a system: its fields and their ranges, its rules, and its presets, in the order of `dsim policies`."""

SHIPPED = (
    "ar", "lmdeploy", "look_ahead", "sglang", "chunk", "optimus", "delayed_cache", "focus", "llada", "fast_dllm",
    "dllm_cache", "sparse_dllm", "maskkv", "dllm_serve", "sangam", "vllm",
)  # fmt: skip

# Parts of a policy that does not say: file and name.
DEFAULTS = {
    "batching": ("lmdeploy", "Continuous"), "granularity": ("whole_block", "FixedBlock"),
    "eviction": ("whole_block", "NoEviction"),
}  # fmt: skip

# For each family of checkpoints, the preset that others are compared with: the full cache that a team runs today for
# block-diffusion models, the only published server for full-sequence models.
BASELINES = {
    "block-diffusion": "lmdeploy-bd32", "full-sequence": "dllm-serve", "canvas": "vllm-diffusion",
    "autoregressive": "ar",
}  # fmt: skip
