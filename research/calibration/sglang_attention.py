"""Time SGLang's attention kernel on DiffusionGemma's shapes, and its canvases' head and sampler, on this GPU.

    SGLANG_SOURCE=FOLDER python research/calibration/sglang_attention.py > times.json

FOLDER: SGLang's unpacked wheel, as benchmarks/oracles/run_oracles.py leaves it; only extend_attention.py is imported.
One GPU of two has 8 of a layer's 16 query heads: with 4 key heads of 256 in the 25 windowed layers, 1 of 512 in
the 5 others. Times are medians with a cold L2 cache; `terms` are h200x2-diffusiongemma/sglang's (engine_profiles.py).
"""

import importlib.util
import json
import os
import statistics
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton

CANVAS, WINDOW, HIDDEN, VOCAB, HEADS = 256, 1023, 2816, 262144, 8
LAYERS = {"window": (25, 4, 256), "all": (5, 1, 512)}  # number, KV heads, width of a head
AT_ONCE = {"window": 4, "all": 2}  # canvases whose blocks of 64 or 32 queries fit a Hopper's 132 multiprocessors
DEVICE = "cuda"


def kernel() -> Callable[..., None]:
    """`extend_attention_fwd`, with stubs for the rest."""
    source = Path(os.environ["SGLANG_SOURCE"], "sglang", "kernels", "ops", "attention")

    def module(name: str, **names: Any) -> None:
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(names)

    def no(*_: Any) -> bool:
        return False

    flag = types.SimpleNamespace(get=no)
    for name in ("sglang", "sglang.kernels", "sglang.kernels.ops", "sglang.kernels.ops.attention", "sglang.srt"):
        module(name, __path__=[])
    module("sglang.srt.environ", envs=types.SimpleNamespace(SGLANG_TRITON_FP8_PREFILL_ATTN=flag))
    module("sglang.srt.utils", is_cuda=lambda: True, is_hip=no, is_gfx95_supported=no, is_gfx1250_supported=no)

    def strides(buffer: torch.Tensor, page: int) -> tuple[int, int, int, int]:
        slot, head = buffer.stride(0), buffer.stride(1)
        return slot, head, slot * page, slot

    module("sglang.kernels.ops.attention.decode_attention", _extract_kv_strides=strides)
    module("sglang.kernels.ops.attention.score_mod", unpack_aux_tensors=lambda *_: (None, 0, 0, 0))
    spec = importlib.util.spec_from_file_location("extend_attention", source / "extend_attention.py")
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found.extend_attention_fwd


def milliseconds(call: Callable[[], Any]) -> float:
    """Median."""
    return float(triton.testing.do_bench(call, warmup=50, rep=200, return_mode="median"))


def attention(run: Callable[..., None], layer: str, rows: int, queries: int, prefix: int, causal: bool) -> float:
    """ms of a layer: rows of `queries` tokens after `prefix` keys."""
    _, kv_heads, width = LAYERS[layer]
    seen = min(prefix, WINDOW) if layer == "window" else prefix

    def random(tokens: int, heads: int) -> torch.Tensor:
        return torch.randn(tokens, heads, width, device=DEVICE, dtype=torch.bfloat16)

    def ends(each: int) -> torch.Tensor:
        return each * torch.arange(rows + 1, device=DEVICE, dtype=torch.int32)

    q, k, v = random(rows * queries, HEADS), random(rows * queries, kv_heads), random(rows * queries, kv_heads)
    pool = max(1, rows * seen)
    keys, values, out = random(pool, kv_heads), random(pool, kv_heads), torch.empty_like(q)
    slots = torch.arange(pool, device=DEVICE, dtype=torch.int64)
    own, before = ends(queries), ends(seen)
    window = WINDOW if causal and layer == "window" else -1

    def call() -> None:
        run(
            q, k, v, out, keys, values, own, before, slots, None, causal, None, queries, 1.0, 1.0,
            sm_scale=1.0, sliding_window_size=window,
        )  # fmt: skip

    call()
    if rows == 1 and not causal:  # the kernel computes attention
        all_keys, all_values = (
            torch.cat(pair).float().repeat_interleave(HEADS // kv_heads, 1).transpose(0, 1)
            for pair in ((keys[:seen], k), (values[:seen], v))
        )
        weights = torch.softmax(q.float().transpose(0, 1) @ all_keys.transpose(1, 2), -1)
        wrong = ((weights @ all_values).transpose(0, 1) - out.float()).abs().max().item()
        assert wrong < 0.1, f"{layer}: attention is {wrong} off"
    return milliseconds(call)


def canvas_statistics(logits: torch.Tensor, temperatures: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The sampler's, for all canvases at once."""
    log_probabilities = torch.log_softmax(logits / temperatures[:, None, None], dim=-1, dtype=torch.float32)
    probabilities = log_probabilities.exp()
    return probabilities, -(log_probabilities * probabilities).sum(dim=-1), logits.argmax(dim=-1)


def winner(probabilities: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """The sampler's token by position."""
    return (probabilities / noise).argmax(dim=-1)


def sampler(rows: int) -> dict[str, float]:
    """ms of head and sampler of `rows` canvases, half of the vocabulary on this GPU."""
    tokens = rows * CANVAS
    hidden = torch.randn(tokens, HIDDEN, device=DEVICE, dtype=torch.bfloat16)
    head = torch.randn(VOCAB // 2, HIDDEN, device=DEVICE, dtype=torch.bfloat16) / HIDDEN**0.5
    logits = torch.randn(rows, CANVAS, VOCAB, device=DEVICE)
    temperatures = torch.full((rows,), 0.6, device=DEVICE)
    compiled, race = torch.compile(canvas_statistics, dynamic=True), torch.compile(winner, dynamic=True)
    probabilities = compiled(logits, temperatures)[0]
    return {
        "head": milliseconds(lambda: (hidden @ head.T).float()),
        "statistics": milliseconds(lambda: compiled(logits, temperatures)),
        "race": milliseconds(lambda: [race(p, torch.empty_like(p).exponential_()) for p in probabilities]),
        "soft embeddings": milliseconds(
            lambda: probabilities[..., : VOCAB // 2].reshape(tokens, -1).to(torch.bfloat16) @ head
        ),
    }  # fmt: skip


def terms(canvases: list[dict[str, Any]], prompts: list[dict[str, Any]], sampled: dict[str, Any]) -> dict[str, float]:
    """A latency model's: s a key of a row, a pair of a prompt, a position of a canvas."""
    found = {}
    for layer, (number, _, _) in LAYERS.items():
        times = {(one["rows"], one["prefix"]): one["ms"] for one in canvases if one["layer"] == layer}
        far = 1024 if layer == "window" else 4096
        keys = min(far, WINDOW) - 128 if layer == "window" else far - 128
        waves = {rows: -(-rows // AT_ONCE[layer]) for rows, _ in times}
        slopes = [(times[rows, far] - times[rows, 128]) / keys / waves[rows] for rows in waves]
        pairs = [
            one["ms"] / one["rows"] / window_pairs(one["tokens"], 1024 if layer == "window" else one["tokens"])
            for one in prompts
            if one["layer"] == layer and one["tokens"] >= 2048 and one["rows"] >= 3
        ]
        found[f"walk, {layer}"] = number * statistics.median(slopes) / 1e3
        found[f"attention, {layer}"] = number * statistics.median(pairs) / 1e3
    positions = sampled["rows"] * CANVAS * 1e3
    found["head"] = sampled["head"] / positions
    found["sample"] = (sampled["statistics"] + sampled["race"] + sampled["soft embeddings"]) / positions
    return found


def window_pairs(tokens: int, window: int) -> int:
    """Of a prompt whose queries see the last `window` tokens."""
    short = min(tokens, window)
    return short * (short + 1) // 2 + (tokens - short) * window


def main() -> None:
    run = kernel()
    canvases = [
        {"layer": layer, "rows": rows, "prefix": prefix, "ms": attention(run, layer, rows, CANVAS, prefix, False)}
        for layer in LAYERS
        for prefix in (0, 128, 512, 1024, 2048, 4096)
        for rows in (1, 2, 3, 4, 5, 6, 8, 12, 16)
    ]
    prompts = [
        {"layer": layer, "rows": rows, "tokens": tokens, "ms": attention(run, layer, rows, tokens, 0, True)}
        for layer in LAYERS
        for tokens in (128, 512, 2048, 4096)
        for rows in (1, 3, 4, 7, 8)
    ]
    sampled = [{"rows": rows, **sampler(rows)} for rows in (1, 2, 4, 8)]
    name, version = torch.cuda.get_device_name(), f"torch {torch.__version__}, triton {triton.__version__}"
    measured = {"canvas": canvases, "prompt": prompts, "sampler": sampled}
    print(json.dumps({"device": name, "versions": version, "terms": terms(canvases, prompts, sampled[-1]), **measured}))


if __name__ == "__main__":
    main()
