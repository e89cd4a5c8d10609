"""DiffusionGemma, step by step: a tiny random one of transformers' own making, and its `generate`."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dsim.engine.commits import CanvasLaw, LawDraws
from dsim.engine.engine import Limits
from dsim.engine.latency import Features
from dsim.engine.spec import Policy, parse
from dsim.engine.step import Phase, StepOutcome, StepPlan
from dsim.live import canvas_forward as canvas_module
from dsim.live.canvas_forward import Canvas, CanvasCache, KeyedChance, accept
from dsim.live.canvas_graphs import GraphCanvasCache, padded
from dsim.live.canvas_model import CanvasModel, Renoise, canvas_config, read_canvas_model
from dsim.live.weights import source_of
from dsim.profiler.measure import LoadedCanvas, open_any, profile_model
from dsim.profiler.models import Windowed
from dsim.profiler.profile import Profile, load, save
from dsim.profiler.samples import Samples
from dsim.results.on_device import LiveSetting
from dsim.results.world import World
from dsim.serve.open import open_live

from .checkpoints import shaken
from .watched import Texts

pytestmark = pytest.mark.usefixtures("_budgets_of_processor_time")
CANVAS, VOCAB, WINDOW, PAGE = 8, 97, 12, 4
RULES = [Renoise(max_steps=4, entropy_bound=1.5), Renoise(max_steps=5, entropy_bound=1e-6, stability=0, confidence=3.0)]


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """transformers' model, of random weights, and where it saved itself."""
    transformers = pytest.importorskip("transformers")
    text = transformers.DiffusionGemmaTextConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, sliding_window=WINDOW, num_experts=4, top_k_experts=2,
        moe_intermediate_size=16, global_head_dim=16, num_global_key_value_heads=1, max_position_embeddings=256,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    )  # fmt: skip
    vision = transformers.Gemma4VisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        head_dim=8,
    )  # fmt: skip
    config = transformers.DiffusionGemmaConfig(text_config=text, vision_config=vision, canvas_length=CANVAS)
    torch.manual_seed(7)  # whatever ran before: whether an answer ends early depends on the weights
    model: Any = shaken(transformers.DiffusionGemmaForBlockDiffusion(config), 8)
    with torch.no_grad():
        model.model.decoder.embed_tokens.weight.mul_(0.3)  # logits of every size: the head is the embedding
        for i, name in enumerate(("decoder", "encoder.language_model")):
            for layer in model.model.get_submodule(name).layers:
                layer.layer_scalar.fill_(0.9 + 0.2 * i)
    folder = tmp_path_factory.mktemp("gemma")
    model.save_pretrained(folder, max_shard_size="60KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return model, folder


def cache_of(model: CanvasModel) -> CanvasCache:
    return CanvasCache(model, (20, 40), PAGE, "cpu", torch.float32)


class TorchsOwn:
    """The draws that transformers makes, from the same stream, where `multinomial` is the one below."""

    def noise(self, vocab: int) -> Any:
        return torch.randint(0, vocab, (1, CANVAS))[0].numpy()

    def uniform(self) -> Any:
        return torch.rand(CANVAS).double().numpy()


def multinomial(probabilities: Tensor, num_samples: int) -> Tensor:
    """A token of each row by its cumulative probabilities, of one number from the stream."""
    assert num_samples == 1
    reached = probabilities.double().cumsum(-1)
    return torch.searchsorted(reached, torch.rand(len(reached)).double()[:, None] * reached[:, -1:], right=True)


class Seen:
    """What `generate` tells a streamer: each step's logits, at its temperature, and each canvas."""

    _takes_logits = True

    def __init__(self) -> None:
        self.logits: list[Tensor] = []
        self.canvases: list[Tensor] = []

    def put_draft(self, logits: Tensor) -> None:
        self.logits.append(logits[0].clone())

    def put(self, value: Tensor) -> None:
        self.canvases.append(value[0].clone())

    def end(self) -> None:
        pass


@pytest.mark.parametrize("prompt", [3, 12, 30])
@pytest.mark.parametrize("rule", RULES)
def test_it_answers_as_generate_does_step_by_step(
    gemma: tuple[Any, Path], prompt: int, rule: Renoise, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, folder = gemma
    from transformers.models.diffusion_gemma.generation_diffusion_gemma import (
        DiffusionGemmaGenerationConfig,
        EntropyBoundSamplerConfig,
    )

    tokens = torch.arange(prompt) * 7 % VOCAB
    seen, canvases = Seen(), 3
    monkeypatch.setattr(torch, "multinomial", multinomial)
    torch.manual_seed(5)
    theirs.generate(
        input_ids=tokens[None], streamer=seen,
        generation_config=DiffusionGemmaGenerationConfig(
            max_new_tokens=canvases * CANVAS, max_denoising_steps=rule.max_steps, t_min=rule.t_min, t_max=rule.t_max,
            sampler_config=EntropyBoundSamplerConfig(rule.entropy_bound), stability_threshold=rule.stability,
            confidence_threshold=rule.confidence,
        ),
    )  # fmt: skip
    model = read_canvas_model(folder, "cpu", torch.float32)
    model.config = replace(model.config, renoise=rule)
    cache, chance = cache_of(model), TorchsOwn()
    torch.manual_seed(5)
    step = 0
    text = tokens
    for i in range(canvases):
        cache.encode({0: text})
        canvas = Canvas(chance)
        cache.begin(0, chance.noise(VOCAB))
        while not canvas.done:
            turn = canvas.turn(VOCAB, rule)
            # Before the temperature, which multiplies what rounding leaves.
            logits = seen.logits[step] * turn.temperature
            torch.testing.assert_close(model.logits(cache.states([0])[0]), logits, rtol=0, atol=1e-4)
            canvas.settle(cache.denoise({0: turn})[0], rule)
            step += 1
        text = torch.from_numpy(canvas.answer)
        assert text.tolist() == seen.canvases[1 + i].tolist()
    assert step == len(seen.logits)


def test_the_surest_are_accepted_until_what_is_surer_passes_the_bound() -> None:
    entropy = torch.tensor([0.3, 0.05, 0.2, 0.06])
    assert accept(entropy, 0.1).tolist() == [False, True, False, True]
    assert accept(entropy, 0.11).tolist() == [False, True, True, True]
    assert accept(entropy, 1e-9).tolist() == [False, True, False, False]


def test_the_checkpoints_own_rule_is_read(gemma: tuple[Any, Path], tmp_path: Path) -> None:
    config = canvas_config(source_of(str(gemma[1])))
    assert config.renoise == Renoise()
    assert [(layer.sliding, layer.kv_heads, layer.head_dim) for layer in config.layers[:2]] == [
        (True, 2, 8), (False, 1, 16),
    ]  # fmt: skip
    (tmp_path / "config.json").write_text((gemma[1] / "config.json").read_text())
    said = {"max_denoising_steps": 16, "sampler_config": {"entropy_bound": 0.2}, "eos_token_id": [1, 106]}
    (tmp_path / "generation_config.json").write_text(json.dumps(said))
    config = canvas_config(source_of(str(tmp_path)))
    assert (config.renoise, config.eos) == (Renoise(max_steps=16, entropy_bound=0.2), (1, 106))


LENGTHS = [(9, 11), (30, 16), (12, 3), (1, 20)]
EARLY = Renoise(max_steps=6, entropy_bound=1.5, stability=0, confidence=3.0)


def prompt_of(request: int, length: int) -> Any:
    return ((np.arange(length) + request) * 7 % VOCAB).astype(np.int32)


def alone(model: CanvasModel, request: int, prompt: int, output: int, eos: tuple[int, ...] = ()) -> list[int]:
    """The stand-alone loop: encode, denoise until done, encode what it became."""
    cache, text, rule = cache_of(model), prompt_of(request, prompt).tolist(), model.config.renoise
    cache.encode({0: torch.tensor(text)})
    for begin in range(prompt, prompt + output, CANVAS):
        chance = KeyedChance(3, request, begin, CANVAS)
        canvas = Canvas(chance)
        cache.begin(0, chance.noise(VOCAB))
        while not canvas.done:
            canvas.settle(cache.denoise({0: canvas.turn(VOCAB, rule)})[0], rule)
        text += canvas.answer.tolist()
        if eos and (ends := [p for p in range(begin, begin + CANVAS) if text[p] in eos]):
            return text[: min(ends[0] + 1, prompt + output)]
        cache.encode({0: torch.from_numpy(canvas.answer)})
    return text[: prompt + output]


def small(spec: str) -> Policy:
    return parse(f"{spec},canvas_length={CANVAS},page_size={PAGE}")


VLLM = "vllm-diffusion,max_num_batched_tokens=16,max_num_seqs=3"
EOS = tuple(range(0, VOCAB, 9))


class Watched(Texts):
    """An executor's answers, and whether it holds more pages than the engine accounts for."""

    def __init__(
        self, model: CanvasModel, policy: Policy, pages: int, eos: tuple[int, ...] = (), law: Any = None
    ) -> None:
        limits = Limits(pages, 256, policy.batching.max_batch or 4)
        self.steps: dict[int, int] = {}  # denoising steps of requests
        how = {"draws": law, "eos": eos, "seed": 3, "engine": {"eos": bool(eos)}}
        super().__init__(model, policy, LENGTHS, limits, prompt_of, **how)

    def step(self, plan: StepPlan) -> StepOutcome:
        outcome = self.executor.step(plan)
        full = self.forward.caches[False]
        assert plan.preempted or (plan.phases == Phase.IDLE).any() or full.num_pages - full.num_free <= plan.pages
        for i, request in enumerate(plan.requests.tolist()):
            self.steps[request] = self.steps.get(request, 0) + int(plan.phases[i] == Phase.DENOISE)
            if outcome.committed[i].any():
                ends = plan.end if outcome.ends is None else outcome.ends
                self.texts[request] = self.executor.text(request, int(plan.slots[i]), int(ends[i])).tolist()
        return outcome


@pytest.fixture(scope="module")
def early(gemma: tuple[Any, Path]) -> CanvasModel:
    model = read_canvas_model(gemma[1], "cpu", torch.float32)
    model.config = replace(model.config, renoise=EARLY)
    return model


@pytest.mark.parametrize(
    ("spec", "pages", "eos"),
    [("sglang-gemma", 200, ()), ("sglang-gemma:2", 14, EOS), (VLLM, 200, EOS), (VLLM, 16, ()), (VLLM, 16, EOS)],
)
def test_plans_answer_as_the_loop_alone_does(
    early: CanvasModel, spec: str, pages: int, eos: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(canvas_module, "LOGITS_BYTES", 2 * CANVAS * VOCAB * 4)  # those of two canvases
    rows: list[int] = []
    logits = early.raw_logits
    monkeypatch.setattr(early, "raw_logits", lambda hidden: rows.append(len(hidden)) or logits(hidden))
    watched = Watched(early, small(spec), pages, eos)
    monkeypatch.undo()
    assert set(rows) == {CANVAS, 2 * CANVAS}
    ended = 0
    for i, (p, o) in enumerate(LENGTHS):
        expected = alone(early, i, p, o, eos)
        assert watched.texts[i] == expected, i
        assert watched.done.table["num_tokens"][i] == len(expected) - p
        ended += len(expected) < p + o
    assert bool(ended) == bool(eos)
    assert bool(watched.done.engine.totals.preemptions) == (pages < 200)


def test_a_law_says_when_a_canvas_is_done(early: CanvasModel) -> None:
    law = LawDraws(CanvasLaw("", CANVAS, 3.0), 0, len(LENGTHS))
    watched = Watched(early, small("sglang-gemma"), 200, law=law)
    assert watched.steps == {i: 3 * -(-o // CANVAS) for i, (_, o) in enumerate(LENGTHS)}


def opened(folder: Path, rule: Renoise) -> LoadedCanvas:
    loaded: Any = open_any(str(folder), "cpu")
    loaded.model.config = replace(loaded.model.config, renoise=rule)
    return loaded  # type: ignore[no-any-return]


@pytest.fixture
def serving() -> Any:
    """Opens a server in a thread; a machine lent for its GPU may lack what a server needs."""
    for needed in ("starlette", "uvicorn"):
        pytest.importorskip(needed)
    from ..serve import serving

    return serving.serving


def test_clients_of_a_server_get_what_the_loop_alone_says(gemma: tuple[Any, Path], serving: Any) -> None:
    loaded = opened(gemma[1], EARLY)
    policy = f"sglang-gemma:2,canvas_length={CANVAS},page_size={PAGE}"
    with serving(open_live(loaded, World("", policy, seed=3))) as server:
        for i, (p, o) in enumerate(LENGTHS[:2]):
            said = server.complete(prompt=prompt_of(i, p).tolist(), max_tokens=o).json["choices"][0]["text"]
            assert list(said.encode()) == alone(loaded.model, i, p, o)[p:]
    assert server.totals is not None


THREE_STEPS = Renoise(max_steps=3, confidence=1e-9)  # no canvas is ever sure: each has as many steps as it may


@pytest.fixture(scope="module")
def canvas_profile(gemma: tuple[Any, Path], _budgets_of_processor_time: None) -> tuple[Profile, Samples]:
    loaded = opened(gemma[1], THREE_STEPS)
    return profile_model(loaded, name="g", budget=4.0, workloads={}, max_batch=2)


@pytest.mark.slow
def test_a_canvas_model_is_measured_and_its_law_is_the_rule_s(
    gemma: tuple[Any, Path], canvas_profile: tuple[Profile, Samples], tmp_path: Path
) -> None:
    loaded, (found, taken) = opened(gemma[1], THREE_STEPS), canvas_profile
    [law] = found.canvas_laws
    assert (law.median, law.least, law.most, law.canvas_spread, law.drift) == (3.0, 3, 3, 0.0, 1.0)
    assert (found.family, found.model.windowed, found.model.full_layers) == ("canvas", Windowed(2, 2, 8, WINDOW), 2)
    columns = {name: taken.column(name) for name in Features._fields}
    denoises = columns["prefill_tokens"] == 0
    assert 0 < denoises.sum() < len(denoises)
    assert (columns["tokens"][denoises] == CANVAS * columns["batch"][denoises]).all()
    assert (columns["window_kv"] > 0).all()
    assert (columns["window_kv"] < columns["sum_kv"]).any()  # texts are longer than a window
    save(found, tmp_path / "g.json")
    assert load(tmp_path / "g.json").canvas_laws == found.canvas_laws
    LiveSetting(loaded, found, "twin").check(World("azure-conv", f"sglang-gemma,canvas_length={CANVAS}"))


@pytest.mark.slow
def test_a_server_that_draws_commits_takes_the_law_of_the_workload_it_is_asked_for(
    gemma: tuple[Any, Path], canvas_profile: tuple[Profile, Samples], serving: Any
) -> None:
    loaded, found = opened(gemma[1], THREE_STEPS), canvas_profile[0]
    [law] = found.canvas_laws
    both = replace(found, canvas_laws=(law, replace(law, workload="code", median=2.0, least=2)))
    policy, steps = f"sglang-gemma:2,canvas_length={CANVAS},page_size={PAGE}", []
    for workload in (law.workload, "code"):
        world = World("", policy, workload=workload)
        with serving(open_live(loaded, world, profile=both, commits="twin")) as server:
            server.complete(prompt=prompt_of(0, LENGTHS[0][0]).tolist(), max_tokens=CANVAS)
        steps.append(server.totals.forwards)
    assert steps[0] - steps[1] == 1


@pytest.mark.parametrize("num", [1, 3, 5])
def test_captured_steps_are_the_eager_ones(gemma: tuple[Any, Path], num: int) -> None:
    model = read_canvas_model(gemma[1], "cpu", torch.float32)
    eager = CanvasCache(model, (80, 80), PAGE, "cpu", torch.float32)
    captured = GraphCanvasCache(model, (80, 80), PAGE, "cpu", torch.float32, longest=60)
    captured.prepare(4)
    assert captured.graphs.num_captures == 4
    answers: list[list[Any]] = []
    for cache in (eager, captured):
        answers.append([])
        chances = [KeyedChance(0, slot, 0, CANVAS) for slot in range(num)]
        for slot, chance in enumerate(chances):
            cache.encode({slot: torch.arange(5 + 6 * slot) % VOCAB})
            cache.begin(slot, chance.noise(VOCAB))
        for _ in range(3):
            turns = {slot: Canvas(chance).turn(VOCAB, EARLY) for slot, chance in enumerate(chances)}
            answers[-1] += [(x.likeliest.tolist(), x.entropy) for x in cache.denoise(turns).values()]
    assert captured.graphs.num_captures == 4 + (num > 4)
    assert [tokens for tokens, _ in answers[0]] == [tokens for tokens, _ in answers[1]]
    assert [entropy for _, entropy in answers[1]] == pytest.approx([entropy for _, entropy in answers[0]], rel=1e-5)


def test_a_graph_computes_few_canvases_more_than_a_step_has() -> None:
    assert [padded(n) for n in (1, 7, 8, 9, 16, 17, 33, 64)] == [1, 7, 8, 10, 16, 20, 40, 64]
