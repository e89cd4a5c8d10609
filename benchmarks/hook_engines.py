"""The hooks of SGLang and LMDeploy around the engines' own classes, on a CPU.

    VENV/bin/python benchmarks/hook_engines.py sglang|lmdeploy OUT

VENV: torch, transformers, dsim, and the engines without what needs a GPU: `pip install --no-deps sglang==0.5.23
lmdeploy==0.18.0`, orjson, mmengine-lite; stubs replace other missing modules. Scheduler, batches, requests, algorithms
and sequences are the engine's; the model is a table of logits, and no page is allocated. Writes a log a scenario to
OUT.
"""

import asyncio
import importlib.abc
import importlib.machinery
import json
import os
import sys
import types
import warnings
from array import array
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

VOCAB, MASK, BLOCK = 16, 15, 4
MODEL = types.SimpleNamespace(
    architectures=["Qwen3ForCausalLM"], num_hidden_layers=2, hidden_size=64, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, intermediate_size=128, vocab_size=VOCAB, max_position_embeddings=512,
    tie_word_embeddings=False, name_or_path="owner/tiny",
)  # fmt: skip


def _anything(_: object, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return Anything


class _Answers(type):
    __getattr__ = _anything

    def __getitem__(cls, key: object) -> Any:
        return cls

    def __or__(cls, other: object) -> Any:
        return cls

    __ror__ = __or__


class Anything(metaclass=_Answers):
    """For a class, decorator or member of a missing module."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __init_subclass__(cls, **kwargs: object) -> None:
        pass

    def __call__(self, *args: Any, **kwargs: object) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) else self

    __getattr__ = _anything


class Missing(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds missing modules for the engine alone."""

    def __init__(self, engine: str) -> None:
        self._engine = engine
        sys.meta_path.append(self)

    def find_spec(self, name: str, path: object, target: object = None) -> Any:
        top, _, inside = name.partition(".")
        stub = isinstance(sys.modules.get(name.rpartition(".")[0]), _Stub)
        if top == self._engine or (inside and not stub):
            return None
        if not inside and (top in ("torchcodec", "accelerate") or self._importer() != self._engine):
            return None  # transformers looks them up by version
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass

    @staticmethod
    def _importer() -> str:
        frame: Any = sys._getframe(2)
        while frame is not None and frame.f_globals.get("__name__", "").startswith("importlib"):
            frame = frame.f_back
        return "" if frame is None else frame.f_globals.get("__name__", "").partition(".")[0]


class _Stub(types.ModuleType):
    __path__ = ()  # type: ignore[assignment]
    __version__ = "99.0"

    __getattr__ = _anything


# ---- SGLang ---------------------------------------------------------------------------------------------------------


def sglang(out: Path) -> None:
    """Two requests under each algorithm: several masks a forward, and a canvas."""
    import torch
    from dsim_hooks import sglang as hooks
    from sglang.srt.dllm.algorithm import get_algorithm
    from sglang.srt.dllm.config import DllmConfig
    from sglang.srt.dllm.mixin import scheduler as mixin
    from sglang.srt.managers import scheduler as managers
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.schedule_policy import SchedulePolicy
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
    from sglang.srt.plugins.hook_registry import HookRegistry
    from sglang.srt.sampling.sampling_params import SamplingParams
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    example = Path(__file__).parents[1] / "examples" / "policies" / "dws.py"
    os.environ["DSIM_POLICY"] = f"sglang-joint,discipline={example}:POLICY"
    hooks.register()
    HookRegistry.apply_hooks()

    class Here(Scheduler):  # type: ignore[misc]
        """Without the constructor's parts; what is not set is a stub."""

        def __init__(self) -> None:
            pass

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            self.__dict__[name] = found = MagicMock(name=name)
            return found

    for name, fdfo in (("LowConfidence", False), ("LowConfidence", True), ("JointThreshold", True),
                       ("JointThreshold", False)):  # fmt: skip
        case = f"{name}-{'fdfo' if fdfo else 'sync'}"
        hooks._STATE.clear()
        os.environ["DSIM_STEPLOG"] = str(out / f"{case}.jsonl")
        config = DllmConfig(name, {"threshold": 0.5}, BLOCK, MASK, 8, first_done_first_out_mode=fdfo)
        algorithm = get_algorithm(config)
        worker: Any = TpModelWorker.__new__(TpModelWorker)
        worker.dllm_algorithm = algorithm
        torch.manual_seed(0)
        table = torch.randn(64, VOCAB) * 2
        table[:, MASK] = -50

        def forward(batch: Any, pp_proxy_tensors: Any = None, table: Any = table) -> Any:
            logits = table[batch.positions]
            output = types.SimpleNamespace(full_logits=logits, auxiliary_device_output=None)
            return types.SimpleNamespace(logits_output=output, can_run_graph=True)

        worker._model_runner = types.SimpleNamespace(forward=forward)
        scheduler = Here()
        scheduler.__dict__.update(
            dllm_config=config, dllm_manager=mixin.DllmManager(config), waiting_queue=[], page_size=BLOCK, tp_size=1,
            max_total_num_tokens=400, chunked_prefill_size=64, max_prefill_tokens=1024, is_generation=True,
            enable_overlap=False, enable_pdmux=False, forward_ct=0, processed_tokens_counter=0, forward_sleep_time=None,
            scripted_scheduler_hook=None, enable_fpm=False, attn_dp_enabled=False,
            enable_unified_cache_external_linker=False,
            model_config=types.SimpleNamespace(hf_config=MODEL, context_len=512),
            server_args=types.SimpleNamespace(served_model_name=None, model_path="a/model"),
        )  # fmt: skip
        asked = []
        for rid, prompt in (("a", 6), ("b", 8)):
            params = SamplingParams(max_new_tokens=6)
            params.normalize(None)
            ids = array("q", range(prompt))
            hooked = types.SimpleNamespace(rid=rid, input_ids=ids, sampling_params=params)
            with patch.object(Scheduler, "_handle_generate_request"):
                hooked.mm_inputs = None
                scheduler.handle_generate_request(hooked)
            asked.append(Req(rid, "", ids, params, dllm_config=config, eos_token_ids=set(), vocab_size=VOCAB))
        scheduler.dllm_manager.add_waiting_reqs(asked)
        past = {req.rid: 0 for req in asked}

        for _ in range(40):
            rows = [req for req in scheduler.dllm_manager.waiting_queue if not req.finished()]
            for req in rows:  # as `init_next_round_input`, which also looks for a prefix
                req._init_fill_ids_for_dllm()
                req.prefix_len = past[req.rid]
                req.determine_dllm_phase()
            rows = [req for req in rows if req.is_dllm_prefill()] or rows
            if not rows:
                break
            batch = ScheduleBatch(reqs=rows, dllm_config=config)
            batch.forward_mode, batch.spec_algorithm = ForwardMode.DLLM_EXTEND, SpeculativeAlgorithm.NONE
            batch.prefix_lens = [past[req.rid] for req in rows]
            batch.extend_lens = [BLOCK] * len(rows)
            written: list[int] = []
            for req, begin in zip(rows, batch.prefix_lens, strict=True):
                req.extend_end = begin + BLOCK
                written += req.full_untruncated_fill_ids[begin : begin + BLOCK]
            starts = torch.tensor(batch.prefix_lens)
            made = ForwardBatch(
                ForwardMode.DLLM_EXTEND, len(rows), torch.tensor(written), None, starts + BLOCK, None, 0,
                rids=[req.rid for req in rows], extend_prefix_lens_cpu=batch.prefix_lens,
                positions=(starts[:, None] + torch.arange(BLOCK)).flatten(),
            )  # fmt: skip
            with patch.object(ForwardBatch, "init_new", return_value=made):
                scheduler.__dict__["model_worker"] = types.SimpleNamespace(
                    forward_batch_generation=lambda b, made=made, worker=worker, **k: (
                        worker._forward_batch_generation_dllm(made, b)
                    )
                )
                result = scheduler.run_batch(batch)
            with patch.object(mixin, "release_kv_cache"), patch.object(Scheduler, "_record_step_counters"):
                scheduler.process_batch_result(batch, result)
            for i, req in enumerate(rows):
                if not fdfo or result.accept_length_per_req_cpu[i]:
                    past[req.rid] += BLOCK
                req.kv = types.SimpleNamespace()
        hooks._STATE["log"].close()
        print(case, {req.rid: len(req.output_ids) for req in asked})

    for rid, output in (("long", 320), ("short", 8), ("between", 160)):
        params = SamplingParams(max_new_tokens=output)
        req = Req(rid, "", array("q", range(8)), params, dllm_config=config, eos_token_ids=set(), vocab_size=VOCAB)
        req.time_stats.set_wait_queue_entry_time()
        scheduler.waiting_queue.append(req)
    pool = types.SimpleNamespace(available_size=lambda: 400)
    cache = MagicMock(disable=True, evictable_size=lambda: 0, supports_fast_match_prefix=lambda: False)
    scheduler.__dict__.update(enable_priority_scheduling=False, schedule_low_priority_values_first=False)
    scheduler.__dict__.update(schedule_policy="fcfs", token_to_kv_pool_allocator=pool, tree_cache=cache)
    settings = types.SimpleNamespace(enable_prefill_delayer=False, disable_priority_preemption=True)
    with patch.multiple(managers, get_schedule=lambda: settings, NewTokenRatioTracker=MagicMock()):
        scheduler.init_schedule_policy()
    with patch.object(SchedulePolicy, "_touch_waiting_prefixes"):
        scheduler.policy.calc_priority(scheduler.waiting_queue)
    config.max_running_requests = len(scheduler.dllm_manager.waiting_queue) + 2
    scheduler._fetch_waiting_reqs()
    admitted = [req.rid for req in scheduler.dllm_manager.waiting_queue[-2:]]
    print("admitted by the policy:", *admitted, "and", hooks._STATE["asker"].num_errors, "errors")
    (out / "admitted.json").write_text(json.dumps(admitted))


# ---- LMDeploy -------------------------------------------------------------------------------------------------------


def lmdeploy(out: Path) -> None:
    """Two requests: a prefill whose last block has masks, then one block per step."""
    import torch
    from dsim_hooks import lmdeploy as hooks
    from lmdeploy.pytorch.config import DLLMConfig, UnmaskingStrategy
    from lmdeploy.pytorch.engine.engine_loop import EngineLoop
    from lmdeploy.pytorch.engine.model_agent.agent import BaseModelAgent, BatchedOutputs
    from lmdeploy.pytorch.messages import MessageStatus, SamplingParam, SchedulerSession, SequenceManager, SequenceMeta
    from lmdeploy.pytorch.strategies.dllm.model_agent import DLLMExtraOutputs
    from lmdeploy.pytorch.strategies.dllm.sequence import DLLMSequenceStrategy
    from lmdeploy.pytorch.strategies.dllm.unmasking import UnmaskingProcessor

    with patch.object(BaseModelAgent, "__init__", lambda self, **given: self.__dict__.update(given)):
        hooks.patch()
        dllm = DLLMConfig(
            block_length=BLOCK, unmasking_strategy=UnmaskingStrategy.LOW_CONFIDENCE_DYNAMIC, confidence_threshold=0.5
        )
        agent = BaseModelAgent(
            model_config=types.SimpleNamespace(hf_config=MODEL),
            cache_config=types.SimpleNamespace(
                block_size=64, num_gpu_blocks=32, max_batches=8, max_prefill_token_num=8192
            ),
            misc_config=types.SimpleNamespace(dllm_config=dllm), dist_config=types.SimpleNamespace(attn_tp=1),
        )  # fmt: skip
    agent.spec_agent = types.SimpleNamespace(update_main_model_outputs=lambda ret, inputs: (None, ret))
    agent.get_logits = lambda hidden_states: None
    strategy = DLLMSequenceStrategy(BLOCK, MASK)
    manager = SequenceManager(SequenceMeta(block_size=64, strategy=strategy, sampling_strategy=MagicMock()))

    class Runs:
        """A sequence that waits for no page."""

        status = MessageStatus.RUNNING

        def finish(self) -> None:
            self.status = MessageStatus.STOPPED

    life = types.SimpleNamespace(
        new_sequence_id=manager.new_sequence_id, add_sequence=lambda seq, status: seq.set_state(Runs())
    )
    asked = [
        SchedulerSession(i, manager.seq_meta, life).add_sequence(list(range(prompt)), SamplingParam(max_new_tokens=6))
        for i, prompt in enumerate((6, 8))
    ]
    for seq in asked:
        seq.resp = MagicMock()
    loop: Any = EngineLoop.__new__(EngineLoop)
    loop.scheduler, loop.resp_queue, loop.seq_strategy = MagicMock(), MagicMock(), strategy
    loop.config = types.SimpleNamespace(num_speculative_tokens=None, enable_metrics=False)
    unmask = UnmaskingProcessor(dllm)
    torch.manual_seed(0)
    table = torch.randn(64, VOCAB) * 2
    running, decoding = list(asked), False
    while running:
        lengths = [seq.num_token_ids for seq in running]
        past = [seq.num_history_ids for seq in running]
        inputs = types.SimpleNamespace(
            is_dummy=False, is_decoding=decoding, seq_length=torch.tensor(lengths), history_lengths=torch.tensor(past),
            is_chunk=False, logits_indices=None,
        )  # fmt: skip
        with patch.object(BaseModelAgent, "async_forward", new=_nothing):
            asyncio.run(agent._async_model_forward(inputs, return_logits=True))
        # Each row's last block.
        ends = [begin + n for begin, n in zip(past, lengths, strict=True)]
        ids = torch.tensor(array("q", b"".join(seq.history_cache[end - BLOCK : end].astype("int64").tobytes()
                                               for seq, end in zip(running, ends, strict=True))))  # fmt: skip
        masks = torch.cat([torch.tensor(seq.dllm_mask[-BLOCK:].copy()) for seq in running])
        logits = torch.cat([table[end - BLOCK : end] for end in ends])
        masks, ids = unmask(logits, ids, logits.argmax(dim=-1), masks)
        # The engine's stopping criterion is not used.
        whole = (masks.view(-1, BLOCK) == 1).all(dim=1).tolist()
        new = [seq.num_new_tokens + BLOCK - seq.num_valid_ids % BLOCK if done else 0
               for seq, done in zip(running, whole, strict=True)]  # fmt: skip
        out = BatchedOutputs(
            next_token_ids=ids, stopped=torch.tensor([n >= 6 for n in new]), extra_outputs=DLLMExtraOutputs(masks),
            stop_pos=torch.tensor([BLOCK - 1 - (n - 6) for n in new]),
        )  # fmt: skip
        loop._finish_forward_output(out, running, inputs, None)
        decoding = True
        running = [seq for seq in running if seq.status is MessageStatus.RUNNING]
    hooks._STATE["log"].close()
    print({seq.seq_id: seq.num_new_tokens for seq in asked})


async def _nothing(*args: object, **kwargs: object) -> dict[str, object]:
    return {}


def main() -> None:
    engine, folder = sys.argv[1:]
    warnings.simplefilter("ignore")
    sys.path[0] = str(Path(__file__).parents[1] / "hooks")  # this folder's names clash with packages
    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    os.environ.update(DSIM_STEPLOG=str(out / f"{engine}.jsonl"), DSIM_STEPLOG_SKIP="0")
    Missing(engine)
    {"sglang": sglang, "lmdeploy": lmdeploy}[engine](out)


if __name__ == "__main__":
    main()
