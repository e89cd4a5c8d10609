"""The tiny model's quality, `python research/tiny/evaluate.py`: held-out loss, yield by threshold, samples."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from corpus import records, source
from train import held_out_loss

from dsim.engine.engine import Engine, Limits
from dsim.engine.journal import RequestTable
from dsim.engine.request import Request
from dsim.engine.spec import parse
from dsim.engine.step import Phase
from dsim.live.cache import PagedCache
from dsim.live.device_loop import serve
from dsim.live.executor import ModelExecutor
from dsim.live.forward import Forward
from dsim.live.model import Decoder
from dsim.live.prompts import WORKLOADS, prompts_from, read_tokens
from dsim.live.session import Serving, run
from dsim.live.weights import load

THRESHOLDS = (0.7, 0.8, 0.9, 0.95)
NUM_REQUESTS, PROMPT, OUTPUT = 48, 160, 160


def policy_spec(block: int, threshold: float) -> str:
    """Whole blocks compute every mask, so the yield is the model's own."""
    return f"lmdeploy-bd32:{block},num_loops=1,decide_ahead=false,max_batch=8,threshold={threshold}"


def yield_of(model: Decoder, workload: str, threshold: float) -> tuple[float, int]:
    """Mean and most tokens that a denoising step commits."""
    block = model.config.block_length
    prompts = prompts_from(read_tokens(workload, "tiny", model.config), seed=0)
    steps = committed = most = 0

    def count(_columns: Mapping[str, Any], lists: Mapping[str, Any]) -> None:
        nonlocal steps, committed, most
        (phases, _), (words, _) = lists["phases"], lists["commits"]
        counts = np.bitwise_count(words.reshape(len(phases), -1)).sum(axis=1)[phases == Phase.DENOISE]
        steps, committed, most = (
            steps + len(counts),
            committed + int(counts.sum()),
            max(most, int(counts.max(initial=0))),
        )

    requests = [Request(i, 0.0, PROMPT, OUTPUT) for i in range(NUM_REQUESTS)]
    limits = Limits(200, model.config.context_limit, 8)
    done = run(Serving(model, parse(policy_spec(block, threshold)), limits, prompts), requests, append=count)
    if done.failure is not None:
        raise done.failure
    return committed / steps, most


def sample(model: Decoder, workload: str, request: int, threshold: float = 0.9) -> tuple[str, str]:
    """A prompt and its continuation."""
    policy = parse(policy_spec(model.config.block_length, threshold))
    prompts = prompts_from(read_tokens(workload, "tiny", model.config), seed=0)
    forward = Forward(model, PagedCache(model.config, 16, 64, "cpu", torch.float32))
    executor = ModelExecutor(forward, policy, prompts, None, policy.batching.max_prefill_tokens)
    engine = Engine(policy, Limits(16, model.config.context_limit, 1), RequestTable(request + 1))
    serve(engine, executor, [Request(request, 0.0, PROMPT, OUTPUT)])
    text = executor.text(request, 0, PROMPT + OUTPUT).astype(np.uint8).tobytes().decode(errors="replace")
    return text[:PROMPT], text[PROMPT:]


def main() -> None:
    model = load("tiny", "cpu", torch.float32)
    tests = {"source": source(held_out=True), "records": records(1, 200_000)}
    print("| workload | held-out loss, nats a masked byte |", *(f" {t:g} |" for t in THRESHOLDS), sep="")
    print("|---|---|" + "---|" * len(THRESHOLDS))
    for workload in WORKLOADS:
        cells = [yield_of(model, workload, threshold) for threshold in THRESHOLDS]
        loss = held_out_loss(model, tests[workload])
        print(f"| {workload} | {loss:.3f} |", *(f" {mean:.2f} (at most {most}) |" for mean, most in cells), sep="")
    for workload in WORKLOADS:
        for request in range(2):
            prompt, answer = sample(model, workload, request)
            print(f"\n{workload}, threshold 0.9; the prompt ends at ⟫\n\n```\n{prompt}⟫{answer}\n```")


if __name__ == "__main__":
    main()
