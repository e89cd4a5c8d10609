"""The hook's CPU seconds a step, around a stand-in for vLLM's scheduler: with minus without.

    python -m dsim.benchmarks.hooks [-o FILE]

Rows decode a token a step. Both the engine's thread (numbers) and the log's (lines) count. Run it in the engine's
environment: msgspec, if installed, encodes the lines. Medians of alternating turns, so that a busy machine slows both
alike.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import types
from pathlib import Path
from typing import Any

ROWS = (1, 8, 32, 128)
STEPS, TURNS = 200, 11
STEP = 0.01  # s: a small model on a large device


class Scheduler:
    """One token per step; no request ends."""

    def __init__(self) -> None:
        self.requests: dict[str, Any] = {}
        self.waiting: list[str] = []
        self.running: list[str] = []
        spec = types.SimpleNamespace(block_size=16, sliding_window=None)
        groups = [types.SimpleNamespace(layer_names=["first", "second"], kv_cache_spec=spec)]
        self.kv_cache_config = types.SimpleNamespace(kv_cache_groups=groups)
        pool = types.SimpleNamespace(num_gpu_blocks=100, get_num_free_blocks=lambda: 9)
        self.kv_cache_manager = types.SimpleNamespace(block_pool=pool)

    def schedule(self) -> Any:
        for name in self.running:
            self.requests[name].num_computed_tokens += 1
        num = dict.fromkeys(self.running, 1)
        return types.SimpleNamespace(
            num_scheduled_tokens=num, total_num_scheduled_tokens=len(num), scheduled_spec_decode_tokens={}
        )

    def update_from_output(self, output: Any, model_output: Any) -> Any:
        one = [types.SimpleNamespace(request_id=n, new_token_ids=[1], finish_reason=None) for n in self.running]
        return {0: types.SimpleNamespace(outputs=one)}

    def has_requests(self) -> bool:
        return True


class EngineCore:
    """What the hook sees of vLLM's."""

    def __init__(self, config: Any) -> None:
        self.vllm_config = config
        self.scheduler = Scheduler()
        self.model_executor = object()

    def add_request(self, request: Any) -> None:
        self.scheduler.requests[request.request_id] = request
        self.scheduler.running.append(request.request_id)


def config() -> Any:
    space = types.SimpleNamespace
    model = space(model_type="qwen3", num_hidden_layers=2, hidden_size=64, num_attention_heads=4,
                  num_key_value_heads=2, head_dim=16, intermediate_size=128, vocab_size=256,
                  max_position_embeddings=512)  # fmt: skip
    return space(
        model_config=space(hf_config=model, max_model_len=256, served_model_name="t", enforce_eager=True, dtype="b"),
        cache_config=space(block_size=16, num_gpu_blocks=100, enable_prefix_caching=False),
        scheduler_config=space(max_num_seqs=256, max_num_batched_tokens=1024),
        parallel_config=space(tensor_parallel_size=1),
    )  # fmt: skip


def engine(rows: int) -> Any:
    """With `rows` requests."""
    made = EngineCore(config())
    for i in range(rows):
        params = types.SimpleNamespace(max_tokens=9)
        made.add_request(types.SimpleNamespace(request_id=f"cmpl-{i:032x}", num_prompt_tokens=4, num_computed_tokens=4,
                                               arrival_time=0.0, sampling_params=params))  # fmt: skip
    return made


def turn(made: Any) -> tuple[float, float]:
    """CPU s a step, of this thread and of all others, until all lines are written."""
    output = types.SimpleNamespace(cudagraph_stats=None)
    mine, all_of_it = time.thread_time(), time.process_time()
    for _ in range(STEPS):
        made.scheduler.update_from_output(made.scheduler.schedule(), output)
    mine = time.thread_time() - mine
    time.sleep(1.2)  # the writer wakes twice a second
    return mine / STEPS, (time.process_time() - all_of_it - mine) / STEPS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--out", type=Path, help="a JSON file to write")
    args = parser.parse_args()
    for name in ("vllm", "vllm.v1", "vllm.v1.engine", "vllm.v1.engine.core"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["vllm"].__version__ = "stand-in"  # type: ignore[attr-defined]
    sys.modules["vllm.v1.engine.core"].EngineCore = EngineCore  # type: ignore[attr-defined]
    sys.path.insert(0, str(Path(__file__).parents[1] / "hooks"))
    found = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(DSIM_STEPLOG=f"{folder}/steps.jsonl", DSIM_STEPLOG_SKIP="0")
        bare = {rows: engine(rows) for rows in ROWS}
        from dsim_hooks import vllm  # type: ignore[import-not-found]

        vllm.register()
        hooked = {rows: engine(rows) for rows in ROWS}
        for rows in ROWS:
            turns = [(turn(bare[rows])[0], *turn(hooked[rows])) for _ in range(TURNS)]
            without, with_it, writer = (statistics.median(column) for column in zip(*turns, strict=True))
            found.append({"rows": rows, "engine_us": 1e6 * (with_it - without), "writer_us": 1e6 * writer})
            both = 1e6 * (with_it - without + writer)
            print(
                f"{rows:4} rows: {1e6 * (with_it - without):5.1f} us a step of the engine's thread, "
                f"{1e6 * writer:5.1f} us of the log's: {both / STEP / 1e4:.2f} % of a step of {1e3 * STEP:g} ms",
                flush=True,
            )
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
