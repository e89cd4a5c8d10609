"""`vllm bench serve` on one trace after another: `python -P bench.py FOLDER NAME=TRACE ... -- OPTION ...`

vLLM's load generator replays a trace's times and lengths; this adds each request's own limit of denoising steps, its
column `diffusion_max_steps`. Its result is FOLDER/NAME.json, and the names of its requests hold NAME. All traces have
one process: it takes longer to start than to send a trace.
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
    between = sys.argv.index("--")
    folder, *runs = sys.argv[1:between]
    usual = [
        "vllm", "bench", "serve", "--backend", "vllm", "--dataset-name", "timed_trace", "--num-warmups", "0",
        "--timed-trace-sec-multiplier", "0.001", "--num-prompts", "100000", "--save-result", "--save-detailed",
        "--result-dir", folder, *sys.argv[between + 1 :],
    ]  # fmt: skip
    for run in runs:
        name, _, trace = run.partition("=")
        own = ["--dataset-path", trace, "--request-id-prefix", f"{name}.", "--result-filename", f"{name}.json"]
        sys.argv = [*usual, *own]
        main()
