"""Serves policies with kernels that are asked for and never compiled: `python run_uncompiled.py SPEC ...`.

Launchers are called as they are, on the CPU, with a driver that only names a GPU; a launch ends where Triton would
compile, and what it would compile is noted. What a kernel should have written is zeros. A line of JSON for each policy,
eager and with graphs: the kernels and graphs made ready in all, and of those while the clock ran.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from triton import knobs
from triton.runtime.driver import driver

from dsim.engine.commits import CanvasLaw, CommitDraws, CommitModel, ImportanceDeltas, LawDraws, ScheduledCommits
from dsim.engine.engine import Limits
from dsim.engine.latency import LatencyModel
from dsim.engine.request import Request
from dsim.engine.spec import Policy, parse
from dsim.kernels import device, use
from dsim.live import session
from dsim.live.canvas_model import CanvasModel, random_canvas_model
from dsim.live.config import ConfigJson, Experts, ModelConfig, Settings
from dsim.live.families import CANVAS
from dsim.live.model import Decoder
from dsim.live.prompts import random_prompts
from dsim.live.weights import random_model
from dsim.tests.kernels.places import named_only

# Four query heads a KV head; a dense layer, and one of experts.
GROUPED = ModelConfig(
    "grouped", 2, 64, 8, 2, 16, 96, 97, 512, 32, 96, rope_theta=1e4, experts=Experts(8, 2, 32, dense_layers=1)
)  # fmt: skip
REQUESTS = 9
GEMMA = {
    "architectures": [CANVAS], "canvas_length": 16, "text_config": {
        "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 6, "num_attention_heads": 4, "head_dim": 16,
        "num_key_value_heads": 2, "global_head_dim": 32, "num_global_key_value_heads": 1, "vocab_size": 97,
        "max_position_embeddings": 512, "sliding_window": 24, "num_experts": 8, "top_k_experts": 2,
        "moe_intermediate_size": 32,
    },
}  # fmt: skip


def requests() -> list[Request]:
    """Prompts of every size, the longest last: the warm-up's four have seen but some."""
    chance = np.random.default_rng(0)
    return [Request(i, 0.0, 3 + 40 * i, int(chance.integers(1, 33))) for i in range(REQUESTS)]


def served(policy: Policy, graphs: session.GraphCache | None) -> dict[str, Any]:
    """What became of the requests under a policy."""
    asked = requests()
    block = policy.block_length
    lengths = tuple(np.array([getattr(r, name) for r in asked]) for name in ("input_length", "output_length"))
    model = CommitModel("toy", block, 0.9, None, tuple(0.6 * 0.9**d for d in range(block)))
    deltas = ImportanceDeltas(2.0, 1.0, 0.0, 1.0, 0.0)
    draws: CommitDraws | ScheduledCommits | LawDraws = (
        ScheduledCommits(block, policy.unmasking.denoising_steps) if policy.family == "full-sequence"
        else CommitDraws(model, 0, *lengths, block, deltas=deltas)
    )  # fmt: skip
    most = policy.batching.max_batch or 4
    model: Decoder | CanvasModel = random_model(GROUPED, "cpu", torch.bfloat16)
    if policy.family == "canvas":
        source = ConfigJson(Path("config.json"), GEMMA, {}, "gemma")
        model = random_canvas_model(source, "cpu", torch.bfloat16, 0, Settings(random_weights=True))
        draws = LawDraws(CanvasLaw("toy", block, 3.0), 0, REQUESTS)
    serving = session.Serving(
        model, policy, Limits(400, 512, most, state_tokens=GROUPED.state_tokens),
        random_prompts(GROUPED, 0), None if policy.rows.commits == "tokens" else draws, graphs=graphs,
        latency=LatencyModel(((0.0, 0.01), (16.0, 0.02)), 0.001),
    )  # fmt: skip
    done = session.run(serving, asked)
    if done.failure is not None:
        raise done.failure
    assert (done.table["status"] == 0).all()
    return {"ready": device.num_compilations(), "late": done.num_made_ready}


def zeroed(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def allocated(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = allocate(*args, **kwargs)
        return tensor if tensor.is_meta else tensor.zero_()

    return allocated


driver.set_active(named_only(90))
device.interpreted = lambda _: False
device.num_multiprocessors = lambda _: 132
device.shared_memory = lambda _: 227 * 1024
for place, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
    setattr(place, name, zeroed(getattr(place, name)))
# What products come to matters as little, and in bf16 they take a CPU longer than all else.
torch.nn.functional.linear = lambda x, weight, bias=None: x.new_zeros(*x.shape[:-1], len(weight))
knobs.runtime.jit_cache_hook = lambda *_, **__: True  # not to be compiled

with use("triton"):
    for spec in sys.argv[1:]:
        policy = parse(spec)
        for graphs in (None, session.GraphCache()) if policy.family != "full-sequence" else (None,):
            device._ready.clear()
            print(json.dumps({"policy": spec, "graphs": graphs is not None, **served(policy, graphs)}), flush=True)
