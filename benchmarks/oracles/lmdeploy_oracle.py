"""Have LMDeploy's own scheduler run scenarios: the oracle of `lmdeploy-0.18` (see run_oracles.py).

Real: Scheduler, prefill scheduler, block manager, prefix trie, sequences, InputsMakerAsync, stopping criteria, in
EngineLoop's order. Stubs: the device, which unmasks as the scenario says, sampler and clock. The block manager's clock
counts its calls: LMDeploy reads whole seconds and breaks ties by memory addresses. Settings: block, page, num_pages,
max_batch, max_prefill, prefill_interval, short_turns, order, aging (s).
"""

import asyncio
import importlib.abc
import importlib.machinery
import json
import logging
import os
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch

MASK = -9
OUTPUT = 10**9  # where answers' token ids begin: requests share none
MOST_STEPS = 20_000
ABSENT = (
    "ray", "mmengine", "fire", "pybase64", "openai", "tiktoken", "sentencepiece", "fastapi", "uvicorn", "pynvml",
    "aiohttp", "zmq", "xgrammar", "partial_json_parser", "shortuuid", "peft", "accelerate", "einops", "xxhash",
    "torchvision", "_turbomind", "prometheus_client", "transformers_stream_generator", "pandas", "PIL", "starlette",
    "openai_harmony", "timm", "decord", "cv2", "av", "llguidance", "msgspec", "soundfile", "librosa", "psutil",
    "dlblas", "triton", "lmcache", "pydantic_settings",
)  # fmt: skip


class Registry:
    """Registers no module."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def register_module(self, *_: Any, **__: Any) -> Any:
        return lambda kind: kind

    def get(self, *_: Any) -> None:
        return None


class Absent(types.ModuleType):
    """Imported, not used."""

    Registry = Registry

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        methods = {"__init__": lambda self, *_, **__: None, "__class_getitem__": classmethod(lambda kind, _: kind)}
        return type(name, (), methods)


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """For ABSENT's packages."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        absent = name.split(".")[0] in ABSENT
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if absent else None

    def create_module(self, spec: Any) -> Any:
        module = Absent(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: Any) -> None:
        pass


sys.meta_path.append(Finder())
for package in ("lmdeploy", "lmdeploy.pytorch"):  # their __init__ imports the whole engine
    made = types.ModuleType(package)
    made.__path__ = [str(Path(os.environ["LMDEPLOY_SOURCE"], *package.split(".")))]
    sys.modules[package] = made
torch.cuda.is_available = lambda: False
torch.set_num_threads(1)
logging.disable(logging.WARNING)  # too large batches are made on purpose

from lmdeploy.pytorch import consts, envs  # noqa: E402
from lmdeploy.pytorch.config import CacheConfig, DLLMConfig, SchedulerConfig, UnmaskingStrategy  # noqa: E402
from lmdeploy.pytorch.disagg.config import EngineRole  # noqa: E402
from lmdeploy.pytorch.engine.inputs_maker import InputsMakerAsync, InputsMakerConfig  # noqa: E402
from lmdeploy.pytorch.messages import MessageStatus, SamplingParam, SequenceMeta  # noqa: E402
from lmdeploy.pytorch.paging import prefill_scheduler  # noqa: E402
from lmdeploy.pytorch.paging.block_manager import base_block_manager  # noqa: E402
from lmdeploy.pytorch.paging.scheduler import Scheduler  # noqa: E402
from lmdeploy.pytorch.strategies.dllm import sequence as sequences  # noqa: E402
from lmdeploy.pytorch.strategies.dllm.engine import DLLMEngineStrategy  # noqa: E402
from lmdeploy.pytorch.strategies.dllm.model_agent import (  # noqa: E402
    DLLMExtraInputs,
    DLLMExtraOutputs,
    DLLMModelAgentStrategy,
    DLLMStoppingCriteria,
)
from lmdeploy.pytorch.strategies.dllm.sequence import DLLMSequenceStrategy  # noqa: E402

MASKED, UNMASKED, CACHED = consts.DLLM_MASKED, consts.DLLM_UNMASKED, consts.DLLM_CACHED


class Clock:
    """A step takes 1 s, a reading a nanosecond: no two are equal."""

    def __init__(self) -> None:
        self.now = 0.0
        self.readings = 0

    def perf_counter(self) -> float:
        self.readings += 1
        return self.now + 1e-9 * self.readings

    def count(self) -> int:
        self.readings += 1
        return self.readings


class Executor:
    device_type = "cpu"

    async def forward_async(self, _: Any) -> None:
        pass


class Device:
    """Masks of each request's block, and how a forward changes them."""

    def __init__(self, asked: list[dict[str, Any]], block: int) -> None:
        self.asked = asked
        self.block = block
        self.rows: dict[int, dict[str, Any]] = {}
        self.starts: list[list[int]] = [[] for _ in asked]

    def prefill(self, request: int, mask: Any, start: int, left: int, output_start: int) -> None:
        """Its last block is on the device."""
        self.rows[request] = {"mask": mask.copy(), "start": start, "left": left, "output_start": output_start}

    def forward(self, requests: list[int]) -> tuple[Any, Any, Any, Any]:
        """Tokens and masks, and which requests stop where."""
        block, rows = self.block, [self.rows[request] for request in requests]
        tokens = []
        for request, row in zip(requests, rows, strict=True):
            mask = row["mask"]
            free = np.flatnonzero(mask == MASKED)
            if len(free):
                mask[free[: self.unmasked(request, row["start"])]] = UNMASKED
            else:
                mask[mask == UNMASKED] = CACHED
            prompt = self.asked[request]["prompt"]
            at = np.arange(row["start"], row["start"] + block)
            known = np.array([prompt[p] if p < len(prompt) else self.token(request, p) for p in at.tolist()])
            tokens.append(np.where(mask == MASKED, MASK, known))
        masks = torch.tensor(np.concatenate([row["mask"] for row in rows]))
        criteria = DLLMStoppingCriteria(
            torch.tensor([row["left"] for row in rows]), torch.tensor([row["output_start"] for row in rows])
        )  # fmt: skip
        inputs = types.SimpleNamespace(
            history_lengths=torch.tensor([row["start"] for row in rows]), seq_length=torch.tensor([block] * len(rows))
        )  # fmt: skip
        ids = torch.tensor(np.concatenate(tokens))
        ends = torch.tensor(np.repeat([self.end(request) for request in requests], block))[:, None]
        stopped, places, criteria = criteria.step(ids, ends, inputs, DLLMExtraInputs(masks))
        for row, left in zip(rows, criteria.num_appendable_ids.tolist(), strict=True):
            row["left"] = left
            if (row["mask"] == CACHED).all():
                row["mask"] = np.full_like(row["mask"], MASKED)
                row["start"] += block
        return ids, masks, stopped, places

    def unmasked(self, request: int, start: int) -> int:
        """Of a step of the block at `start`."""
        starts = self.starts[request]
        if start not in starts:
            starts.append(start)
        return int(self.asked[request]["unmasked"][starts.index(start)])

    def token(self, request: int, position: int) -> int:
        """At a position."""
        asked = self.asked[request]
        return OUTPUT + 10**5 * request + min(position - len(asked["prompt"]), asked["output"] - 1)

    def end(self, request: int) -> int:
        asked = self.asked[request]
        return self.token(request, len(asked["prompt"]) + asked["output"] - 1)


LOOP = asyncio.new_event_loop()


@torch.inference_mode()
def record(scenario: dict[str, Any]) -> dict[str, Any]:
    settings, asked = scenario["settings"], scenario["requests"]
    block, page, pages, most = (settings[name] for name in ("block", "page", "num_pages", "max_batch"))
    clock = Clock()
    sequences.time = prefill_scheduler.time = clock
    base_block_manager.time = types.SimpleNamespace(perf_counter=clock.count)
    envs.opt_ttft_policy, envs.opt_ttft_aging_sec = settings["order"], settings["aging"]
    envs.opt_ttft_short_turns = settings["short_turns"]
    cache = CacheConfig(
        max_batches=most, block_size=page, num_cpu_blocks=0, num_gpu_blocks=pages,
        max_prefill_token_num=settings["max_prefill"], enable_prefix_caching=scenario["caching"],
    )  # fmt: skip
    config = SchedulerConfig(max_batches=most, max_session_len=1 << 20, prefill_interval=settings["prefill_interval"])
    strategy = DLLMSequenceStrategy(block, MASK)
    scheduler = Scheduler(config, cache, SequenceMeta(page, strategy=strategy))
    agent = DLLMModelAgentStrategy(
        DLLMConfig(block_length=block, unmasking_strategy=UnmaskingStrategy.LOW_CONFIDENCE_DYNAMIC), MASK
    )
    maker = InputsMakerAsync(
        Executor(), scheduler, scheduler.state_checkpoints, types.SimpleNamespace(num_adapters=lambda: 1),
        DLLMEngineStrategy(config, cache, block),
        types.SimpleNamespace(make_sampling_inputs=lambda _: None, on_session_end=lambda _: None), agent,
        InputsMakerConfig(
            most, settings["max_prefill"], EngineRole.Hybrid, page, page, -1, scenario["caching"], 0,
            prefill_interval=settings["prefill_interval"],
        ),
    )  # fmt: skip
    maker._create_vision_model_inputs = lambda *_: None
    preempted: list[int] = []
    preempt = scheduler.preempt_seqs

    def preempt_and_note(seqs: Any) -> None:
        seqs = list(seqs)
        preempted.extend(seq.session_id for seq in seqs if seq.status == MessageStatus.RUNNING)
        preempt(seqs)

    scheduler.preempt_seqs = preempt_and_note
    device, submitted, steps, tokens = Device(asked, block), 0, [], []
    had = [0] * len(asked)
    inputs, running = None, None
    while len(steps) < MOST_STEPS:
        while submitted < len(asked) and asked[submitted]["arrival"] <= clock.now:
            parameters = SamplingParam(max_new_tokens=asked[submitted]["max_tokens"])
            prompt = np.array(asked[submitted]["prompt"], np.int64)
            now, clock.now = clock.now, asked[submitted]["arrival"]
            scheduler.add_session(submitted).add_sequence(prompt, sampling_param=parameters)
            clock.now = now
            submitted += 1
        maker.preempt_invalid_decode_seqs()
        if running is None:
            if not scheduler.has_unfinished() and not maker.has_pending_long_context_chunk():
                if submitted == len(asked):
                    return {"steps": steps, "tokens": tokens}
                clock.now = max(clock.now, asked[submitted]["arrival"])
                continue
            inputs, running = LOOP.run_until_complete(maker.send_next_inputs())
            if running is None:
                return {"error": f"nothing can run at {clock.now:g}", "steps": steps, "tokens": tokens}
        scheduler.activate_seqs(running)
        model, delta, now_running = inputs["inputs"], inputs["delta"], running
        maker.update_running_seqs(now_running, model)
        chunk = model is not None and model.is_chunk and not model.is_last_chunk
        requests = [seq.session_id for seq in now_running]
        if model is None:
            rows = [[request, block, device.rows[request]["start"]] for request in requests]
        else:
            lengths, firsts = model.seq_length.tolist(), model.history_lengths.tolist()
            rows = [list(row) for row in zip(requests, lengths, firsts, strict=True)]
            masks = np.split(np.asarray(inputs["extra_inputs"].dllm_mask), np.cumsum(lengths)[:-1])
            criteria = inputs["stopping_criteria"]
            for i, (request, length, first) in enumerate(rows):
                if not chunk:
                    left, start = int(criteria.num_appendable_ids[i]), int(criteria.output_start_pos[i])
                    device.prefill(request, masks[i][-block:], first + length - block, left, start)
        inputs, running = LOOP.run_until_complete(maker.prefetch_next_inputs())
        own = [seq.logical_blocks.get_real_blocks() for seq in scheduler.seq_manager.get_all_sequences()]
        held = len(np.unique(np.concatenate(own))) if own else 0
        steps.append(
            {
                "start": clock.now, "prefill": model is not None, "rows": rows, "held": held,
                "preempted": preempted.copy(),
            }
        )  # fmt: skip
        preempted.clear()
        clock.now += 1
        if chunk:
            continue
        ids, masks, stopped, places = device.forward(requests)
        outputs = types.SimpleNamespace(
            next_token_ids=ids, stopped=stopped, stop_pos=places, model_metas=None,
            extra_outputs=DLLMExtraOutputs(dllm_mask=masks),
        )  # fmt: skip
        live = [seq.status == MessageStatus.RUNNING for seq in now_running]
        strategy.update_running(now_running, outputs, model, delta)
        scheduler.release_completed_prefill_reservations(now_running)
        for seq, runs in zip(now_running, live, strict=True):
            request = seq.session_id
            # After an EOS within a block LMDeploy returns the whole block.
            has = min(seq.num_new_tokens, asked[request]["output"])
            if runs and has > had[request]:
                tokens.append([request, clock.now, has - had[request]])
                had[request] = has
            if seq.status == MessageStatus.STOPPED and request in scheduler.sessions:
                scheduler.end_session(request)
    return {"error": f"more than {MOST_STEPS} steps", "steps": steps, "tokens": tokens}


def main(scenarios: str, recordings: str) -> None:
    with open(scenarios) as lines, open(recordings, "w") as out:
        for line in lines:
            scenario = json.loads(line)
            try:
                made = record(scenario)
            except Exception as error:
                made = {"error": f"{type(error).__name__}: {error}"}
            out.write(json.dumps({"seed": scenario["seed"], "family": scenario["family"], **made}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
