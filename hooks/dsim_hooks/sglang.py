"""SGLang: a general plug-in around the scheduler's batches and the forwards of diffusion blocks (against 0.5.23)."""

import functools

from . import log as steplog

SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
ALGORITHM = "sglang.srt.dllm.algorithm.base.DllmAlgorithm"

_STATE = {}  # this process's log, and what is in flight


def register():
    """Called by SGLang in each of its processes; a log is opened where the first request is scheduled."""
    if steplog.wanted() is None:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, around in (
        (f"{SCHEDULER}.handle_generate_request", around_request),
        (f"{SCHEDULER}.run_batch", around_run),
        (f"{SCHEDULER}.process_batch_result", around_result),
        (f"{ALGORITHM}.run", around_blocks),
    ):
        HookRegistry.register(target, around, HookType.AROUND)


def around_request(original, scheduler, request, *args, **kwargs):
    """A request's arrival."""
    if "log" not in _STATE:
        _STATE.update(log=steplog.StepLog(steplog.wanted(), header(scheduler)), begun={}, end=None)
    asked = request.sampling_params.max_new_tokens
    _STATE["log"].request(request.rid, len(request.input_ids or ()), asked)
    return original(scheduler, request, *args, **kwargs)


def around_run(original, scheduler, batch, *args, **kwargs):
    """A batch's begin: where the last one ended, or now."""
    log = _STATE.get("log")
    if log is not None:
        now = log.now()
        begin = now if _STATE["end"] is None else _STATE["end"]
        _STATE["begun"][id(batch)] = (begin, rows_of(batch), {
            "waiting": len(scheduler.waiting_queue), "running": len(batch.reqs),
        })  # fmt: skip
        _STATE.update(last=begin, forwards=0)
    return original(scheduler, batch, *args, **kwargs)


def around_result(original, scheduler, batch, result, *args, **kwargs):
    """A batch's end: its output has reached its requests."""
    log = _STATE.get("log")
    plan = None if log is None else _STATE["begun"].pop(id(batch), None)
    before = {} if plan is None else {req.rid: len(req.output_ids) for req in batch.reqs}
    found = original(scheduler, batch, result, *args, **kwargs)
    if plan is not None:
        end = log.now()
        begin, rows, state = plan
        if not batch.is_dllm():  # the forwards of blocks have told of themselves
            emitted = {req.rid: len(req.output_ids) - before[req.rid] for req in batch.reqs}
            write(log, begin, end, [(*row, max(0, emitted.get(row[0], 0))) for row in rows], **state)
        for req in batch.reqs:
            if req.finished():
                log.finished(req.rid)
        busy = bool(scheduler.waiting_queue) or not all(req.finished() for req in batch.reqs)
        _STATE["end"] = end if busy else None
    return found


def around_blocks(original, algorithm, runner, forward, *args, **kwargs):
    """The forwards of a round of blocks: each is a step, told of as its masks are settled."""
    log = _STATE.get("log")
    if log is None:
        return original(algorithm, runner, forward, *args, **kwargs)
    _hook_step(type(algorithm))
    _STATE["forwards"] = 0
    found = original(algorithm, runner, forward, *args, **kwargs)
    if not _STATE["forwards"]:  # blocks of prompts alone: one forward, and nothing to settle
        begin, end = _STATE["last"], log.now()
        write(log, begin, end, [(*row, 0) for row in block_rows(algorithm, forward, None)], graph=bool(found[-1]))
        _STATE["last"] = end
    return found


def _hook_step(kind):
    """Wrap an algorithm's `step`, once a class."""
    if getattr(kind.step, "_dsim_hooked", False):
        return
    step = kind.step

    @functools.wraps(step)
    def hooked(self, forward, logits, states):
        masks = masks_of(self, forward)
        _STATE["forwards"] += 1
        if _STATE["forwards"] == 1:
            _STATE["masks"] = masks
        done = step(self, forward, logits, states)
        settled = masks & (forward.input_ids.view(masks.shape).cpu() != self.mask_id)
        log = _STATE["log"]
        begin, end = _STATE["last"], log.now()
        over = done if self.fdfo else [all(done)] * len(done)
        emitted = [int(row.sum()) if last else 0 for row, last in zip(_STATE["masks"], over, strict=True)]
        rows = block_rows(self, forward, masks)
        number = write(log, begin, end, [(*row, n) for row, n in zip(rows, emitted, strict=True)])
        for row, mask, positions in zip(rows, masks, settled, strict=True):
            if mask.any():
                log.sequence(number, row[0], row[3] - self.block_size, positions.nonzero().flatten().tolist())
        _STATE["last"] = end
        return done

    hooked._dsim_hooked = True
    kind.step = hooked


def masks_of(algorithm, forward):
    """Which positions of each block are masks, [rows, block], on the CPU."""
    ids = forward.input_ids.view(forward.batch_size, algorithm.block_size)
    masks = ids == algorithm.mask_id
    prompt = forward.dllm_prompt_mask
    return (masks if prompt is None else masks & ~prompt).cpu()


def block_rows(algorithm, forward, masks):
    """(request, phase, tokens, keys) of each row of blocks."""
    rows = []
    for i, (rid, before) in enumerate(zip(forward.rids, forward.extend_prefix_lens_cpu, strict=True)):
        phase = "prefill" if masks is None else "denoise" if masks[i].any() else "flush"
        rows.append((rid, phase, algorithm.block_size, int(before) + algorithm.block_size))
    return rows


def rows_of(batch):
    """(request, phase, tokens, keys) of each row of a batch of one token after another."""
    names = [req.rid for req in batch.reqs]
    if batch.forward_mode.is_extend():
        lengths = zip(names, batch.extend_lens, batch.prefix_lens, strict=True)
        return [(name, "prefill", int(n), int(before) + int(n)) for name, n, before in lengths]
    return [(name, "decode", 1, int(keys)) for name, keys in zip(names, batch.seq_lens_cpu.tolist(), strict=True)]


def write(log, begin, end, rows, **more):
    """A step's line."""
    whole = ("denoise", "flush")  # a block sees itself whole, other queries what is before them
    qk_pairs = sum(n * keys if phase in whole else n * (2 * keys - n + 1) // 2 for _, phase, n, keys, _ in rows)
    heads = sum(n if phase in whole else 1 for _, phase, n, _, _ in rows)
    prefill = sum(n for _, phase, n, _, _ in rows if phase == "prefill")
    return log.step(
        begin, end - begin, rows, sum_q_kv=qk_pairs, prefill_tokens=prefill, head_rows=heads, sampled_rows=heads, **more
    )


def header(scheduler):
    """The log's first line, from SGLang's configuration."""
    import sglang
    import torch

    args, model = scheduler.server_args, scheduler.model_config
    device, memory = steplog.device_of(torch)
    dllm = getattr(scheduler, "dllm_config", None)
    settings = {} if dllm is None else dict(dllm.algorithm_config or {})
    shape = steplog.shape_of(model.hf_config, model.context_len)
    shape["name"] = str(args.served_model_name or args.model_path)
    return {
        "synthetic": False, "engine": f"SGLang {sglang.__version__}", "device": device, "memory_bytes": memory,
        "num_devices": args.tp_size, "model": shape, "block_length": 1 if dllm is None else dllm.block_size,
        "threshold": float(settings.get("threshold", 1.0 if dllm is None else 0.95)), "torch": torch.__version__,
        "page_size": args.page_size or 1,
        "preset": None if dllm is None else preset_of(dllm),
        "settings": {
            "max_running_requests": args.max_running_requests, "chunked_prefill_size": args.chunked_prefill_size,
            "max_prefill_tokens": getattr(args, "max_prefill_tokens", None),
        },
    }  # fmt: skip


def preset_of(dllm):
    """dsim's name of the scheduler and the algorithm."""
    by_law = {"JointThreshold": "sglang-joint", "Gemma4Renoise": "sglang-gemma"}
    usual = "sglang-fdfo" if dllm.first_done_first_out_mode else "sglang-sync"
    return by_law.get(getattr(dllm, "algorithm", None), usual)
