"""`vllm bench serve` on a trace whose lines may hold `diffusion_max_steps`: `python -P bench.py OPTION ...`

vLLM's load generator replays a trace's times and lengths; this adds each request's own limit of denoising steps.
"""

import json
import sys

from vllm.benchmarks.datasets.datasets import TimedTrace
from vllm.entrypoints.cli.main import main

_sample = TimedTrace.sample


def sample(self, *args, **kwargs):
    requests = _sample(self, *args, **kwargs)
    for request, line in zip(requests, self.data, strict=False):
        steps = json.loads(line).get("diffusion_max_steps")
        if steps is not None:
            request.request_overrides = {"vllm_xargs": {"diffusion_max_steps": steps}}
    return requests


if __name__ == "__main__":
    TimedTrace.sample = sample
    sys.argv[1:1] = ["bench", "serve"]
    main()
