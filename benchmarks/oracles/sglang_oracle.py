"""Have SGLang's own dLLM scheduling run scenarios: the oracle of `sglang-fdfo`, `-sync`, `-joint` and `-gemma`.

Real, taken from the release's files by name: the request mixin, DllmManager, the scheduler mixin, PrefillAdder with its
memory budget, the radix cache, and the algorithms' loops. Stubs: the allocator, which counts pages in one pool or, with
windowed layers, two, and the model, which unmasks as the scenario says. Where a pool runs short the engine may end
("Prefill out of memory", or a cut block), and so does the recording.

Settings: kind (low, joint or gemma), fdfo, block, page, num_pages, most, max_prefill; with windowed layers also window
and window_pages, their pool, not in num_pages.
"""

import __future__

import ast
import dataclasses
import enum
import heapq
import json
import os
import sys
import types
from array import array
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

torch.set_num_threads(1)
SOURCE = Path(os.environ["SGLANG_SOURCE"], "sglang", "srt")
MASK = -9
UNKNOWN = 0  # ... in a canvas
SAMPLED = 1  # found everywhere by the stub
OUTPUT = 10**9  # where answers' token ids begin: requests share none
MOST_STEPS = 20_000
LONGEST = 4096


class Mode:
    DLLM_EXTEND, EXTEND = "dllm", "extend"


class Clock:
    """Advances with each reading: no two are equal."""

    readings = 0.0

    def monotonic(self) -> float:
        self.readings += 1
        return self.readings

    perf_counter = monotonic


class Events:
    """Records no cache events."""

    def __init__(self, **_: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


class Cache:
    """What the radix cache inherits."""

    def lock(self, node: Any) -> Any:
        self.inc_lock_ref(node)
        return node

    def unlock(self, lock: Any) -> None:
        if lock is not None:
            self.dec_lock_ref(lock)

    def supports_mamba(self) -> bool:
        return False

    def full_evictable_size(self) -> int:
        return self.evictable_size()

    def swa_evictable_size(self) -> int:
        return 0

    def update_eviction_metrics(self, *_: Any) -> None:
        pass


class NoPool:
    """No scenario has this allocator."""


SCOPE: dict[str, Any] = {
    "Any": Any, "array": array, "BasePrefixCache": Cache, "CLIP_MAX_NEW_TOKENS": 4096,
    "IGNORE_EOS_RESERVE_TOKENS": 1, "contextmanager": contextmanager,
    "dataclass": dataclass, "dataclasses": dataclasses, "DeepSeekV4HiSparseTokenToKVPoolAllocator": NoPool,
    "defaultdict": defaultdict,
    "enum": enum, "Enum": enum.Enum, "auto": enum.auto, "field": field, "ForwardBatch": object, "ForwardMode": Mode,
    "get_eviction_strategy": lambda *_: types.SimpleNamespace(get_priority=lambda node: node.last_access_time),
    "heapq": heapq, "ModelRunner": object, "KVCacheEventRecorder": Events, "SWATokenToKVPoolAllocator": NoPool,
    "split_node_hash_value": lambda *_: (None, None), "sys": sys, "time": Clock(), "torch": torch, "_is_npu": False,
    "ComponentType": types.SimpleNamespace(SWA="window"), "is_swa_req_ring": lambda _: False,
    "FINISH_LENGTH": lambda length: "length", "UnifiedRadixCache": NoPool, "NamedTuple": NamedTuple,
    "ceil_align": lambda value, page: -(-value // page) * page,
    "get_exec": lambda: types.SimpleNamespace(features=types.SimpleNamespace(enable_encoder_swa_bounded_replay=False)),
}  # fmt: skip


def take(path: str, *names: str, methods: tuple[str, ...] = ()) -> None:
    """Define a file's classes and functions in SCOPE; of classes only `methods`, if given."""
    tree = ast.parse((SOURCE / path).read_text())
    for node in tree.body:
        if getattr(node, "name", None) not in names:
            continue
        if isinstance(node, ast.ClassDef) and methods:
            node.body = [part for part in node.body if getattr(part, "name", None) in methods]
            node.bases = []
        module = ast.fix_missing_locations(ast.Module([node], []))
        exec(compile(module, path, "exec", flags=__future__.annotations.compiler_flag), SCOPE)


take("dllm/mixin/req.py", "DllmReqPhase", "ReqDllmMixin")
take("dllm/mixin/scheduler.py", "DllmManager")
take("managers/schedule_policy.py", "AddReqResult", "_PrefillAdmission")
take(
    "dllm/mixin/scheduler.py", "SchedulerDllmMixin",
    methods=(
        "_process_dllm_batches", "_process_batch_by_phase", "process_dllm_staging_reqs", "process_dllm_incoming_reqs",
        "_fetch_waiting_reqs", "process_batch_result_dllm", "_finish_dllm_request_if_needed", "finish_dllm_forward",
    ),
)  # fmt: skip
take(
    "managers/schedule_policy.py", "PrefillAdder",
    methods=(
        "_init_dllm_meta", "_get_dllm_remain_tokens", "_get_dllm_extend_len", "_add_dllm_req", "add_dllm_staging_req",
        "add_one_req", "add_one_req_ignore_eos", "_select_prefill_admission", "_commit_prefill_admission",
        "_check_prefill_budget",
        "_swa_new_tokens", "_update_prefill_budget", "budget_state", "ceil_paged_tokens", "rem_total_tokens",
        "cur_rem_tokens", "_lock_node", "_replay_len",
    ),
)  # fmt: skip
take("managers/schedule_batch.py", "Req", methods=("init_next_round_input", "_compute_max_prefix_len"))
take("mem_cache/prefill_budget.py", "estimate_swa_kv_tokens", "PrefillBudget", "SWAPrefillBudget")
take("mem_cache/common.py", "free_swa_out_of_window_slots")
for kind in (
    "EvictParams", "EvictResult", "IncLockRefResult", "DecLockRefResult", "InsertParams", "InsertResult",
    "MatchPrefixParams", "MatchResult",
):  # fmt: skip
    take("mem_cache/base_prefix_cache.py", kind)
take("mem_cache/radix_cache.py", "RadixKey", "TreeNode", "RadixCache")
take(
    "dllm/algorithm/base.py", "DllmAlgorithm",
    methods=(
        "_block_start_list", "_prompt_mask", "_run_sync", "_run_fdfo", "run", "max_steps", "prepare_inputs",
        "init_step_state",
    ),
)  # fmt: skip
take("dllm/algorithm/low_confidence.py", "LowConfidence", methods=("step",))
PrefillAdder, RadixCache, RadixKey = SCOPE["PrefillAdder"], SCOPE["RadixCache"], SCOPE["RadixKey"]
SCOPE["get_serving"] = lambda: types.SimpleNamespace(strip_thinking_cache=False)


class OutOfMemoryError(Exception):
    """No pages for a round."""


class Pages:
    """The allocator: tokens of free pages, and how many of `window_pages` are free.

    A request's pages follow from what it has allocated and what has left its window.
    """

    def __init__(self, num_pages: int, page: int, window_pages: int) -> None:
        self.page_size = page
        self.window_pages = window_pages
        self.requests: list[Request] = []
        self.device = "cpu"
        self.free = [page * n for n in range(num_pages)]
        self.tree: Any = None

    def available_size(self) -> int:
        return len(self.free) * self.page_size

    full_available_size = available_size

    @property
    def size_swa(self) -> int:
        return self.window_pages * self.page_size

    def swa_available_size(self) -> int:
        held = [req.kv for req in self.requests if req.kv.holds_kv]
        pages = sum(-(-kv.kv_allocated_len // self.page_size) - kv.evicted // self.page_size for kv in held)
        return (self.window_pages - pages) * self.page_size

    def free_swa_segment(self, slots: Any, start_pos: int = 0) -> None:
        pass

    def free_segment(self, slots: Any, start_pos: int = 0) -> None:
        self.free += sorted({int(slot) // self.page_size * self.page_size for slot in slots})

    def take(self, tokens: int) -> list[int]:
        """For this number of tokens, from a page's start."""
        pages = -(-tokens // self.page_size)
        if pages > len(self.free):
            self.tree.evict(SCOPE["EvictParams"](num_tokens=(pages - len(self.free)) * self.page_size))
        if pages > len(self.free):
            raise OutOfMemoryError("Prefill out of memory")
        taken, self.free = self.free[:pages], self.free[pages:]
        return [slot + i for slot in taken for i in range(self.page_size)][:tokens]

    def free_group_begin(self) -> None:
        pass

    def free_group_end(self) -> None:
        pass


class Kv(types.SimpleNamespace):
    """An allocation; in windowed layers without the first `evicted` tokens."""

    evicted = 0

    def get_evicted_seqlen(self, _: str) -> int:
        return self.evicted

    def set_evicted_seqlen(self, _: str, length: int) -> None:
        self.evicted = length

    def swa_dead_lo(self, _: int) -> int:
        return 0


class Request(SCOPE["Req"], SCOPE["ReqDllmMixin"]):
    """With what the mixin and the adder ask of SGLang's."""

    session = positional_embed_overrides = multimodal_inputs = lock = finished_reason = finished_len = None
    last_node = extra_key = cache_salt = priority = None
    return_logprob = retracted_stain = is_retracted = skip_radix_cache_insert = dllm_initialized = False
    extend_end = prefix_len = inflight_middle_chunks = host_hit_length = swa_host_hit_length = 0
    auxiliary_swa_host_hit_length = host_loaded_length = 0

    def __init__(self, index: int, asked: dict[str, Any], config: Any, row: Any) -> None:
        self.rid, self.index, self.asked, self.row = str(index), index, asked, row
        self.origin_input_ids, self.output_ids = array("q", asked["prompt"]), array("q")
        self.sampling_params = types.SimpleNamespace(
            max_new_tokens=asked["max_tokens"], ignore_eos=asked.get("ignore_eos", False)
        )
        self.full_untruncated_fill_ids = array("q")
        self.time_stats = types.SimpleNamespace(set_completion_time=lambda: None)
        self.kv = Kv(
            holds_kv=False, req_pool_idx=index, kv_allocated_len=0, cache_protected_len=0, cache_inserted_len=0,
            swa_evict_floor=0,
        )  # fmt: skip
        self.init_diffusion_llm(config)

    extend_len = property(lambda self: self.extend_end - self.prefix_len)
    seqlen = property(lambda self: len(self.origin_input_ids) + len(self.output_ids))

    def refresh_fill_ids(self) -> None:
        self.full_untruncated_fill_ids = self.origin_input_ids + self.output_ids

    def finished(self) -> bool:
        return self.finished_reason is not None

    def needs_host_load_back(self) -> bool:
        return False

    def update_finish_state(self, new_accepted_len: int = 0) -> None:
        """At the answer's end (EOS), or the limit."""
        if len(self.output_ids) >= self.asked["output"]:
            self.finished_reason, self.finished_len = "stop", self.asked["output"]


class Scheduler(SCOPE["SchedulerDllmMixin"]):
    """Reduced to dLLM rounds."""

    enable_priority_preemption = False
    truncation_align_size = None

    def __init__(self, settings: dict[str, Any], caching: bool, requests: int) -> None:
        gemma = settings["kind"] == "gemma"
        self.settings = settings
        self.dllm_config = types.SimpleNamespace(
            block_size=settings["block"], mask_id=MASK, max_running_requests=settings["most"],
            first_done_first_out_mode=settings["fdfo"], requires_separate_context_encoding=gemma,
        )  # fmt: skip
        self.dllm_manager = SCOPE["DllmManager"](self.dllm_config)
        self.waiting_queue: list[Request] = []
        self.window = settings.get("window", 0)
        self.pages = Pages(settings["num_pages"], settings["page"], settings.get("window_pages", 0))
        self.token_to_kv_pool_allocator = self.pages
        self.rows = torch.zeros((requests, 2 * LONGEST), dtype=torch.int64)
        self.req_to_token_pool = types.SimpleNamespace(req_to_token=self.rows, write=self.write)
        self.tree_cache = self.pages.tree = RadixCache(
            types.SimpleNamespace(
                disable=not caching, req_to_token_pool=self.req_to_token_pool, token_to_kv_pool_allocator=self.pages,
                page_size=settings["page"], is_eagle=False, eviction_policy="lru", enable_kv_cache_events=False,
                dynamo_kv_event_format=False, kv_event_lora_names=None, enable_metrics=False,
                eviction_policy_config=None,
            )
        )  # fmt: skip
        # Of a window of n tokens SGLang keeps n - 1.
        self.tree_cache.sliding_window_size = self.window - 1 if self.window else None
        self.metrics_reporter = types.SimpleNamespace(report_prefill_stats=lambda **_: None, num_generated_tokens=0)
        self.output_streamer = types.SimpleNamespace(stream_output=lambda *_: None)
        self.model_config = types.SimpleNamespace(context_len=1 << 30)
        self.running: set[int] = set()

    def write(self, where: Any, values: Any) -> None:
        self.rows[where] = values

    def get_num_allocatable_reqs(self, _: int, num_held_rows: int = 0) -> int:
        return int(self.settings["most"]) - len(self.running) + num_held_rows

    def stash_chunked_request(self, req: Request) -> None:
        self.tree_cache.checkpoint(req, up_to=req.extend_end)
        req.prefix_len = req.extend_end

    def _stash_dllm_context(self, req: Request) -> None:
        page, context = self.settings["page"], req.dllm_block_offset
        first = -(-context // page) * page
        if first < req.kv.kv_allocated_len:
            self.pages.free_segment(self.rows[req.index, first : req.kv.kv_allocated_len])
        req.kv.kv_allocated_len = req.extend_end = context
        self.stash_chunked_request(req)

    def adder(self) -> Any:
        adder = PrefillAdder()
        adder.dllm_config, adder.page_size, adder.tree_cache = self.dllm_config, self.pages.page_size, self.tree_cache
        adder.rem_input_tokens = self.settings["max_prefill"]
        # Only DiffusionGemma switches chunked prefill off.
        adder.rem_chunk_tokens = None if self.settings["kind"] == "gemma" else 1 << 30
        budget = SCOPE["SWAPrefillBudget" if self.window else "PrefillBudget"]
        adder.memory_budget = budget(self.pages, self.tree_cache)
        adder.can_run_list, adder.preempt_list, adder.new_chunked_req = [], [], None
        adder.req_states = adder.running_batch = None
        adder.is_hybrid_swa, adder.exact_chunk_fill = self.window > 0, False
        adder._mamba_slot_cost, adder.rem_mamba_slots, adder.per_req_token_overhead = 0, None, self.pages.page_size
        adder.prefill_max_requests = adder.prefill_delayer_single_pass = adder.kv_shard_scratch_spec = None
        adder.log_hit_tokens = adder.log_input_tokens = adder.log_replay_tokens = 0
        adder._mamba_gap_budget_for_req = lambda *_, **__: 0
        adder._request_slot_reserve_for_req = lambda *_, **__: 0
        adder._check_prefill_tile_budget = lambda *_: None
        adder._account_prefill_cache_admission = lambda *_: None
        adder._defer_staged_for_capacity_if_idle = lambda *_, **__: None
        adder._init_dllm_meta(self.dllm_config)
        return adder

    def allocate(self, rows: list[Request]) -> None:
        """alloc_for_extend."""
        if self.window:  # maybe_evict_swa
            for req in rows:
                SCOPE["free_swa_out_of_window_slots"](
                    req, req.prefix_len, sliding_window_size=self.window - 1, page_size=self.pages.page_size,
                    req_to_token_pool=self.req_to_token_pool, token_to_kv_pool_allocator=self.pages,
                    supports_prefix_sharing=False,
                )  # fmt: skip
        for req in rows:
            row = self.rows[req.index]
            if not req.kv.holds_kv or req.kv.kv_allocated_len < req.prefix_len:
                path = self.tree_cache.path_device_indices(req.last_node) if req.prefix_len else []
                row[: req.prefix_len] = torch.as_tensor(path)[: req.prefix_len]
                req.kv.kv_allocated_len = req.prefix_len
            start = req.kv.kv_allocated_len
            if not req.dllm_incomplete_ids and req.extend_end > start:
                page = self.pages.page_size
                whole = -(-start // page) * page  # the rest of the last page is there
                last = int(row[start - 1]) if start else 0
                old = list(range(last + 1, last + 1 + min(whole, req.extend_end) - start))
                row[start : req.extend_end] = torch.tensor(old + self.pages.take(max(0, req.extend_end - whole)))
                req.kv.kv_allocated_len = req.extend_end
            req.kv.holds_kv = True
            if self.window and self.pages.swa_available_size() < 0:
                raise OutOfMemoryError("Prefill out of memory")
            self.running.add(req.index)

    def release(self, req: Request, _: Any, checkpoint: bool = True) -> None:
        """release_kv_cache."""
        owned = min(req.kv.kv_allocated_len, len(req.origin_input_ids) + (req.finished_len or len(req.output_ids)))
        if checkpoint:
            req.refresh_fill_ids()
            self.tree_cache.checkpoint(req, up_to=owned)
        first = -(-req.kv.cache_protected_len // self.pages.page_size) * self.pages.page_size
        self.pages.free_segment(self.rows[req.index, first : req.kv.kv_allocated_len])
        self.tree_cache.unlock(req.lock)
        req.lock, req.kv.holds_kv = None, False
        self.running.discard(req.index)


def match(req: Request, tree: Any, tokens: Any, *, cow_mamba: bool = False, max_prefix_len: int | None = None) -> Any:
    """match_kv_cache."""
    key = RadixKey(token_ids=tokens, extra_key=None, limit=max_prefix_len, cache_salt=None)
    found = tree.match_prefix(SCOPE["MatchPrefixParams"](key=key))
    req.prefix_len, req.last_node = found.device_prefix_len, found.last_device_node
    return types.SimpleNamespace(mamba_branching_seqlen=None, cache_protected_len=None)


SCOPE["match_kv_cache"] = match


class Model(SCOPE["DllmAlgorithm"]):
    """The algorithm's loop, on a model that unmasks as the scenario says."""

    mask_id = MASK
    threshold = 0.95
    reuse_forward_metadata = False

    def __init__(self, settings: dict[str, Any], asked: list[dict[str, Any]]) -> None:
        self.block_size, self.fdfo, self.kind = settings["block"], settings["fdfo"], settings["kind"]
        self.asked = asked
        self.starts: list[list[int]] = [[] for _ in asked]
        self.forwards = 0
        if self.kind == "low":
            self.step = types.MethodType(SCOPE["LowConfidence"].step, self)

    def init_step_state(self, batch: Any) -> list[dict[str, int]]:
        return [{"steps": 0} for _ in range(batch.batch_size)]

    def max_steps(self, _: Any) -> int:
        return 1000

    def _block_start_list(self, batch: Any) -> Any:
        return [0] * batch.batch_size if self.kind == "gemma" else super()._block_start_list(batch)

    def step(self, batch: Any, _: Any, states: list[dict[str, int]]) -> list[bool]:
        """Editing: a block ends after the scenario's number of steps."""
        ids, done = batch.input_ids.view(batch.batch_size, self.block_size), []
        for i, req in enumerate(batch.reqs):
            if req.is_dllm_prefill():
                done.append(True)
                continue
            states[i]["steps"] += 1
            done.append(states[i]["steps"] >= self.asked[req.index]["steps"][self.block(req)])
            if done[-1]:
                ids[i][ids[i] == (UNKNOWN if self.kind == "gemma" else MASK)] = SAMPLED
        return done

    def block(self, req: Request) -> int:
        """From 0."""
        starts = self.starts[req.index]
        if req.prefix_len not in starts:
            starts.append(req.prefix_len)
        return starts.index(req.prefix_len)


class Runner:
    """A round's forwards, each a step of the recording."""

    def __init__(self, model: Model, rows: list[Request], steps: list[dict[str, Any]], step: dict[str, Any]) -> None:
        self.model, self.rows, self.steps, self.step = model, rows, steps, step

    def forward(self, batch: Any, pp_proxy_tensors: Any = None) -> Any:
        self.steps.append(self.step)
        self.step = {**self.step, "start": self.step["start"] + 1}
        block = self.model.block_size
        blocks, logits = batch.input_ids.view(len(self.rows), block), torch.zeros(len(self.rows), block, 3)
        logits[:, :, SAMPLED] = 1.0
        if self.model.kind == "low":
            for i, req in enumerate(self.rows):
                masks = (blocks[i] == MASK).nonzero()[:, 0]
                if len(masks) and not req.is_dllm_prefill():
                    sure = masks[: req.asked["unmasked"][self.model.block(req)]]
                    logits[i, sure, SAMPLED] = 19.0
        return types.SimpleNamespace(
            logits_output=types.SimpleNamespace(full_logits=logits.view(-1, 3)), can_run_graph=False
        )


def record(scenario: dict[str, Any]) -> dict[str, Any]:
    settings, asked = scenario["settings"], scenario["requests"]
    scheduler = Scheduler(settings, scenario["caching"], len(asked))
    SCOPE["release_kv_cache"] = scheduler.release
    algorithm = Model(settings, asked)
    now, submitted, idle, steps, tokens = 0.0, 0, 0, [], []
    had = [0] * len(asked)
    result = {"steps": steps, "tokens": tokens, "any_order": True}
    while len(steps) < MOST_STEPS:
        while submitted < len(asked) and asked[submitted]["arrival"] <= now:
            req = Request(submitted, asked[submitted], scheduler.dllm_config, scheduler.rows[submitted])
            scheduler.waiting_queue.append(req)
            scheduler.pages.requests.append(req)
            submitted += 1
        manager = scheduler.dllm_manager
        manager.filter_finished_reqs()
        if not scheduler.waiting_queue and manager.is_empty():
            if submitted == len(asked):
                return result
            now = max(now, asked[submitted]["arrival"])
            continue
        for req in manager.staging_queue:
            scheduler.finish_dllm_forward(req)
        adder = scheduler.adder()
        manager.init_next_round()
        scheduler._fetch_waiting_reqs()
        batch = types.SimpleNamespace(reqs=[], batch_is_full=False)
        mode = scheduler._process_dllm_batches(adder, running_batch=batch)
        rows = adder.can_run_list
        if not rows:
            idle += 1
            if idle > 2:
                return {**result, "ended": f"nothing can run at {now:g}"}
            continue
        idle = 0
        manager.add_staging_reqs(rows)
        try:
            scheduler.allocate(rows)
        except OutOfMemoryError as error:
            return {**result, "ended": str(error)}
        prefill = all(req.is_dllm_prefill() for req in rows)
        shown = [[req.index, req.extend_len, req.prefix_len] for req in rows]
        begun, step = len(steps), {"start": now, "prefill": prefill, "rows": shown}
        state, outputs = [req.dllm_algo_state for req in rows], ([], None, None)
        if mode == Mode.EXTEND:
            steps.append(step)
        else:
            ids = torch.cat([torch.tensor(r.full_untruncated_fill_ids[r.prefix_len : r.extend_end]) for r in rows])
            forward = types.SimpleNamespace(
                batch_size=len(rows), input_ids=ids, dllm_prompt_mask=None, reqs=rows,
                mark_forward_metadata_ready=lambda **_: None,
            )  # fmt: skip

            states = state if any(one is not None for one in state) else None
            try:
                _, found, accepted, after, _ = algorithm.run(Runner(algorithm, rows, steps, step), forward, states)
            except RuntimeError as error:  # the pool cut a block
                del steps[begun:]
                return {**result, "ended": str(error)}
            for req, ids in zip(rows, found, strict=False):
                for i in range(len(ids)):  # whatever was sampled
                    at = req.extend_end - len(ids) + i - len(req.origin_input_ids)
                    if at >= 0 and ids[i] == SAMPLED:
                        ids[i] = OUTPUT + 10**5 * req.index + at
            outputs = found, accepted, after
        now += len(steps) - begun
        scheduler.process_batch_result_dllm(
            types.SimpleNamespace(
                forward_mode=types.SimpleNamespace(is_dllm_extend=lambda mode=mode: mode == Mode.DLLM_EXTEND),
                prefill_stats=None, dp_cooperation_info=None, reqs=rows, batch_size=lambda rows=rows: len(rows),
                return_logprob=False,
            ),
            types.SimpleNamespace(
                copy_done=None, next_token_ids=outputs[0], accept_length_per_req_cpu=outputs[1],
                dllm_algo_state=outputs[2], can_run_cuda_graph=False,
            ),
        )  # fmt: skip
        for req in rows:
            has = min(len(req.output_ids), req.asked["output"])
            if has > had[req.index]:
                tokens.append([req.index, now, has - had[req.index]])
                had[req.index] = has
    return {**result, "error": f"more than {MOST_STEPS} steps"}


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
