"""vLLM's diffusion engine on a CPU, with the hook: what it decided, and what its model runner then computed.

    VENV/bin/python benchmarks/vllm_diffusion.py OUT [--sync] [--blocks N] [--requests 300/128,64/40]

VENV: as `benchmarks/vllm_cpu.sh` makes it, but with torchvision left in. OUT: a new folder. A random
DiffusionGemma of six layers serves a few requests (prompt/output tokens) in one process; each ends its canvases after
two to four steps. Writes steps.jsonl (the hook's log) and events.jsonl (tests/hooks/vllm_diffusion.jsonl is one), and
prints in how many steps the log has the keys and the rows of logits of the runner's own batch.

Model runner V2, which diffusion needs, asks for a Triton backend named cpu. A package made here is one that compiles
nothing, and Triton's interpreter runs the kernels. vLLM's CPU platform turns asynchronous scheduling off; here it is
turned on again, and each forward has a thread of its own, as a device would.
"""

import argparse
import json
import os
import random
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

BACKEND = {
    "triton_cpu_interpreted/__init__.py": "",
    "triton_cpu_interpreted/compiler.py": """
from triton.backends.compiler import BaseBackend
class InterpretedBackend(BaseBackend):
    supports_target = staticmethod(lambda target: target.backend == "cpu")
    hash = lambda self: "interpreted"
    parse_options = add_stages = load_dialects = lambda self, *args: None
    get_module_map = lambda self: {}
""",
    "triton_cpu_interpreted/driver.py": """
from triton.backends.driver import DriverBase
class InterpretedDriver(DriverBase):
    is_active = classmethod(lambda cls: True)
    get_benchmarker = map_python_to_cpp_type = lambda self, *args: None
    get_current_device = get_current_stream = lambda self, *args: 0
    get_device_capability = lambda self, *args: (0, 0)
    def get_current_target(self):
        from triton.backends.compiler import GPUTarget
        return GPUTarget("cpu", 0, 1)
    def get_active_torch_device(self):
        import torch
        return torch.device("cpu")
""",
    "triton_cpu_interpreted-0.dist-info/METADATA": "Metadata-Version: 2.1\nName: triton-cpu-interpreted\nVersion: 0\n",
    "triton_cpu_interpreted-0.dist-info/entry_points.txt": "[triton.backends]\ncpu = triton_cpu_interpreted\n",
}
# What Gemma's processor imports; no picture is ever seen.
OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "roi_align(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width, "
    "int sampling_ratio, bool aligned) -> Tensor",
)
ENVIRONMENT = {
    "TRITON_INTERPRET": "1", "TORCH_COMPILE_DISABLE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "DSIM_STEPLOG_SKIP": "0",
}  # fmt: skip
CANVAS, VOCAB = 64, 2048


def make_model(folder: Path) -> None:
    """A random DiffusionGemma and a tokenizer of bytes."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import (
        DiffusionGemmaConfig,
        DiffusionGemmaForBlockDiffusion,
        DiffusionGemmaTextConfig,
        Gemma4VisionConfig,
    )

    torch.manual_seed(0)
    text = DiffusionGemmaTextConfig(
        vocab_size=VOCAB, hidden_size=256, intermediate_size=512, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, global_head_dim=128, num_global_key_value_heads=1, sliding_window=256,
        max_position_embeddings=4096, num_experts=4, top_k_experts=2, moe_intermediate_size=128, pad_token_id=0,
        eos_token_id=1, bos_token_id=2,
    )  # fmt: skip
    vision = Gemma4VisionConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        head_dim=32,
    )  # fmt: skip
    config = DiffusionGemmaConfig(
        text_config=text, vision_config=vision, canvas_length=CANVAS, boi_token_id=2001, eoi_token_id=2002,
        image_token_id=2003,
    )  # fmt: skip
    config.architectures = ["DiffusionGemmaForBlockDiffusion"]
    DiffusionGemmaForBlockDiffusion(config).to(torch.bfloat16).save_pretrained(folder)
    rule = {"max_denoising_steps": 12, "t_min": 0.4, "t_max": 0.8, "stability_threshold": 1,
            "confidence_threshold": 0.005, "eos_token_id": 1, "pad_token_id": 0, "bos_token_id": 2,
            "sampler_config": {"_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": 0.1}}  # fmt: skip
    (folder / "generation_config.json").write_text(json.dumps(rule))
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = {"<pad>": 0, "<eos>": 1, "<bos>": 2}
    made = Tokenizer(models.BPE({**special, **{letter: i + 3 for i, letter in enumerate(letters)}}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 4096, "pad_token": "<pad>",
             "eos_token": "<eos>", "bos_token": "<bos>"}  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(about))


def open_engine(folder: Path, blocks: int, sync: bool) -> Any:
    """vLLM's engine in this process, whose forwards run in a thread of their own."""
    from vllm import EngineArgs, LLMEngine
    from vllm.platforms.cpu import CpuPlatform

    usual = CpuPlatform.check_and_update_config.__func__

    def check(cls: Any, config: Any) -> None:
        usual(cls, config)
        config.scheduler_config.async_scheduling = not sync

    CpuPlatform.check_and_update_config = classmethod(check)
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
    """Takes down requests, decisions and outcomes of the scheduler, and the runner's batches."""

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
        """The runner's batch: keys and rows of logits of each request."""
        batch = self._prepare(*args, **kwargs)
        logits = batch.cu_num_logits_np[: batch.num_reqs + 1]
        rows = zip(batch.seq_lens[: batch.num_reqs].tolist(), (logits[1:] - logits[:-1]).tolist(), strict=True)
        names = map(short, batch.req_ids[: batch.num_reqs])
        self._batches.append(dict(zip(names, rows, strict=True)))
        return batch

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """A step is decided on."""
        output, s = self._schedule(*args, **kwargs), self._scheduler
        if output.total_num_scheduled_tokens:
            rows = [[short(name), n, s.requests[name].num_computed_tokens, name in output.scheduled_spec_decode_tokens]
                    for name, n in output.num_scheduled_tokens.items()]  # fmt: skip
            self.events.append({"schedule": rows, "waiting": len(s.waiting), "running": len(s.running),
                                "free": self._pool.get_num_free_blocks()})  # fmt: skip
        return output

    def update(self, output: Any, *args: Any, **kwargs: Any) -> Any:
        """A step is over."""
        found = self._update(output, *args, **kwargs)
        if output.total_num_scheduled_tokens:
            ended = [[short(one.request_id), len(one.new_token_ids), one.finish_reason is not None]
                     for outputs in found.values() for one in outputs.outputs]  # fmt: skip
            self.events.append({"update": ended, "left": bool(self._scheduler.has_requests())})
        return found

    def finished(self) -> list[dict[str, Any]]:
        """All events, each schedule with the keys and the logits of its batch."""
        planned = [event for event in self.events if "schedule" in event]
        # Those before are vLLM's own, which warm it up.
        for event, batch in zip(planned, self._batches[-len(planned) :], strict=True):
            event["keys"], event["logits"] = map(list, zip(*(batch[row[0]] for row in event["schedule"]), strict=True))
        return self.events


def short(name: str) -> str:
    """A request's name as the driver gave it, without vLLM's own suffix."""
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
    """Steps in the log, and those with the keys and the rows of logits of the runner's batch."""
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
    args = parser.parse_args()
    shim = args.out / "shim"
    if os.environ.get("PYTHONPATH", "").split(os.pathsep)[0] != str(
        shim
    ):  # Triton looks for backends as it is imported
        for name, text in BACKEND.items():
            (shim / name).parent.mkdir(parents=True, exist_ok=True)
            (shim / name).write_text(text)
        path = {"PYTHONPATH": os.pathsep.join((str(shim), str(Path(__file__).parents[1] / "hooks")))}
        # -P: `kernels` is a package that transformers looks for, and a script in this folder.
        os.execve(sys.executable, [sys.executable, "-P", *sys.argv], os.environ | ENVIRONMENT | path)
    import torch

    library = torch.library.Library("torchvision", "DEF")
    for operator in OPERATORS:
        library.define(operator)
    make_model(args.out / "model")
    os.environ["DSIM_STEPLOG"] = str(args.out / "steps.jsonl")
    from dsim_hooks.vllm import register  # type: ignore[import-not-found]

    register()
    engine = open_engine(args.out / "model", args.blocks, args.sync)
    recorder = Recorder(engine)
    serve(engine, recorder, [tuple(map(int, text.split("/"))) for text in args.requests.split(",")])  # type: ignore[misc]
    time.sleep(1.5)  # the log's own thread writes twice a second
    events = recorder.finished()
    (args.out / "events.jsonl").write_text("".join(json.dumps(e, separators=(",", ":")) + "\n" for e in events))
    num, same = compare(args.out / "steps.jsonl", events)
    print(f"{num} steps, {same} with the keys and the rows of logits of the runner's own batch")


if __name__ == "__main__":
    main()
