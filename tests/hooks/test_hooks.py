"""The hooks around stand-ins for the engines: objects with the names that the engines' sources have, and no engine."""

import asyncio
import importlib
import json
import sys
import time
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import dsim
from dsim.engine.errors import ProfileError
from dsim.engine.latency import Features
from dsim.profiler.logged import PHASES
from dsim.profiler.models import model
from dsim.profiler.steplog import StepLog, policy_of, profile_of_log, read_log

torch = pytest.importorskip("torch")

Bag = types.SimpleNamespace
HOOKS = Path(dsim.__file__).parent / "hooks"
CONFIG = Bag(
    architectures=["Qwen3ForCausalLM"], num_hidden_layers=2, hidden_size=64, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, intermediate_size=128, vocab_size=256, max_position_embeddings=512,
    tie_word_embeddings=False, name_or_path="owner/tiny",
)  # fmt: skip
Hook = Callable[[str], Any]


@pytest.fixture
def hook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hook]:
    """A hook's module, fresh, with a log that is wanted."""
    monkeypatch.syspath_prepend(str(HOOKS))
    monkeypatch.setenv("DSIM_STEPLOG", str(tmp_path / "steps.jsonl"))
    monkeypatch.setenv("DSIM_STEPLOG_SKIP", "0")
    monkeypatch.delenv("DSIM_STEPLOG_SIGNAL", raising=False)
    yield lambda name: importlib.import_module(f"dsim_hooks.{name}")
    for name in [n for n in sys.modules if n.startswith("dsim_hooks")]:
        del sys.modules[name]


def modules(monkeypatch: pytest.MonkeyPatch, **found: Any) -> None:
    """Modules of an engine: dots are double underscores."""
    for name, values in found.items():
        module = types.ModuleType(name.replace("__", "."))
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, module.__name__, module)


def lines_of(tmp_path: Path) -> list[Any]:
    return [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]


def read(tmp_path: Path) -> tuple[StepLog, list[Any]]:
    """The log as dsim reads it, and its lines; a column of which all rows have the same is spelt out."""
    lines = lines_of(tmp_path)
    for line in lines:
        for name in ("phases", "row_tokens", "emitted"):
            if line.get("kind") == "step" and not isinstance(line[name], list):
                line[name] = [line[name]] * line["batch"]
    return read_log(tmp_path / "steps.jsonl"), lines


def test_nothing_is_hooked_where_no_log_is_asked_for(hook: Hook, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DSIM_STEPLOG")
    hook("vllm").register()  # it would import vllm
    hook("sglang").register()
    hook("lmdeploy").patch()


def test_requests_and_steps_while_nothing_is_logged_leave_no_line(
    hook: Hook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSIM_STEPLOG_SKIP", "1")
    log = hook("log").StepLog(tmp_path / "steps.jsonl", {"synthetic": True, "engine": "x", "device": "d"})
    log.request("warm", 4)
    log.step(0.0, 0.1, [("warm", "prefill", 4, 4, 1)])
    log.request("a", 8, 2)
    log.step(0.1, 0.1, [("warm", "decode", 1, 5, 1), ("a", "prefill", 8, 8, 1)])  # of one that is not known
    log.step(0.2, 0.1, [("a", "decode", 1, 9, 1)])
    log.finished("a")
    log.close()
    lines = lines_of(tmp_path)
    assert [line.get("kind") for line in lines] == [None, "request", "step", "finish"]
    assert lines[2]["step"] == 3


def test_a_step_that_cannot_be_read_is_left_out_with_its_requests_and_said_once(
    hook: Hook, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    log = hook("log").StepLog(tmp_path / "steps.jsonl", {"synthetic": True})
    log.request("a", 4)
    with log.step_left_out():
        raise ValueError("another")
    log.step(0.3, 0.1, [("a", "decode", 1, 5, 1)])  # how many tokens it has by now is not known
    log.finished("a")
    log.request("b", 4)
    log.step_later(0.4, 0.1, lambda: 1 // 0)
    log.close()
    assert log.on
    assert capfd.readouterr().err == (
        "dsim-hooks: the step log leaves out a step and the requests in flight: ValueError: another\n"
    )
    assert [line.get("kind") for line in lines_of(tmp_path)] == [None, "request", "request"]  # None: the header


def test_a_log_that_cannot_be_written_ends_and_says_so(
    hook: Hook, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    log = hook("log").StepLog(tmp_path / "steps.jsonl", {"synthetic": True})

    class Full:
        def writelines(self, lines: Any) -> None:
            raise OSError(28, "No space left on device")

    log._file = Full()
    log.request("a", 4)
    log.close()
    assert not log.on
    log.step(0.0, 0.1, [("a", "prefill", 4, 4, 1)])
    log.finished("a")
    assert log._lines.get() is None  # that of `close`: nothing gathers
    assert log._lines.empty()
    assert capfd.readouterr().err == (
        "dsim-hooks: the step log leaves out all that comes: OSError: [Errno 28] No space left on device\n"
    )


class Gemma(Bag):
    """A configuration as transformers has it where layers differ: `to_dict` states the value of each."""

    def to_dict(self) -> dict[str, Any]:
        about = {"architectures": ["DiffusionGemmaForBlockDiffusion"], "id2label": {0: "x"}, "_name_or_path": "/home/x"}
        return {**about, "text_config": vars(self.text_config)}


GEMMA = {
    "num_hidden_layers": 30, "hidden_size": 2816, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256,
    "intermediate_size": 2112, "vocab_size": 262144, "max_position_embeddings": 262144, "tie_word_embeddings": True,
    "sliding_window": 1024, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704,
    "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 5,
    "per_layer_config": {f"{i:02}": {"num_key_value_heads": 2, "head_dim": 512} for i in range(5, 30, 6)},
}  # fmt: skip


def test_a_model_whose_layers_differ_has_the_shape_that_dsim_knows(hook: Hook, tmp_path: Path) -> None:
    config = hook("log").config_of(Gemma(text_config=Bag(**GEMMA)))
    assert config.keys() == {"architectures", "text_config"}
    path = tmp_path / "DiffusionGemma-26B-A4B.json"
    path.write_text(text := json.dumps(config))
    assert model(str(path)) == model(path.stem)
    path.write_text(text.replace('"05"', '"04"'))
    with pytest.raises(ProfileError, match="expected num_key_value_heads and head_dim, alike in layers of full_att"):
        model(str(path))


def test_an_unreadable_configuration_is_left_out_in_one_line(hook: Hook, capfd: pytest.CaptureFixture[str]) -> None:
    log = hook("log")
    assert log.readable({"model": lambda: log.config_of(Bag(to_dict=lambda: {}["layers"]))}) == {}
    assert capfd.readouterr().err == "dsim-hooks: the step log leaves out model: KeyError: 'layers'\n"


@pytest.mark.parametrize("engine", ["vllm", "sglang", "lmdeploy"])
def test_an_engine_of_another_release_runs_without_a_log(
    hook: Hook, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], engine: str
) -> None:
    monkeypatch.setitem(sys.modules, engine, types.ModuleType(engine))  # it has none of the modules
    module = hook(engine)
    (module.patch if engine == "lmdeploy" else module.register)()
    assert capfd.readouterr().err.startswith("dsim-hooks: the step log leaves out everything: ModuleNotFoundError: ")


def vllm_config(model: dict[str, Any], cache: dict[str, Any], **scheduler: Any) -> Any:
    """What vLLM was started with."""
    return Bag(
        model_config=Bag(served_model_name=["tiny"], enforce_eager=True, dtype="torch.bfloat16", **model),
        cache_config=Bag(enable_prefix_caching=False, **cache),
        scheduler_config=Bag(**scheduler),
        parallel_config=Bag(tensor_parallel_size=1),
    )


def test_vllms_steps_are_its_schedulers(hook: Hook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Scheduler:
        """Runs the whole prompt of whoever waits, then a token each."""

        def __init__(self) -> None:
            self.requests: dict[str, Any] = {}
            self.waiting: list[str] = []
            self.running: list[str] = []

        def schedule(self, throttle: bool = False) -> Any:
            tokens = {}
            for name in self.waiting + self.running:
                request = self.requests[name]
                n = max(1, request.num_prompt_tokens - request.num_computed_tokens)
                tokens[name] = n
                request.num_computed_tokens += n
            self.running, self.waiting = self.running + self.waiting, []
            return Bag(
                num_scheduled_tokens=tokens, total_num_scheduled_tokens=sum(tokens.values()),
                scheduled_spec_decode_tokens={},
            )  # fmt: skip

        def update_from_output(self, output: Any, model_output: Any) -> Any:
            outputs = []
            for name in output.num_scheduled_tokens:
                request = self.requests[name]
                request.left -= 1
                over = None if request.left else "length"
                outputs.append(Bag(request_id=name, new_token_ids=[7], finish_reason=over))
                if over:
                    self.running.remove(name)
            return {0: Bag(outputs=outputs)}

        def has_requests(self) -> bool:
            return bool(self.waiting or self.running)

    class EngineCore:
        def __init__(self, vllm_config: Any) -> None:
            self.vllm_config = vllm_config
            self.scheduler = Scheduler()
            self.model_executor = object()

        def add_request(self, request: Any) -> None:
            self.scheduler.requests[request.request_id] = request
            self.scheduler.waiting.append(request.request_id)

        def step(self) -> None:
            output = self.scheduler.schedule(False)
            self.scheduler.update_from_output(output, Bag(cudagraph_stats=None))

    modules(monkeypatch, vllm={"__version__": "0.32.0"}, vllm__v1={}, vllm__v1__engine={},
            vllm__v1__engine__core={"EngineCore": EngineCore})  # fmt: skip
    vllm = hook("vllm")
    vllm.register()
    vllm.register()  # vLLM may load a plug-in more than once
    cache = {"block_size": 16, "num_gpu_blocks": 100}
    config = vllm_config({"hf_config": CONFIG, "max_model_len": 256}, cache, max_num_seqs=4, max_num_batched_tokens=64)
    config.speculative_config = Bag(
        method="dflash",
        num_speculative_tokens=7,
        enable_adaptive_verification=False,
        draft_model_config=Bag(hf_config=Bag(architectures=["DFlashDraftModel"])),
    )
    engine = EngineCore(config)

    def add(name: str, prompt: int, output: int, extra: dict[str, int] | None = None) -> None:
        engine.add_request(
            Bag(
                request_id=name, num_prompt_tokens=prompt, num_computed_tokens=0, left=output, arrival_time=time.time(),
                sampling_params=Bag(max_tokens=output, extra_args=extra),
            )
        )  # fmt: skip

    add("a", 5, 3, {"diffusion_max_steps": 4, "else": 1})
    engine.step()
    add("b", 4, 1)
    engine.step()
    engine.step()
    vllm._HOOKED[engine].log.close()
    log, lines = read(tmp_path)
    steps, asked = ([line for line in lines if line.get("kind") == kind] for kind in ("step", "request"))
    assert [line.get("diffusion_max_steps") for line in asked] == [4, None]
    assert [s["phases"] for s in steps] == [["prefill"], ["prefill", "decode"], ["decode"]]
    assert [s["row_tokens"] for s in steps] == [[5], [4, 1], [1]]
    assert [s["row_keys"] for s in steps] == [[5], [4, 6], [7]]
    # A prompt's tokens see what is before them: 1 + 2 + .. + 5.
    assert [s["sum_q_kv"] for s in steps] == [15, 16, 7]
    assert [s["prefill_tokens"] for s in steps] == [5, 4, 0]
    assert (log.header.preset, log.header.model.name, log.header.model.context_limit) == ("vllm-ar", "tiny", 256)
    spec, others = policy_of(log.header)
    assert (
        spec == "vllm-ar,max_num_seqs=4,max_num_batched_tokens=64,drafter=dflash,num_speculative_tokens=7,num_pages=99"
    )
    drafting = {name: log.header.settings[name] for name in others if "draft" in name or "verif" in name}
    assert drafting == {"draft_architecture": "DFlashDraftModel"}
    r = log.requests
    assert r.num_tokens.tolist() == r.output_length.tolist() == [3, 1]
    assert (r.finish >= r.last_emission).all()
    # One step ends where the next begins while there is work.
    assert steps[1]["start"] == pytest.approx(steps[0]["start"] + steps[0]["latency"])


MASK = 99


class LowConfidence:
    """Settles the first mask of each block, and is done when it sees none."""

    block_size, mask_id = 4, MASK

    def __init__(self, fdfo: bool) -> None:
        self.fdfo = fdfo

    def step(self, forward_batch: Any, logits: Any, states: Any) -> list[bool]:
        ids = forward_batch.input_ids.view(-1, 4)
        done = (ids == MASK).sum(dim=1) == 0
        for row in ids:
            left = (row == MASK).nonzero().flatten()
            if len(left):
                row[left[0]] = 1
        return done.tolist()

    def run(self, runner: Any, forward: Any, states: Any = None) -> list[bool]:
        if not self.fdfo:
            while not all(self.step(forward, None, None)):
                pass
            return [True] * forward.batch_size
        return self.step(forward, None, None)


class Asked(Bag):
    def finished(self) -> bool:
        return bool(self.over)

    def is_dllm_prefill(self) -> bool:
        return bool(self.prefill)


def sglang_scheduler(algorithm: str, fdfo: bool, rows: int) -> Any:
    return Bag(
        waiting_queue=[], dllm_manager=Bag(waiting_queue=[]), page_size=4, tp_size=1,
        max_total_num_tokens=400, chunked_prefill_size=64, max_prefill_tokens=1024,
        server_args=Bag(served_model_name="m", model_path="m"),
        model_config=Bag(hf_config=CONFIG, context_len=512),
        dllm_config=Bag(
            algorithm=algorithm, algorithm_config={"threshold": 0.9}, block_size=4,
            first_done_first_out_mode=fdfo, max_running_requests=rows,
        ),
    )  # fmt: skip


@pytest.mark.parametrize("fdfo", [False, True])
def test_sglangs_forwards_are_steps_whether_a_batch_runs_one_or_several(
    hook: Hook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fdfo: bool
) -> None:
    modules(monkeypatch, sglang={"__version__": "0.5.23"})
    sglang = hook("sglang")
    reqs = [Asked(rid=name, output_ids=[], finished_len=None, over=False, prefill=False) for name in "ab"]
    scheduler = sglang_scheduler("LowConfidence", fdfo, 8)
    scheduler.dllm_manager.waiting_queue = reqs
    for name, prompt in (("a", 2), ("b", 7)):
        asked = Bag(rid=name, input_ids=[0] * prompt, sampling_params=Bag(max_new_tokens=2))
        sglang.around_request(lambda *a, **k: None, scheduler, asked)

    class Algorithm(LowConfidence):
        """A class that nobody has hooked yet."""

    algorithm = Algorithm(fdfo)

    def serve(ids: list[int], rows: list[Any], past: list[int]) -> None:
        batch = Bag(
            reqs=rows, is_dllm=lambda: True, forward_mode=Bag(is_extend=lambda: True),
            extend_lens=[4] * len(rows), prefix_lens=past,
        )  # fmt: skip
        forward = Bag(
            input_ids=torch.tensor(ids), batch_size=len(rows), dllm_prompt_mask=None, rids=[r.rid for r in rows],
            extend_prefix_lens_cpu=past,
        )  # fmt: skip

        def ended(s: Any, b: Any, done: list[bool]) -> None:
            for req, last, begin in zip(rows, done, past, strict=True):
                prompt = 2 if req.rid == "a" else 7
                if last and not req.over and begin + 4 > prompt:
                    req.output_ids += [1] * (begin + 4 - prompt)
                    req.over = True

        over = False
        while not over:
            result = sglang.around_run(
                lambda s, b: sglang.around_blocks(Algorithm.run, algorithm, None, forward), scheduler, batch
            )
            over = all(result)
            sglang.around_result(ended, scheduler, batch, result)

    reqs[1].prefill = True
    serve([6, 6, 6, 6], reqs[1:], [0])  # b's first block is all prompt
    reqs[1].prefill = False
    serve([5, 5, MASK, MASK, 6, 6, 6, MASK], reqs, [0, 4])
    sglang._STATE["log"].close()
    log, lines = read(tmp_path)
    steps = [line for line in lines if line.get("kind") == "step"]
    told = [["prefill"], ["denoise", "denoise"], ["denoise", "flush"], ["flush", "flush"]]
    assert [s["phases"] for s in steps] == told
    assert [s["row_keys"] for s in steps] == [[4], [4, 8], [4, 8], [4, 8]]
    # One whose block is done first leaves first where each batch runs one forward.
    assert [s["emitted"] for s in steps] == [[0], [0, 0], [0, 1 if fdfo else 0], [2, 0 if fdfo else 1]]
    assert [line["committed"] for line in lines if line.get("kind") == "sequence"] == [[2], [3], [3]]
    assert log.requests.num_tokens.tolist() == [2, 1]
    ended_first = next(line["request"] for line in lines if line.get("kind") == "finish")
    assert ended_first == (1 if fdfo else 0)
    preset = "sglang-fdfo" if fdfo else "sglang-sync"
    assert (log.header.preset, log.header.block_length, log.header.threshold) == (preset, 4, 0.9)
    assert (log.header.num_pages, log.header.settings["max_running_requests"]) == (100, 8)
    assert steps[1]["start"] == pytest.approx(steps[0]["start"] + steps[0]["latency"])


def test_lmdeploys_outputs_are_read_with_their_masks(
    hook: Hook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Agent:
        def __init__(self) -> None:
            self.model_config = Bag(hf_config=CONFIG)
            self.cache_config = Bag(block_size=64, num_gpu_blocks=0, max_batches=8)
            dllm = Bag(block_length=4, confidence_threshold=0.9)
            self.misc_config = Bag(dllm_config=dllm)
            self.dist_config = Bag(attn_tp=1)

        async def _async_model_forward(self, inputs: Any) -> str:
            return "out"

    class Unmasking:
        dllm_config = Bag(block_length=4)

        def __call__(self, logits: Any, ids: Any, tokens: Any, mask: Any) -> Any:
            mask[(mask == 0).nonzero().flatten()[:1]] = 1
            return mask, tokens

    class Session:
        def add_sequence(self, token_ids: Any, sampling_param: Any = None) -> Any:
            return Bag(seq_id=3, num_new_tokens=0, status=Bag(name="RUNNING"))

    class Loop:
        scheduler = Bag(has_unfinished=lambda: True)

        def _finish_forward_output(self, out: Any, running: Any, model_inputs: Any, delta: Any) -> None:
            running[0].num_new_tokens += out.new
            if out.new:
                running[0].status.name = "STOPPED"

    modules(
        monkeypatch, lmdeploy={"__version__": "0.18.0"}, lmdeploy__pytorch={}, lmdeploy__pytorch__engine={},
        lmdeploy__pytorch__engine__engine_loop={"EngineLoop": Loop}, lmdeploy__pytorch__engine__model_agent={},
        lmdeploy__pytorch__engine__model_agent__agent={"BaseModelAgent": Agent},
        lmdeploy__pytorch__messages={"SchedulerSession": Session}, lmdeploy__pytorch__strategies={},
        lmdeploy__pytorch__strategies__dllm={},
        lmdeploy__pytorch__strategies__dllm__unmasking={"UnmaskingProcessor": Unmasking},
    )  # fmt: skip
    lmdeploy = hook("lmdeploy")
    lmdeploy.patch()
    lmdeploy.patch()
    agent, loop, unmask = Agent(), Loop(), Unmasking()
    seq = Session().add_sequence([1] * 6, Bag(max_new_tokens=2))
    mask = torch.tensor([2, 2, 0, 0])
    for decoding, length, history, new in ((False, 8, 0, 0), (True, 4, 4, 2)):
        inputs = Bag(
            is_dummy=False, is_decoding=decoding, seq_length=torch.tensor([length]),
            history_lengths=torch.tensor([history]),
        )  # fmt: skip
        assert asyncio.run(agent._async_model_forward(inputs)) == "out"
        unmask(None, None, None, mask)
        loop._finish_forward_output(Bag(next_token_ids=[0], new=new), [seq], None, None)
    lmdeploy._STATE["log"].close()
    log, lines = read(tmp_path)
    steps = [line for line in lines if line.get("kind") == "step"]
    assert [(s["phases"], s["row_tokens"], s["row_keys"], s["emitted"]) for s in steps] == [
        (["prefill"], [8], [8], [0]), (["denoise"], [4], [8], [2]),
    ]  # fmt: skip
    assert [line["committed"] for line in lines if line.get("kind") == "sequence"] == [[2], [3]]
    assert log.commits.committed.astype(int).tolist() == [[0, 0, 1, 0], [0, 0, 0, 1]]
    assert log.requests.num_tokens.tolist() == [2]
    assert (log.header.preset, log.header.page_size) == ("lmdeploy-0.18", 64)


# vllm_diffusion.jsonl is what benchmarks/vllm_diffusion/record_canvases.py recorded on 2026-11-23 of vLLM 0.32's
# diffusion engine and of its runner's batches: a random DiffusionGemma of six layers and canvases of 64 tokens,
# asynchronous scheduling, a budget of 256 tokens and 39 blocks of 128, so that requests are preempted. A line is a
# request, a schedule (name, tokens, tokens that count as computed, whether it is a canvas, of each row; then the keys
# and the rows of logits of the runner's own batch) or an update (name, tokens handed out, whether it is over).
HEAD, *EVENTS = map(json.loads, Path(__file__).with_name("vllm_diffusion.jsonl").read_text().splitlines())
PAIRS, KEYS, HEADS, SAMPLED = map(Features._fields.index, ("sum_q_kv", "sum_kv", "head_rows", "sampled_rows"))
DENOISE, FLUSH = PHASES.index("denoise"), PHASES.index("flush")
SCHEDULES = [event for event in EVENTS if "schedule" in event]


class Recorded:
    """vLLM's scheduler, as it was."""

    def __init__(self, groups: Sequence[Sequence[Any]]) -> None:
        groups = [
            Bag(layer_names=["layer"] * layers, kv_cache_spec=Bag(block_size=size, sliding_window=window))
            for layers, window, size in groups
        ]
        self.kv_cache_config = Bag(kv_cache_groups=groups)
        self.kv_cache_manager = Bag(
            block_pool=Bag(num_gpu_blocks=HEAD["blocks"], get_num_free_blocks=lambda: self.free)
        )
        self.requests: dict[str, Any] = {}
        self.waiting, self.running = range(0), range(0)
        self.free, self.left = 0, True
        self.coming: dict[str, Any] = {}

    def schedule(self) -> Any:
        rows = self.coming["schedule"]
        for name, _, computed, _ in rows:
            self.requests[name] = Bag(num_computed_tokens=computed)
        self.waiting, self.running = range(self.coming["waiting"]), range(self.coming["running"])
        self.free = self.coming["free"]
        return Bag(
            num_scheduled_tokens={name: n for name, n, *_ in rows},
            total_num_scheduled_tokens=sum(n for _, n, *_ in rows),
            scheduled_spec_decode_tokens={name: [-1] * n for name, n, _, canvas in rows if canvas},
        )

    def update_from_output(self, output: Any, model_output: Any) -> Any:
        self.left = self.coming["left"]
        outputs = [
            Bag(request_id=name, new_token_ids=[7] * num, finish_reason="length" if over else None)
            for name, num, over in self.coming["update"]
        ]
        return {0: Bag(outputs=outputs)}

    def has_requests(self) -> bool:
        return self.left


@pytest.fixture
def log(hook: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StepLog:
    """The hook's log of the run."""
    return _logged(hook, tmp_path, monkeypatch)


def _logged(
    hook: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: int = 1, groups: Any = HEAD["groups"]
) -> StepLog:
    """The run's log, had the model so many layers that see all tokens before theirs, in such groups of the pool."""
    modules(monkeypatch, vllm={"__version__": "0.32.0"})
    kinds = ["sliding_attention"] * (6 - full) + ["full_attention"] * full
    about = GEMMA | {
        "num_hidden_layers": 6, "hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 512,
        "vocab_size": 2048, "sliding_window": 256, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 128,
        "layer_types": kinds, "num_key_value_heads": 2, "head_dim": 64,
        "per_layer_config": {str(i): {"num_key_value_heads": 1, "head_dim": 128} for i in range(6 - full, 6)},
    }  # fmt: skip
    text = Gemma(text_config=Bag(**about), canvas_length=64)
    cache = {"block_size": 128, "num_gpu_blocks": HEAD["blocks"], "prefix_cache_retention_interval": 0}
    model = {"hf_config": text, "max_model_len": 640, "is_diffusion": True}
    config = vllm_config(model, cache, max_num_seqs=6, max_num_batched_tokens=256, async_scheduling=True)

    class Engine(Bag):
        __hash__ = object.__hash__

    engine = Engine(scheduler=Recorded(groups), model_executor=None, vllm_config=config)
    recorded, hooks = engine.scheduler, hook("vllm").hook(engine, config)
    in_flight = []
    for event in EVENTS:
        recorded.coming = event
        if "request" in event:
            params = Bag(max_tokens=event["output"])
            request = Bag(
                request_id=event["request"], num_prompt_tokens=event["prompt"], sampling_params=params,
                arrival_time=time.time(),
            )  # fmt: skip
            hooks.request(request, None)
        elif "schedule" in event:
            in_flight.append(recorded.schedule())
        else:
            recorded.update_from_output(in_flight.pop(0), Bag(cudagraph_stats=None))
    hooks.log.close()
    return read_log(tmp_path / "steps.jsonl")


def test_the_log_has_the_keys_logits_and_tokens_of_the_engines_own_batch(log: StepLog) -> None:
    features = log.steps.features
    assert features[:, KEYS].tolist() == [sum(event["keys"]) for event in SCHEDULES]
    assert features[:, HEADS].tolist() == [sum(event["logits"]) for event in SCHEDULES]
    assert log.requests.num_tokens.tolist() == [event["output"] for event in EVENTS if "request" in event]


def test_only_canvases_that_are_denoised_are_sampled_and_see_themselves_whole(log: StepLog) -> None:
    r, found = log.rows, log.steps.features
    for i, event in enumerate(SCHEDULES):
        rows = slice(r.offsets[i], r.offsets[i + 1])
        phases, tokens = r.phase[rows].tolist(), r.tokens[rows].tolist()
        pairs = [n * keys if phase == DENOISE else n * (2 * keys - n + 1) // 2
                 for phase, n, keys in zip(phases, tokens, event["keys"], strict=True)]  # fmt: skip
        sampled = [n for phase, n in zip(phases, tokens, strict=True) if phase == DENOISE]
        assert (found[i, PAIRS], found[i, SAMPLED]) == (sum(pairs), sum(sampled))
        assert [phase in (DENOISE, FLUSH) for phase in phases] == [canvas for *_, canvas in event["schedule"]]


def test_a_block_of_the_pool_is_a_page_of_the_layers_that_see_all(log: StepLog) -> None:
    assert (log.header.page_size, log.header.num_pages) == (128, 39)
    assert log.rows.pages.tolist() == [39 - event["free"] for event in SCHEDULES]
    memory = profile_of_log(log, "tiny", "steps.jsonl").memory
    # Five layers with a window hold five times what the one without does.
    assert (memory.kv_bytes_per_token, memory.window_bytes_per_token) == (512, 5 * 512)
    assert policy_of(log.header)[0] == (
        "vllm-diffusion,max_num_seqs=6,max_num_batched_tokens=256,page_size=128,num_pages=39,canvas_length=64"
    )


def test_layers_that_see_all_and_fill_two_groups_take_two_blocks_a_page(
    hook: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = _logged(hook, tmp_path, monkeypatch, 2, [(1, None, 128)] * 2 + [(1, 256, 128)] * 4)
    assert (log.header.page_size, log.header.num_pages) == (128, round(39 / 2))
    assert log.rows.pages.tolist() == [round((39 - event["free"]) / 2) for event in SCHEDULES]
