"""vLLM's hook on what vLLM 0.32's diffusion engine decided, step by step, and what its model runner then computed.

vllm_diffusion.jsonl is what benchmarks/vllm_diffusion/record.py recorded on 2026-11-23: a random DiffusionGemma of six
layers and canvases of 64 tokens, asynchronous scheduling, a budget of 256 tokens and 39 blocks of 128, so that requests
are preempted. A line is a request, a schedule (name, tokens, tokens that count as computed, whether it is a canvas, of
each row; then the keys and the rows of logits of the runner's own batch) or an update (name, tokens handed out, whether
it is over).
"""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dsim.engine.latency import Features
from dsim.profiler.logged import PHASES
from dsim.profiler.steplog import StepLog, policy_of, profile_of_log, read_log

pytest.importorskip("torch")
from .test_hooks import GEMMA, Bag, Layers, hook, modules, vllm_config

__all__ = ["hook"]

HEAD, *EVENTS = map(json.loads, Path(__file__).with_name("vllm_diffusion.jsonl").read_text().splitlines())
PAIRS, KEYS, HEADS, SAMPLED = map(Features._fields.index, ("sum_q_kv", "sum_kv", "head_rows", "sampled_rows"))
DENOISE, FLUSH = PHASES.index("denoise"), PHASES.index("flush")
SCHEDULES = [event for event in EVENTS if "schedule" in event]


class Recorded:
    """vLLM's scheduler, as it was."""

    def __init__(self, groups: Sequence[Sequence[Any]]) -> None:
        groups = [
            Bag(layer_names=["layer"] * layers, kv_cache_spec=Bag(block_size=size, sliding_window=window))
            for layers, window, size in groups
        ]
        self.kv_cache_config = Bag(kv_cache_groups=groups)
        self.kv_cache_manager = Bag(
            block_pool=Bag(num_gpu_blocks=HEAD["blocks"], get_num_free_blocks=lambda: self.free)
        )
        self.requests: dict[str, Any] = {}
        self.waiting, self.running = range(0), range(0)
        self.free, self.left = 0, True
        self.coming: dict[str, Any] = {}

    def schedule(self) -> Any:
        rows = self.coming["schedule"]
        for name, _, computed, _ in rows:
            self.requests[name] = Bag(num_computed_tokens=computed)
        self.waiting, self.running = range(self.coming["waiting"]), range(self.coming["running"])
        self.free = self.coming["free"]
        return Bag(
            num_scheduled_tokens={name: n for name, n, *_ in rows},
            total_num_scheduled_tokens=sum(n for _, n, *_ in rows),
            scheduled_spec_decode_tokens={name: [-1] * n for name, n, _, canvas in rows if canvas},
        )

    def update_from_output(self, output: Any, model_output: Any) -> Any:
        self.left = self.coming["left"]
        outputs = [
            Bag(request_id=name, new_token_ids=[7] * num, finish_reason="length" if over else None)
            for name, num, over in self.coming["update"]
        ]
        return {0: Bag(outputs=outputs)}

    def has_requests(self) -> bool:
        return self.left


@pytest.fixture
def log(hook: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StepLog:
    """The hook's log of the run."""
    return _logged(hook, tmp_path, monkeypatch)


def _logged(
    hook: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: int = 1, groups: Any = HEAD["groups"]
) -> StepLog:
    """The run's log, had the model so many layers that see all tokens before theirs, in such groups of the pool."""
    modules(monkeypatch, vllm={"__version__": "0.32.0"})
    kinds = ["sliding_attention"] * (6 - full) + ["full_attention"] * full
    about = GEMMA | {
        "num_hidden_layers": 6, "hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 512,
        "vocab_size": 2048, "sliding_window": 256, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 128,
        "layer_types": kinds,
    }  # fmt: skip
    each = [
        Bag(**about, num_key_value_heads=1 + (kind != kinds[-1]), head_dim=128 if kind == kinds[-1] else 64)
        for kind in kinds
    ]
    text = Bag(text_config=Layers(**about, per_layer_config=each), canvas_length=64)
    cache = {"block_size": 128, "num_gpu_blocks": HEAD["blocks"], "prefix_cache_retention_interval": 0}
    model = {"hf_config": text, "max_model_len": 640, "is_diffusion": True}
    config = vllm_config(model, cache, max_num_seqs=6, max_num_batched_tokens=256, async_scheduling=True)

    class Engine(Bag):
        __hash__ = object.__hash__

    engine = Engine(scheduler=Recorded(groups), model_executor=None, vllm_config=config)
    recorded, hooks = engine.scheduler, hook("vllm").hook(engine, config)
    in_flight = []
    for event in EVENTS:
        recorded.coming = event
        if "request" in event:
            params = Bag(max_tokens=event["output"])
            request = Bag(
                request_id=event["request"], num_prompt_tokens=event["prompt"], sampling_params=params,
                arrival_time=time.time(),
            )  # fmt: skip
            hooks.request(request, None)
        elif "schedule" in event:
            in_flight.append(recorded.schedule())
        else:
            recorded.update_from_output(in_flight.pop(0), Bag(cudagraph_stats=None))
    hooks.log.close()
    return read_log(tmp_path / "steps.jsonl")


def test_the_log_has_the_keys_logits_and_tokens_of_the_engines_own_batch(log: StepLog) -> None:
    features = log.steps.features
    assert features[:, KEYS].tolist() == [sum(event["keys"]) for event in SCHEDULES]
    assert features[:, HEADS].tolist() == [sum(event["logits"]) for event in SCHEDULES]
    assert log.requests.num_tokens.tolist() == [event["output"] for event in EVENTS if "request" in event]


def test_only_canvases_that_are_denoised_are_sampled_and_see_themselves_whole(log: StepLog) -> None:
    r, found = log.rows, log.steps.features
    for i, event in enumerate(SCHEDULES):
        rows = slice(r.offsets[i], r.offsets[i + 1])
        phases, tokens = r.phase[rows].tolist(), r.tokens[rows].tolist()
        pairs = [n * keys if phase == DENOISE else n * (2 * keys - n + 1) // 2
                 for phase, n, keys in zip(phases, tokens, event["keys"], strict=True)]  # fmt: skip
        sampled = [n for phase, n in zip(phases, tokens, strict=True) if phase == DENOISE]
        assert (found[i, PAIRS], found[i, SAMPLED]) == (sum(pairs), sum(sampled))
        assert [phase in (DENOISE, FLUSH) for phase in phases] == [canvas for *_, canvas in event["schedule"]]


def test_a_block_of_the_pool_is_a_page_of_the_layers_that_see_all(log: StepLog) -> None:
    assert (log.header.page_size, log.header.num_pages) == (128, 39)
    assert log.rows.pages.tolist() == [39 - event["free"] for event in SCHEDULES]
    memory = profile_of_log(log, "tiny", "steps.jsonl").memory
    # Five layers with a window hold five times what the one without does.
    assert (memory.kv_bytes_per_token, memory.window_bytes_per_token) == (512, 5 * 512)
    assert policy_of(log.header)[0] == (
        "vllm-diffusion,max_num_seqs=6,max_num_batched_tokens=256,page_size=128,num_pages=39,canvas_length=64"
    )


def test_layers_that_see_all_and_fill_two_groups_take_two_blocks_a_page(
    hook: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = _logged(hook, tmp_path, monkeypatch, 2, [(1, None, 128)] * 2 + [(1, 256, 128)] * 4)
    assert (log.header.page_size, log.header.num_pages) == (128, round(39 / 2))
    assert log.rows.pages.tolist() == [round((39 - event["free"]) / 2) for event in SCHEDULES]
