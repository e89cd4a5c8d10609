"""Record the KV events of a real vLLM whose prefix cache is emptied in between: a fixture of tests/following.

    python -P benchmarks/follow_kv_events.py MODEL OUT

Runs in vLLM's environment, on a model of random_qwen3.py. OUT gets a line a message: frames in hex, and the blocks that
vLLM's pool names then. -P: files of this folder would hide modules that vLLM imports.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import vllm
import zmq
from vllm import LLM, SamplingParams
from vllm.config.kv_events import KVEventsConfig

ENDPOINT = "ipc:///tmp/dsim-kv-events"
PAGE, PAGES = 32, 10  # tokens of a block; blocks, few enough to evict
JOINS = 0.5  # s until a subscriber receives
ANSWER = SamplingParams(max_tokens=2, ignore_eos=True, temperature=0.0)


def main(model: str, out: str) -> None:
    """Prompts that repeat, prompts that evict, and two resets."""
    events = KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", endpoint=ENDPOINT)
    llm = LLM(
        model=model, enforce_eager=True, enable_prefix_caching=True, max_model_len=256, block_size=PAGE,
        num_gpu_blocks_override=PAGES, kv_events_config=events,
    )  # fmt: skip
    pool = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    socket = zmq.Context.instance().socket(zmq.SUB)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    socket.connect(ENDPOINT)
    time.sleep(JOINS)
    lines: list[dict[str, Any]] = [{"vllm": vllm.__version__, "block_size": PAGE}]

    def serve(first: int, blocks: int) -> None:
        prompt = [first + i for i in range(blocks * PAGE + 3)]
        llm.generate([{"prompt_token_ids": prompt}], ANSWER, use_tqdm=False)
        while socket.poll(500):
            frames = [frame.hex() for frame in socket.recv_multipart()]
            lines.append({"frames": frames, "held": sum(block.block_hash is not None for block in pool.blocks)})

    for first, blocks in ((1, 3), (300, 4), (1, 3), (600, 5)):
        serve(first, blocks)
    assert llm.reset_prefix_cache()
    serve(600, 2)  # the engine reports the cleared cache with its next step
    assert llm.reset_prefix_cache()
    serve(900, 0)
    Path(out).write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main(*sys.argv[1:])
