"""What a decode step of every family launches and moves: `python -m dsim.benchmarks.counted [--write]`.

Launches are counted on a CPU: a model with the structure of the shipped config.json and small matrices serves a few
requests, with two layers and with three, and PyTorch's dispatcher reports what a step dispatches. A kernel of ours
counts with its launches on a GPU (LAUNCHES). Bytes and operations are computed for the real dimensions: weights are
read once, of experts the expected number that a step's rows reach, and so are the keys and values before each row. The
floor is the longer of both at the rates at which an H100 copied and multiplied. --write puts the table into
kernels/README.md.
"""

import argparse
import pathlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dsim.benchmarks.vllm_cpu_table import put
from dsim.engine.engine import Limits
from dsim.engine.journal import RequestTable
from dsim.engine.request import Request
from dsim.engine.spec import parse
from dsim.engine.step import StepOutcome, StepPlan
from dsim.kernels import Path, operation
from dsim.live.canvas_model import random_canvas_model
from dsim.live.config import ConfigJson
from dsim.live.device_loop import serve
from dsim.live.prompts import random_prompts
from dsim.live.session import Serving
from dsim.live.shipped_configs import CONFIGS
from dsim.live.weights import config_of, random_model
from dsim.profiler import models

README = pathlib.Path(__file__).parents[1] / "kernels" / "README.md"
BANDWIDTH, RATE = 2.885e12, 756e12  # bytes/s and bf16 FLOP/s, measured on an H100
CONTEXT = 1024  # tokens before each row
SEQUENCES = (1, 8, 64)
BLOCK, VOCAB = 4, 97  # of the small models
# The profiler's name of a shipped config's dimensions, its policy, and the tokens of a sequence's step.
FAMILIES = {
    "sdar-8b": ("SDAR-8B", "lmdeploy-bd32", 32),
    "sdar-30b-a3b": ("SDAR-30B-A3B", "lmdeploy-bd32", 32),
    "llada2-mini": ("LLaDA2.0-mini", "lmdeploy-bd32", 32),
    "llada2-flash": ("LLaDA2.0-flash", "lmdeploy-bd32", 32),
    "qwen3-8b": ("Qwen3-8B", "ar", 1),
    "llada-8b": ("LLaDA-8B", "vanilla", CONTEXT),
    "dream-7b": ("Dream-7B", "vanilla", CONTEXT),
    "diffusiongemma": ("DiffusionGemma-26B-A4B", "vllm-diffusion", 256),
}
MAKES_ROOM = ("empty", "new_empty", "empty_like", "empty_strided")  # allocate, and launch nothing
# Our kernels that launch more than once: a merge follows split keys and partial soft-maxes; experts are sorted,
# multiplied twice and summed.
LAUNCHES = {
    "ragged_paged_attention": 2, "confidence": 2, "confidence_of_hidden": 2,
    "grouped_experts": 4, "read_logits": 2,
}  # fmt: skip


class Launches(TorchDispatchMode):
    """Counts dispatches by name; inside our kernels, only the kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[str] = Counter()
        self._inside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if not self._inside and name not in MAKES_ROOM and (name.endswith("_") or not _is_view(found, args)):
            self.counted[name] += 1
        return found

    @contextmanager
    def of_kernels(self) -> Iterator["Launches"]:
        """Inside, count our kernels and what PyTorch dispatches."""
        run = operation.run

        def called(specification: Callable[..., Any], arguments: dict[str, Any], path: Path) -> Any:
            if self._inside:
                return run(specification, arguments, path)
            self.counted[specification.__name__] += 1
            self._inside = True
            try:
                return run(specification, arguments, path)
            finally:
                self._inside = False

        operation.run = called
        try:
            with self:
                yield self
        finally:
            operation.run = run


def _is_view(found: Any, args: Any) -> bool:
    """Whether the found tensors share memory with a given one."""
    places = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
    every = found if isinstance(found, tuple | list) else [found]
    return all(isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() in places for x in every)


def small(name: str, layers: int) -> Any:
    """A shipped config's structure with `layers` layers and small matrices, on the CPU."""
    if name != "diffusiongemma":
        config = config_of(name)
        mixed = config.experts and replace(config.experts, num=8, top_k=2, ffn=16, groups=1, top_groups=1)
        return random_model(
            replace(
                config, layers=layers, hidden=48, heads=4, kv_heads=2, head_dim=16, ffn=80, vocab=VOCAB,
                context_limit=256, block_length=min(BLOCK, config.block_length), mask_token=VOCAB - 1, experts=mixed,
            ), "cpu", torch.float32,
        )  # fmt: skip
    found = dict(CONFIGS[name])
    text = found["text_config"] | {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": layers, "num_attention_heads": 4,
        "num_key_value_heads": 2, "num_global_key_value_heads": 1, "head_dim": 8, "global_head_dim": 16,
        "vocab_size": VOCAB, "max_position_embeddings": 128, "sliding_window": 12, "num_experts": 8,
        "top_k_experts": 2, "moe_intermediate_size": 16, "eos_token_id": 1,
        "layer_types": ["full_attention", *["sliding_attention"] * (layers - 1)],
    }  # fmt: skip
    source = ConfigJson(pathlib.Path(name), found | {"canvas_length": BLOCK, "text_config": text}, {}, name)
    return random_canvas_model(source, "cpu", torch.float32)


def launches(name: str, layers: int, sequences: int) -> int:
    """Launches of the median decode step of `sequences` sequences."""
    model, spec = small(name, layers), FAMILIES[name][1]
    policy = parse(
        {
            "ar": f"ar,max_batch={sequences}",
            "lmdeploy-bd32": f"lmdeploy-bd32,block_length={BLOCK},max_batch={sequences}",
            "vanilla": f"vanilla,block_length={BLOCK}",  # which serves one sequence
            "vllm-diffusion": f"vllm-diffusion,canvas_length={BLOCK},max_num_seqs={sequences}",
        }[spec]
    )
    requests = [Request(i, 0.0, 2 * BLOCK, 2 * BLOCK) for i in range(sequences)]
    limits = Limits(1 << 10, 128, sequences, state_tokens=model.config.state_tokens)
    serving = Serving(model, policy, limits, random_prompts(model.config, 0))
    executor = serving.executor(serving.forward(requests))
    found: list[int] = []

    class Watched:
        def step(self, plan: StepPlan) -> StepOutcome:
            if plan.prefill:
                return executor.step(plan)
            with Launches().of_kernels() as mode:
                outcome = executor.step(plan)
            found.append(sum(num * LAUNCHES.get(launched, 1) for launched, num in mode.counted.items()))
            return outcome

    serve(serving.engine(RequestTable(sequences)), Watched(), requests)
    return sorted(found)[len(found) // 2]


def bytes_of(name: str, sequences: int) -> float:
    """The least bytes that a step of `sequences` sequences reads: weights, and the keys and values before each."""
    shape, (_, spec, tokens) = models.model(FAMILIES[name][0]), FAMILIES[name]
    touched = models.touched_experts(shape, sequences * tokens) * models.expert_params(shape)
    weights = (
        models.layer_params(shape) - models.expert_params(shape) + touched + heads(name) * models.head_params(shape)
    )
    if spec == "vanilla":  # it keeps no keys
        return models.BYTES * weights
    windowed = shape.windowed
    seen = CONTEXT * shape.kv_bytes_per_token
    seen += 0 if windowed is None else min(CONTEXT, windowed.window) * shape.window_bytes_on(1)
    return models.BYTES * weights + sequences * seen


def flops_of(name: str, sequences: int) -> float:
    """The least operations of a step: matrices, head and attention."""
    shape, (_, spec, tokens) = models.model(FAMILIES[name][0]), FAMILIES[name]
    keys = tokens if spec == "vanilla" else CONTEXT + tokens
    pairs = models.attention_flops(shape) + models.window_flops(shape)
    a_row = models.flops_per_token(shape) + heads(name) * models.head_flops(shape) + keys * pairs
    return float(sequences * tokens * a_row)


def heads(name: str) -> int:
    """Products with the head's matrix; a canvas step has a second one, to embed expected tokens."""
    return 2 if name == "diffusiongemma" else 1


def table() -> str:
    columns = ["of (rows a sequence)", "launches a layer", "a step"]
    columns += [f"{n} sequence{'s' * (n > 1)}: GB, floor" for n in SEQUENCES]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for name, (known, spec, tokens) in FAMILIES.items():
        num = 1 if spec == "vanilla" else 3
        two, three = (launches(name, layers, num) for layers in (2, 3))
        a_layer, layers = three - two, models.model(known).layers
        cells = [f"{known} ({tokens})", str(a_layer), str(two + (layers - 2) * a_layer)]
        for n in SEQUENCES:
            moved, done = bytes_of(name, n), flops_of(name, n)
            least = max(moved / BANDWIDTH, done / RATE)
            alone = spec == "vanilla" and n > 1
            cells.append("" if alone else f"{moved / 1e9:.1f}, {1e3 * least:.1f} ms")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Launches and bytes of a decode step of every family")
    parser.add_argument("--write", action="store_true", help=f"put the table into {README.name} of kernels/")
    given = parser.parse_args()
    text = table()
    print(text)
    if given.write:
        put(str(README), "<!-- counted: benchmarks/counted.py writes this -->", "<!-- /counted -->", text)


if __name__ == "__main__":
    main()
