"""The oracle of vLLM: its scheduler and KV cache manager in virtual time, without model or device.

    VLLM_PYTHON -P benchmarks/oracles/vllm_oracle.py SCENARIOS RECORDINGS

JSON lines (fields: differences.py); -P: files here hide none of the engine's. Scheduler, AsyncScheduler,
DiffusionScheduler and DiffusionAsyncScheduler are driven as by `EngineCore.step` and `step_with_batch_queue`, under a
scenario's discipline by hooks/dsim_hooks/vllm_policy.py, which PYTHONPATH then needs, as dsim. The model answers as the
scenario says; every step takes 1.
"""

import json
import logging
import os
import sys
import tempfile
from collections import deque
from types import SimpleNamespace

os.environ.update(VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1", HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR")
logging.disable(logging.CRITICAL)

import torch  # noqa: E402
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig  # noqa: E402
from vllm.sampling_params import SamplingParams  # noqa: E402
from vllm.utils.hashing import sha256  # noqa: E402
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash  # noqa: E402
from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # noqa: E402
from vllm.v1.core.sched.diffusion_scheduler import DiffusionAsyncScheduler, DiffusionScheduler  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec  # noqa: E402
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput  # noqa: E402
from vllm.v1.request import Request  # noqa: E402

MODEL = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 8192, "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "max_position_embeddings": 65536, "eos_token_id": 0, "torch_dtype": "bfloat16",
}  # fmt: skip
EOS, OUTPUT = 0, 10**9  # answers' token ids begin at OUTPUT, as differences.py's
MOST_STEPS = 20_000
EMPTY_STEP = 1e-3  # that EngineCore sleeps where nothing could run
BLOCKS = ("dflash", "dspark")  # drafters of whole blocks, since 0.33 as here


class Patched:
    """With some attributes replaced."""

    def __init__(self, of, **replaced):
        self.__dict__.update(replaced, _of=of)

    def __getattr__(self, name):
        return getattr(self._of, name)


def scheduler_of(scenario, folder):
    settings, limits, page = scenario["settings"], scenario["limits"], scenario["page_size"]
    model = ModelConfig(
        model=folder, skip_tokenizer_init=True, max_model_len=settings["max_model_len"], dtype="float16"
    )
    names = (
        "max_num_seqs", "max_num_batched_tokens", "max_model_len", "enable_chunked_prefill", "watermark",
        "long_prefill_token_threshold", "scheduler_reserve_full_isl", "prefill_schedule_interval",
    )  # fmt: skip
    asked = {name: settings[name] for name in names} | {"enable_chunked_prefill": True}  # its checks need real models
    scheduling = SchedulerConfig(**asked, is_encoder_decoder=False)
    cache = CacheConfig(block_size=page, enable_prefix_caching=scenario["caching"])
    config = VllmConfig(model_config=model, scheduler_config=scheduling, cache_config=cache)
    # VllmConfig changes these on a CPU.
    for name in (*names, "async_scheduling"):
        object.__setattr__(scheduling, name, settings[name])
    cache.enable_prefix_caching = scenario["caching"]
    num_blocks = limits["num_pages"] + 1  # with the null block
    cache.num_gpu_blocks = num_blocks
    canvas, drafts = settings.get("canvas_length", 0), settings.get("num_speculative_tokens", 0)
    if drafts:
        speculative = config_of_drafts(drafts, settings.get("drafter", "ngram"))
        object.__setattr__(config, "speculative_config", speculative)
        if speculative.method in BLOCKS:
            config._set_max_num_scheduled_tokens()  # with its cap of rows
    windows = limits.get("window_bytes", 0) // limits.get("kv_bytes", 1)
    if canvas:
        object.__setattr__(config, "diffusion_config", SimpleNamespace(canvas_length=canvas))
    if canvas or "discipline" in scenario:  # a layer of each group below
        kinds = ["sliding_attention"] * windows + ["full_attention"]
        layers = Patched(
            model.hf_config, canvas_length=canvas, num_hidden_layers=len(kinds), layer_types=kinds, per_layer_config=(),
        )  # fmt: skip
        object.__setattr__(config, "model_config", Patched(model, is_diffusion=canvas > 0, hf_config=layers))
    shape = {"block_size": page, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float16}
    groups = []  # by layer: models with windows begin with one
    for i in range(windows):
        window = SlidingWindowSpec(**shape, sliding_window=limits["window"])
        groups.append(KVCacheGroupSpec([f"window {i}"], window))
    groups.append(KVCacheGroupSpec(["full"], FullAttentionSpec(**shape)))
    kind = {
        (False, False): Scheduler, (False, True): AsyncScheduler, (True, False): DiffusionScheduler,
        (True, True): DiffusionAsyncScheduler,
    }[canvas > 0, settings["async_scheduling"]]  # fmt: skip
    grammar = SimpleNamespace(
        accept_tokens=lambda request, tokens: True, should_advance=lambda request: False,
        grammar_init=lambda request: None, validate_tokens=lambda request, tokens: tokens,
    )  # fmt: skip
    blocks = KVCacheConfig(
        num_blocks, [], groups, prefix_cache_retention_interval=settings["prefix_cache_retention_interval"]
    )
    if "discipline" in scenario:
        file = os.path.join(os.path.dirname(os.path.abspath(__file__)), "disciplines.py")
        spec = f"vllm-{'diffusion' if canvas else 'ar'},discipline={file}:{scenario['discipline']}"
        object.__setattr__(config, "additional_config", {"dsim_policy": spec})
        kind = vllm_policy().scheduler_of
    scheduler = kind(
        vllm_config=config, kv_cache_config=blocks, structured_output_manager=grammar, block_size=page, log_stats=False,
    )  # fmt: skip
    scheduler.can_skip_drafts = settings.get("drafter") in BLOCKS  # as on a GPU, with the second model runner
    return scheduler


def vllm_policy():
    from dsim_hooks import vllm_policy

    return vllm_policy


def config_of_drafts(count, method):
    """What the scheduler reads of a SpeculativeConfig."""
    eagle, blocks = method == "eagle", method in BLOCKS
    return SimpleNamespace(
        method=method, num_speculative_tokens=count, parallel_drafting=blocks, disable_eagle_block_drop=False,
        num_speculative_tokens_per_batch_size=None, max_num_new_slots_for_drafting=int(method == "draft_model"),
        draft_model_config=SimpleNamespace(hf_config=None), use_eagle=lambda: eagle or blocks,
        use_dflash=lambda: method == "dflash", use_dspark=lambda: method == "dspark",
        use_eagle_block_drop=lambda: eagle, uses_extract_hidden_states=lambda: False,
        needs_eagle_block_drop=lambda: eagle, disable_lookahead_block_hashes=False,
        use_multi_module_mtp=lambda: False,
        uses_draft_model=lambda: method == "draft_model", uses_draft_kv_cache=lambda: method != "ngram",
    )  # fmt: skip


class Model:
    """Answers to the scheduler's steps, by the scenario."""

    def __init__(self, scenario, scheduler):
        self.asked, self.scheduler = scenario["requests"], scheduler
        self.canvas = bool(scenario["settings"].get("canvas_length"))
        self.drafts = scenario["settings"].get("num_speculative_tokens", 0)
        self.committed = [0] * len(self.asked)  # canvases
        self.denoised = [0] * len(self.asked)  # steps of the current canvas
        self.converged = [False] * len(self.asked)
        self.caps = {}  # request's name -> most steps of its canvases

    def tokens(self, request, first, count):
        """Of an answer; an EOS if it ends before its limit."""
        q = self.asked[request]
        ends = q["output"] - 1 if q["output"] < q["max_tokens"] else -1
        return [EOS if i == ends else OUTPUT + 10**5 * request + i for i in range(first, first + count)]

    def answer(self, output, chunks):
        """A step's output. chunks: requests with more prompt to come."""
        ids, sampled = list(output.num_scheduled_tokens), []
        # A new row's padding is no drafts: all of it is rejected.
        padded = {new.req_id for new in output.scheduled_new_reqs} | set(output.scheduled_cached_reqs.resumed_req_ids)
        for name in ids:
            request = self.scheduler.requests.get(name)
            drafts = output.scheduled_spec_decode_tokens.get(name, ())
            if request is None or request.is_finished():
                sampled.append([])
                continue
            proposed = 0 if name in padded else len(drafts)
            sampled.append(self.row(int(name), request.num_output_tokens, proposed, name in chunks))
        places = {name: i for i, name in enumerate(ids)}
        return ModelRunnerOutput(req_ids=ids, req_id_to_index=places, sampled_token_ids=sampled)

    def row(self, i, told, drafts, chunk):
        """A row's new tokens."""
        asked = self.asked[i]
        if not self.canvas:
            if chunk:
                return []
            return self.tokens(i, told, 1 + (min(drafts, asked["accepted"][told]) if drafts else 0))
        if not drafts:  # a prompt, or a preempted request's tokens: its canvas begins anew
            self.denoised[i], self.converged[i] = 0, False
            return []
        if not self.converged[i]:  # a cap ends the canvas at its next denoising step
            self.denoised[i] += 1
            steps = asked["steps"][self.committed[i]]
            self.converged[i] = self.denoised[i] >= min(steps, self.caps.get(str(i), steps))
            return []
        self.denoised[i], self.converged[i] = 0, False
        self.committed[i] += 1
        return self.tokens(i, told, drafts)

    def propose(self, output, chunks):
        """Without look-ahead: the next drafts, or canvases."""
        width = self.scheduler.num_spec_tokens
        ids = [name for name in output.num_scheduled_tokens if name in self.scheduler.requests and name not in chunks]
        if width:
            self.scheduler.update_draft_token_ids(DraftTokenIds(ids, [[7] * width for _ in ids]))


def caps_of(output, scheduler):
    """Caps of canvases by request's name, as workers read them of a decision."""
    caps = dict(getattr(output, "dsim_caps", {}))
    admitted = {new.req_id: new.sampling_params for new in output.scheduled_new_reqs}
    for name in output.scheduled_cached_reqs.resumed_req_ids:  # the second model runner has them among the new
        admitted[name] = scheduler.requests[name].sampling_params
    for name, sampling in admitted.items():
        caps[name] = (sampling.extra_args or {}).get("diffusion_max_steps", MOST_STEPS)
    return caps


def record(scenario, folder):
    scheduler = scheduler_of(scenario, folder)
    model, asked, page = Model(scenario, scheduler), scenario["requests"], scenario["page_size"]
    disciplined = "discipline" in scenario
    if disciplined:
        vllm_policy().time = SimpleNamespace(time=lambda: now)
    pool, num_pages = scheduler.kv_cache_manager.block_pool, scenario["limits"]["num_pages"]
    ahead = getattr(scheduler, "num_hash_lookahead_tokens", 0)  # since 0.33
    hasher = get_request_block_hasher(page, sha256, *[ahead] * (ahead > 0)) if scenario["caching"] else None
    looks_ahead = scenario["settings"]["async_scheduling"]
    preempted, preempt = [], scheduler._preempt_request

    def noted(request, *arguments, **options):
        preempted.append(int(request.request_id))
        return preempt(request, *arguments, **options)

    scheduler._preempt_request = noted
    now, free_at, submitted = 0.0, 0.0, 0
    queue = deque()  # decided, not over: (output, requests with more prompt, end)
    steps, tokens = [], []
    held, left = {}, {}  # by time, after all decisions: held pages, preempted requests
    for _ in range(MOST_STEPS):
        while submitted < len(asked) and asked[submitted]["arrival"] <= now:
            scheduler.add_request(request_of(submitted, asked[submitted], hasher))
            submitted += 1
        if not scheduler.has_requests() and not queue:
            if submitted == len(asked):
                for step in steps:
                    step["held"], step["preempted"] = held[step["start"]], left.get(step["start"], [])
                if disciplined and scheduler.dsim.num_errors:
                    raise RuntimeError("the discipline failed")
                return {"steps": steps, "tokens": tokens}
            now = max(now, asked[submitted]["arrival"])
            continue
        held[now] = num_pages - pool.get_num_free_blocks()
        executed = False
        if scheduler.has_requests():
            preempted.clear()
            output = scheduler.schedule()
            chunks = {n for n in output.num_scheduled_tokens if scheduler.requests[n].is_prefill_chunk}
            held[now] = num_pages - pool.get_num_free_blocks()
            left.setdefault(now, []).extend(preempted)
            executed = output.total_num_scheduled_tokens > 0
            end = now
            if executed:
                start = max(free_at, now)
                end = free_at = start + 1.0
                rows = [[int(name), n] for name, n in output.num_scheduled_tokens.items()]
                steps.append({"start": start, "rows": rows})
                if scheduler.can_skip_drafts:
                    steps[-1]["drafts"] = not output.skip_drafts
                held.setdefault(start, 0)
            queue.appendleft((output, chunks, caps_of(output, scheduler), end))
            if looks_ahead and len(queue) < 2 and (executed or scheduler.has_requests()):
                if executed:
                    continue
                idles = not disciplined and not any(o.total_num_scheduled_tokens for o, *_ in queue)
                if idles and submitted < len(asked):
                    now = max(now, asked[submitted]["arrival"])  # an empty step returns at once
        output, chunks, caps, end = queue.pop()
        now = max(now, end)
        model.caps |= caps
        done = scheduler.update_from_output(output, model.answer(output, chunks)).get(0)
        tokens += [
            [int(o.request_id), now, len(o.new_token_ids)] for o in (done.outputs if done else ()) if o.new_token_ids
        ]
        if not looks_ahead:
            model.propose(output, chunks)
        in_flight = (
            executed or output.total_num_scheduled_tokens or any(o.total_num_scheduled_tokens for o, *_ in queue)
        )
        if disciplined and not in_flight and scheduler.has_requests():
            now += EMPTY_STEP
    raise RuntimeError(f"more than {MOST_STEPS} steps")


def request_of(index, asked, hasher):
    names = {"estimate": "estimated_length", "diffusion_max_steps": "diffusion_max_steps"}
    stated = {name: asked[key] for key, name in names.items() if key in asked}
    sampling = SamplingParams(max_tokens=asked["max_tokens"], extra_args=stated or None)
    sampling._eos_token_id = EOS
    return Request(
        request_id=str(index), prompt_token_ids=list(asked["prompt"]), sampling_params=sampling, pooling_params=None,
        block_hasher=hasher, arrival_time=asked["arrival"],
    )  # fmt: skip


def main():
    init_none_hash(sha256)
    with tempfile.TemporaryDirectory() as folder, open(sys.argv[1]) as scenarios, open(sys.argv[2], "w") as out:
        with open(os.path.join(folder, "config.json"), "w") as file:
            json.dump(MODEL, file)
        for line in scenarios:
            scenario = json.loads(line)
            try:
                made = record(scenario, folder)
            except Exception as error:  # the table shows it as a difference
                made = {"error": repr(error)[:300]}
            out.write(json.dumps({"family": scenario["family"], "seed": scenario["seed"], **made}) + "\n")


if __name__ == "__main__":
    main()
