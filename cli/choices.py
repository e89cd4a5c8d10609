"""Names and defaults of options, copied so that help and wrong options load nothing else.

tests/cli/test_start.py compares them with their originals.
"""

TRACES = ("azure-conv", "mooncake-conv")
ARRIVALS = ("trace", "poisson", "gamma", "constant")
LENGTHS = ("sharegpt", "lmsys", "longbench", "gsm8k", "humaneval", "mbpp", "ifeval")
LENGTH_FORMS = "fixed:IN,OUT, normal:MEAN,STD[,MEAN,STD], lognormal:MEAN,STD[,MEAN,STD]"

PROFILE = "a100-sdar-8b"
POLICY = "optimus"
WEIGHTS = ("bf16", "fp8", "nvfp4", "mxfp4", "int4")
ROUTERS = ("round-robin", "random", "least-tokens", "jsq", "prefix")
UNROUTED = "random"
DECIDERS = ("always", "never", "uncached")
FIXED = "fixed"
SCALERS = (FIXED, "schedule", "hpa", "queued-forwards")
EMIT = ("block", "step", "end")

OBJECTIVES = ("goodput", "throughput", "cost", "latency")
VALIDATE_POLICIES = ("ar", "lmdeploy-bd32", "chunk:8", "optimus")
VALIDATE_LOADS = ("64", "full", "0.6", "16", "0.8", "0.3")
