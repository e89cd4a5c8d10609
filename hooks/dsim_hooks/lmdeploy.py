"""LMDeploy's PyTorch engine: patches around model agent, unmasking and loop (against 0.18.0).

LMDeploy loads no plug-ins: `python -m dsim_hooks.lmdeploy ARGS` patches it and runs its command line; other programs
call `patch()` before they make an engine. Engines of one process only.
"""

import sys
from collections import deque
from pathlib import Path

from . import log as steplog

_STATE = {"log": None, "end": None, "forwards": deque()}
MASKED = 0  # lmdeploy.pytorch.consts.DLLM_MASKED
OVER = ("STOPPED", "TO_BE_MIGRATED")


def patch():
    """Once."""
    if steplog.log_path() is None:
        return
    with steplog.harmless("everything"):
        _patch()


def _patch():
    from lmdeploy.pytorch.engine.engine_loop import EngineLoop
    from lmdeploy.pytorch.engine.model_agent.agent import BaseModelAgent
    from lmdeploy.pytorch.messages import SchedulerSession
    from lmdeploy.pytorch.strategies.dllm.unmasking import UnmaskingProcessor

    if getattr(EngineLoop, "_dsim_hooked", False):
        return
    steplog.hook_class(BaseModelAgent, "__init__", _build)
    steplog.hook_class(SchedulerSession, "add_sequence", _arrival)
    steplog.hook_class(BaseModelAgent, "_async_model_forward", _forward)
    steplog.hook_class(UnmaskingProcessor, "__call__", _unmask)
    steplog.hook_class(EngineLoop, "_finish_forward_output", _output)
    EngineLoop._dsim_hooked = True


def _build(agent, original, *args, **kwargs):
    """Open the log as the engine makes its model agent."""
    original(agent, *args, **kwargs)
    if _STATE["log"] is None:
        with steplog.harmless("everything"):
            _STATE["log"] = steplog.StepLog(steplog.log_path(), header(agent))


def _arrival(session, original, token_ids, sampling_param=None, *args, **kwargs):
    seq = original(session, token_ids, sampling_param, *args, **kwargs)
    if _STATE["log"] is None:
        return seq
    with steplog.harmless("a request"):
        limit = None if sampling_param is None else sampling_param.max_new_tokens
        _STATE["log"].request(seq.seq_id, len(token_ids), limit)
    return seq


async def _forward(agent, original, inputs, *args, **kwargs):
    """Queues a forward, whose work is read with its output."""
    log = _STATE["log"]
    if log is not None:
        with log.step_left_out():
            if not inputs.is_dummy:
                record = {"begin": log.now(), "decoding": inputs.is_decoding, "masks": None}
                _STATE["forwards"].append(record | {"tokens": inputs.seq_length, "past": inputs.history_lengths})
    return await original(agent, inputs, *args, **kwargs)


def _unmask(processor, original, logits, input_ids, token_ids, dllm_mask):
    """Masks of each row's block around a step; copies stay on the device until the output."""
    if _STATE["log"] is None or not _STATE["forwards"]:
        return original(processor, logits, input_ids, token_ids, dllm_mask)
    before = steplog.read("the masks of blocks", dllm_mask.clone)
    result = original(processor, logits, input_ids, token_ids, dllm_mask)
    with _STATE["log"].step_left_out():
        after = result[0] if isinstance(result, tuple) else result
        # Forwards run in turn: masks are known before the next begins.
        _STATE["forwards"][-1]["masks"] = before, after.clone(), processor.dllm_config.block_length
    return result


def _output(loop, original, out, running, model_inputs, delta):
    """Log the step whose output has arrived."""
    log = _STATE["log"]
    if log is None or not _STATE["forwards"]:
        return original(loop, out, running, model_inputs, delta)
    forward = None
    with log.step_left_out():
        if out is not None and out.next_token_ids is not None:
            before = [seq.num_new_tokens for seq in running]
            forward = _STATE["forwards"].popleft()
    result = original(loop, out, running, model_inputs, delta)
    if forward is None:
        return result
    end = log.now()
    begin = forward["begin"] if _STATE["end"] is None else _STATE["end"]
    _STATE["end"] = None
    with log.step_left_out():
        _write_step(log, begin, end, forward, running, before)
        ended = [seq for seq in running if seq.status.name in OVER]
        for seq in ended:
            log.finished(seq.seq_id)
        if loop.scheduler.has_unfinished() or len(ended) < len(running):
            _STATE["end"] = end
    return result


def _write_step(log, begin, end, forward, running, before):
    """A step and its blocks. before: tokens that each sequence had."""
    decoding, masks = forward["decoding"], forward["masks"]
    block, num = 1 if masks is None else masks[2], len(running)
    old_marks, new_marks = ([[]] * num,) * 2 if masks is None else (m.view(num, block).tolist() for m in masks[:2])
    rows, heads = [], 0
    lengths = zip(running, forward["tokens"].tolist(), forward["past"].tolist(), before, old_marks, strict=True)
    for seq, n, past, count, marks in lengths:
        decoded = "decode" if masks is None else "denoise" if MASKED in marks else "flush"
        rows.append((seq.seq_id, decoded if decoding else "prefill", n, past + n, max(0, seq.num_new_tokens - count)))
        heads += min(n, block)
    qk_pairs = sum(steplog.pairs(n, keys, masks is not None) for _, _, n, keys, _ in rows)
    number = log.step(
        begin,
        end - begin,
        rows,
        sum_q_kv=qk_pairs,
        prefill_tokens=0 if decoding else sum(row[2] for row in rows),
        head_rows=heads,
        sampled_rows=heads,
        running=num,
    )
    for row, old, new in zip(rows, old_marks, new_marks, strict=True):
        settled = [i for i in range(len(old)) if old[i] == MASKED and new[i] != MASKED]
        if MASKED in old:
            log.sequence(number, row[0], row[3] - block, settled)


def header(agent):
    """The log's first line."""
    model, cache = agent.model_config.hf_config, agent.cache_config
    dllm = steplog.read("block_length", lambda: agent.misc_config.dllm_config)
    blocks = dllm is not None and steplog.read("block_length", lambda: dllm.block_length > 1)
    return steplog.readable(
        {
            "synthetic": lambda: False,
            "engine": engine,
            **steplog.machine(),
            "num_devices": lambda: agent.dist_config.attn_tp,
            "model": lambda: {"name": Path(model.name_or_path).name, "config": steplog.config_of(model)},
            "block_length": lambda: dllm.block_length if blocks else 1,
            "threshold": lambda: float(dllm.confidence_threshold) if blocks else 1.0,
            "page_size": lambda: cache.block_size,
            "num_pages": lambda: cache.num_gpu_blocks if (cache.num_gpu_blocks or 0) > 0 else None,
            "preset": lambda: "lmdeploy-0.18" if blocks else None,
            "settings": lambda: steplog.readable(
                {"max_batch": lambda: cache.max_batches, "max_prefill_tokens": lambda: cache.max_prefill_token_num}
            ),
        }
    )


def engine():
    import lmdeploy

    return f"LMDeploy {lmdeploy.__version__}, PyTorch"


def main():
    patch()
    from lmdeploy.cli.entrypoint import run

    sys.argv[0] = "lmdeploy"
    run()


if __name__ == "__main__":
    main()
