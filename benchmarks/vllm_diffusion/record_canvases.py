"""vLLM's diffusion engine on a CPU, with the hook: what it decided, and what its model runner then computed.

    VENV/bin/python benchmarks/vllm_diffusion/record_canvases.py OUT [--sync] [--blocks N] [--requests 300/128,64/40]

VENV: as `benchmarks/vllm_cpu.sh` makes it. OUT: a new folder. A random DiffusionGemma of six layers serves a few
requests (prompt/output tokens) in one process; each ends its canvases after two to four steps. Writes steps.jsonl
(the hook's log) and events.jsonl (tests/hooks/vllm_diffusion.jsonl is one), and prints in how many steps the log has
the keys and the rows of logits of the runner's own batch.

With asynchronous scheduling each forward has a thread of its own, as a device would.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "TRITON_INTERPRET": "1", "TORCH_COMPILE_DISABLE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "DSIM_STEPLOG_SKIP": "0",
}  # fmt: skip


def open_engine(folder: Path, blocks: int, sync: bool) -> Any:
    """vLLM's engine in this process; forwards run in another thread."""
    from vllm import EngineArgs, LLMEngine

    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=str(folder),
            served_model_name="tiny",
            enforce_eager=True,
            dtype="bfloat16",
            max_num_seqs=6,
            max_num_batched_tokens=256,
            enable_prefix_caching=False,
            max_model_len=640,
            limit_mm_per_prompt={"image": 0, "video": 0},
            num_gpu_blocks_override=blocks,
            async_scheduling=not sync,
        )
    )
    if not sync:
        pool, executor = ThreadPoolExecutor(1), engine.engine_core.engine_core.model_executor
        for name in ("execute_model", "sample_tokens"):
            own = getattr(executor, name)

            def call(*args: Any, own: Any = own, non_block: bool = False) -> Any:
                future: Future[Any] = pool.submit(own, *args)
                return future if non_block else future.result()

            setattr(executor, name, call)
    return engine


class Recorder:
    """Records requests, decisions and outcomes of the scheduler, and the runner's batches."""

    def __init__(self, engine: Any) -> None:
        core = engine.engine_core.engine_core
        self.events: list[dict[str, Any]] = []
        self._scheduler, self._pool = core.scheduler, core.scheduler.kv_cache_manager.block_pool
        self._runner = core.model_executor.driver_worker.worker.model_runner
        self._batches: list[dict[str, tuple[int, int]]] = []
        self._prepare, self._schedule = self._runner.prepare_inputs, core.scheduler.schedule
        self._update = core.scheduler.update_from_output
        self._runner.prepare_inputs = self.prepare
        core.scheduler.schedule, core.scheduler.update_from_output = self.schedule, self.update
        groups = core.scheduler.kv_cache_config.kv_cache_groups
        self.events.append({
            "groups": [[len(g.layer_names), getattr(g.kv_cache_spec, "sliding_window", None),
                        g.kv_cache_spec.block_size] for g in groups],
            "blocks": self._pool.num_gpu_blocks,
            "async": engine.vllm_config.scheduler_config.async_scheduling,
        })  # fmt: skip

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """Each request's keys and rows of logits in the runner's batch."""
        batch = self._prepare(*args, **kwargs)
        logits = batch.cu_num_logits_np[: batch.num_reqs + 1]
        rows = zip(batch.seq_lens[: batch.num_reqs].tolist(), (logits[1:] - logits[:-1]).tolist(), strict=True)
        names = map(short, batch.req_ids[: batch.num_reqs])
        self._batches.append(dict(zip(names, rows, strict=True)))
        return batch

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        output, s = self._schedule(*args, **kwargs), self._scheduler
        if output.total_num_scheduled_tokens:
            rows = [[short(name), n, s.requests[name].num_computed_tokens, name in output.scheduled_spec_decode_tokens]
                    for name, n in output.num_scheduled_tokens.items()]  # fmt: skip
            self.events.append({"schedule": rows, "waiting": len(s.waiting), "running": len(s.running),
                                "free": self._pool.get_num_free_blocks()})  # fmt: skip
        return output

    def update(self, output: Any, *args: Any, **kwargs: Any) -> Any:
        found = self._update(output, *args, **kwargs)
        if output.total_num_scheduled_tokens:
            ended = [[short(one.request_id), len(one.new_token_ids), one.finish_reason is not None]
                     for outputs in found.values() for one in outputs.outputs]  # fmt: skip
            self.events.append({"update": ended, "left": bool(self._scheduler.has_requests())})
        return found

    def finished(self) -> list[dict[str, Any]]:
        """All events; each schedule has its batch's keys and logits."""
        planned = [event for event in self.events if "schedule" in event]
        # Earlier ones are vLLM's warm-up.
        for event, batch in zip(planned, self._batches[-len(planned) :], strict=True):
            event["keys"], event["logits"] = map(list, zip(*(batch[row[0]] for row in event["schedule"]), strict=True))
        return self.events


def short(name: str) -> str:
    """A request's name in the driver, without vLLM's suffix."""
    return name.split("-")[0]


def serve(engine: Any, recorder: Recorder, lengths: list[tuple[int, int]]) -> None:
    """A request every three steps."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    core, draw, num_steps, coming = engine.engine_core.engine_core, random.Random(0), 0, list(enumerate(lengths))
    while coming or engine.has_unfinished_requests() or core.scheduler.has_requests() or core.batch_queue:
        if coming and num_steps % 3 == 0:
            i, (prompt, output) = coming.pop(0)
            recorder.events.append({"request": f"r{i}", "prompt": prompt, "output": output})
            params = SamplingParams(
                max_tokens=output, ignore_eos=True, output_kind=RequestOutputKind.DELTA,
                extra_args={"diffusion_max_steps": 2 + i % 3},
            )  # fmt: skip
            engine.add_request(f"r{i}", {"prompt_token_ids": [draw.randrange(3, 259) for _ in range(prompt)]}, params)
        engine.step()
        num_steps += 1


def compare(log: Path, events: list[dict[str, Any]]) -> tuple[int, int]:
    """Steps in the log, and steps with the keys and rows of logits of the runner's batch."""
    steps = [line for line in map(json.loads, log.read_text().splitlines()) if line.get("kind") == "step"]
    planned = [event for event in events if "schedule" in event]
    same = [
        (step["row_keys"], step["head_rows"]) == (event["keys"], sum(event["logits"]))
        for step, event in zip(steps, planned, strict=True)
    ]
    return len(same), sum(same)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--sync", action="store_true", help="synchronous scheduling")
    parser.add_argument("--blocks", type=int, default=40, help="of the KV pool, the one that is never used included")
    parser.add_argument("--requests", default="300/128,250/100,200/128,280/64,120/200,64/40")
    parser.add_argument("--interpreted", action="store_true", help="let Triton's interpreter run all kernels")
    args = parser.parse_args()
    site, here = str(args.out / "site"), Path(__file__).parent
    if os.environ.get("PYTHONPATH") != site:  # Python looks for plug-ins and Triton's backends as it starts
        subprocess.run([here / "install.sh", sys.prefix, site], check=True)
        own = {"PYTHONPATH": site, "DSIM_STEPLOG": str(args.out / "steps.jsonl")}
        if args.interpreted:
            own["VLLM_PLUGINS"] = "dsim_steplog,vllm_diffusion_shim"
        # -P: transformers looks for a package `kernels`, and a folder near this script has that name.
        os.execve(sys.executable, [sys.executable, "-P", *sys.argv], os.environ | ENVIRONMENT | own)
    subprocess.run([sys.executable, "-P", here / "tiny_gemma.py", args.out / "model"], check=True)
    engine = open_engine(args.out / "model", args.blocks, args.sync)
    recorder = Recorder(engine)
    serve(engine, recorder, [tuple(map(int, text.split("/"))) for text in args.requests.split(",")])  # type: ignore[misc]
    time.sleep(1.5)  # the log's thread writes twice a second
    events = recorder.finished()
    (args.out / "events.jsonl").write_text("".join(json.dumps(e, separators=(",", ":")) + "\n" for e in events))
    num, same = compare(args.out / "steps.jsonl", events)
    print(f"{num} steps, {same} with the keys and the rows of logits of the runner's own batch")


if __name__ == "__main__":
    main()
