"""The tensors of a forward, as counted in its code, beside the bytes that PyTorch allocates, on a CPU and in fp32."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from weakref import finalize

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dsim.engine.engine import Limits
from dsim.engine.request import Request
from dsim.engine.spec import parse
from dsim.live import session
from dsim.live.config import ModelConfig
from dsim.live.forward import Batch, Sampled
from dsim.live.prompts import random_prompts
from dsim.live.weights import random_model
from dsim.profiler.footprint import Implementation, of_forward
from dsim.profiler.measure import shape_of

from ..checks import cases
from .dense import SMALL
from .test_executor import LATENCY
from .watched import serve_all

# PyTorch's plain operators on a CPU: a copy of the gate, and of fp32 logits three more until a token is chosen.
PLAIN = Implementation(element=4, gate_copies=4, logit_bytes=4 * 4)
WIDE = replace(SMALL, ffn=24 * SMALL.hidden)
BROAD = replace(SMALL, hidden=768, ffn=768)
MANY_WORDS = replace(SMALL, vocab=4096)


class Allocated(TorchDispatchMode):
    """Counts the bytes of tensors that are alive and were made under it: a CPU has no counter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self.now = 0
        self._alive: dict[int, int] = {}  # by address of the memory: tensors that share it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        made = func(*args, **(kwargs or {}))
        for x in tree_leaves(made):
            if isinstance(x, torch.Tensor):
                self._add(x, given)
        return made

    def _add(self, x: torch.Tensor, given: set[int]) -> None:
        held = x.untyped_storage()
        at, size = held.data_ptr(), held.nbytes()
        if at in given and at not in self._alive:
            return  # a view of what there was before
        if at not in self._alive:
            self.now += size
            self.peak = max(self.peak, self.now)
        self._alive[at] = self._alive.get(at, 0) + 1
        finalize(x, self._drop, at, size)

    def _drop(self, at: int, size: int) -> None:
        self._alive[at] -= 1
        if not self._alive[at]:
            del self._alive[at]
            self.now -= size


def forwards(config: ModelConfig, spec: str, max_num_logits: int) -> list[tuple[int, int, int]]:
    """Tokens, sampled rows and peak bytes of every forward of a few requests."""
    found: list[tuple[int, int, int]] = []
    model = random_model(config, "cpu", torch.float32, seed=1)
    policy, limits = parse(spec), Limits(200, 256, 4)
    requests = [Request(i, 0.0, p, o) for i, (p, o) in enumerate([(90, 30), (9, 40)])]
    serving = session.Serving(model, policy, limits, random_prompts(config, 7))
    forward: Any = serving.forward(requests)
    forward.max_num_logits = max_num_logits
    run: Callable[[Batch], Sampled] = forward.run

    def measured(batch: Batch) -> Sampled:
        with Allocated() as counter:
            answer = run(batch)
        found.append((len(batch.tokens), len(batch.sampled), counter.peak))
        return answer

    forward.run = measured
    serve_all(serving.executor(forward), policy, limits, requests, latency=LATENCY)
    return found


@pytest.mark.sampled(4)
@cases(
    "config spec max_num_logits largest",
    (WIDE, "lmdeploy-bd32", 4096, "activations of the feed-forward"),
    (BROAD, "lmdeploy-bd32", 4096, "activations of attention"),
    (MANY_WORDS, "lmdeploy-bd32", 4096, "logits"),
    (MANY_WORDS, "lmdeploy-bd32", 16, "logits"),
    (MANY_WORDS, "dllm-serve,block_length=32,page_size=32", 4096, "logits"),
)
def test_a_forward_allocates_what_is_counted_of_its_code(
    config: ModelConfig, spec: str, max_num_logits: int, largest: str
) -> None:
    shape = shape_of(config)
    found = forwards(config, spec, max_num_logits)
    assert len(found) > 20
    for tokens, rows, peak in found:
        counted = of_forward(shape, tokens, rows, how=PLAIN, max_num_logits=max_num_logits)
        assert sum(counted.values()) == pytest.approx(peak, rel=0.04)
        assert max(counted, key=lambda name: counted[name]) == largest
