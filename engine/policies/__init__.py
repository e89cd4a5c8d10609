"""One file a system: its fields and their ranges, its rules, and its presets, in the order of `dsim policies`."""

SHIPPED = (
    "ar", "lmdeploy", "sglang", "chunk", "optimus", "delayed_cache", "focus", "llada", "fast_dllm", "dllm_cache",
    "sparse_dllm", "maskkv", "dllm_serve", "vllm",
)  # fmt: skip

# Parts of a policy that does not say: file and name.
DEFAULTS = {
    "batching": ("lmdeploy", "Continuous"), "granularity": ("whole_block", "FixedBlock"),
    "eviction": ("whole_block", "NoEviction"),
}  # fmt: skip

# Presets that the others are compared with: the full cache that a team runs today, and the one published server of
# full-sequence models.
BASELINE = "lmdeploy-bd32"
FULL_SEQUENCE_BASELINE = "dllm-serve"
