"""Every family of checkpoints gives the logits of an independent implementation, read from shards by its names."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dsim.engine.errors import ModelError
from dsim.live.config import RopeScaling
from dsim.live.families import FAMILIES
from dsim.live.shipped_configs import CONFIGS
from dsim.live.weights import config_of, load
from dsim.research.tiny.saved import save_model

from ..checks import cases
from .checkpoints import CHECKPOINTS, LLADA2, Logits, drawn, llada2, qwen3_yarn, rewrite, sdar
from .dense import Dense, block_causal

NEAR = 1e-4
TOKENS = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 96, 96, 7, 95])


@pytest.fixture(scope="module", params=[(name, seed) for name in CHECKPOINTS for seed in (0, 3, 5)], ids=str)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Logits, Path]:
    """What a plain implementation says, and where the checkpoint lies; its sizes are drawn, but with seed 0."""
    pytest.importorskip("transformers")
    name, seed = request.param
    folder = tmp_path_factory.mktemp(name)
    return CHECKPOINTS[name](folder, *([drawn(seed)] if seed else [])), folder


@pytest.mark.parametrize("block", [1, 4, len(TOKENS)], ids=["causal", "block-causal", "both ways"])
def test_a_checkpoint_gives_the_logits_of_an_independent_implementation(
    checkpoint: tuple[Logits, Path], block: int
) -> None:
    plain, folder = checkpoint
    model = load(str(folder), "cpu", torch.float32)
    seen = block_causal(len(TOKENS), block)
    with torch.no_grad():
        ours = model.logits(model(TOKENS, torch.arange(len(TOKENS)), Dense(seen)))
    expected = plain(TOKENS, seen)
    assert expected.std() > 0.1
    torch.testing.assert_close(ours, expected, rtol=0, atol=NEAR)


def test_the_parameters_are_counted_as_they_are(checkpoint: tuple[Logits, Path]) -> None:
    model = load(str(checkpoint[1]), "cpu", torch.float32)
    assert sum(weight.numel() for weight in model.parameters()) == model.config.num_params


@cases(
    "name mask block both_ways shifted eos",
    ("SDARForCausalLM", 96, 4, False, False, ()),
    ("SDARMoeForCausalLM", 96, 4, False, False, ()),
    ("LLaDA2MoeModelLM", 96, 32, False, False, (93,)),
    ("LLaDAModelLM", 96, 32, True, False, (90,)),
    ("DreamModel", 95, 32, True, True, (94,)),
)
def test_a_family_knows_what_its_config_does_not_say(
    tmp_path: Path, name: str, mask: int, block: int, both_ways: bool, shifted: bool, eos: tuple[int, ...]
) -> None:
    pytest.importorskip("transformers")
    CHECKPOINTS[name](tmp_path)
    config = config_of(str(tmp_path))
    assert (config.mask_token, config.block_length, config.both_ways, config.shifted, config.eos) == (
        mask, block, both_ways, shifted, eos,
    )  # fmt: skip
    assert config.by_entropy == (name == "DreamModel")


# Of published checkpoints (block-diffusion.md 3): a shipped config.json of their dimensions, parameters, bytes of KV,
# mask and EOS.
PUBLISHED = {
    "LLaDAModelLM": ("llada-8b", 8.0156e9, 524288, 126336, (126081, 126348)),
    "DreamModel": ("dream-7b", 7.6156e9, 57344, 151666, (151643, 151645)),
    "LLaDA2MoeModelLM": ("llada2-mini", 16.2558e9, 40960, 156895, (156892,)),
    "SDARMoeForCausalLM": ("sdar-30b-a3b", 30.5321e9, 98304, 151669, ()),
}


def published(name: str, folder: Path) -> None:
    """Write the config.json without its tokens."""
    (folder / "config.json").write_text("{}")
    said = {**CONFIGS[PUBLISHED[name][0]], "mask_token_id": None, "eos_token_id": None, "architectures": [name]}
    rewrite(folder, **said)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_checkpoints_have_their_sizes(tmp_path: Path, name: str) -> None:
    _, params, kv_bytes, mask, eos = PUBLISHED[name]
    published(name, tmp_path)
    config = config_of(str(tmp_path))
    assert config.num_params == pytest.approx(params, rel=1e-4)
    assert (2 * config.kv_elements, config.mask_token, config.eos) == (kv_bytes, mask, eos)


def test_one_expert_a_token_whose_weight_is_normed_is_refused(tmp_path: Path) -> None:
    published("SDARMoeForCausalLM", tmp_path)
    rewrite(tmp_path, num_experts_per_tok=1)
    with pytest.raises(ModelError, match="num_experts_per_tok is 1 and norm_topk_prob is true"):
        config_of(str(tmp_path))


def test_a_llada_that_says_neither_has_the_base_and_the_epsilon_it_was_trained_with(tmp_path: Path) -> None:
    published("LLaDAModelLM", tmp_path)
    rewrite(tmp_path, rope_theta=None, rms_norm_eps=None)
    config = config_of(str(tmp_path))
    assert (config.rope_theta, config.norm_eps, config.qk_norm, config.qkv_bias) == (5e5, 1e-5, False, False)


def test_a_llada2_that_says_neither_turns_half_a_head_and_scales_its_experts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    rewrite(tmp_path, **LLADA2 | {"partial_rotary_factor": None, "routed_scaling_factor": None})
    config = config_of(str(tmp_path))
    assert (config.rotary, config.experts and config.experts.scale) == (8, 2.5)


def test_experts_routed_by_block_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    rewrite(tmp_path, **LLADA2 | {"expert_capacity": 48})
    with pytest.raises(ModelError, match="expert_capacity is 48, expected null"):
        config_of(str(tmp_path))


def test_every_family_is_held_against_an_independent_implementation() -> None:
    # The shipped model has the decoder's own arithmetic.
    assert {*FAMILIES} - {*CHECKPOINTS} == {"TinyBothWaysLM"}


def test_a_tied_models_stored_head_is_left_out(tmp_path: Path) -> None:
    llada2(tmp_path)
    rewrite(tmp_path, tie_word_embeddings=True)
    assert load(str(tmp_path), "cpu", torch.float32).config.tied


def test_an_index_that_names_files_elsewhere_is_refused(tmp_path: Path) -> None:
    llada2(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "../secret.safetensors"}}')
    with pytest.raises(ModelError, match=r"weight_map names \.\./secret.safetensors, expected a file of the folder"):
        load(str(tmp_path), "cpu", torch.float32)


def test_angles_that_yarn_stretches_are_those_of_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    plain = qwen3_yarn(tmp_path)
    model = load(str(tmp_path), "cpu", torch.float32)
    assert model.config.scaling == RopeScaling("yarn", 4.0, 64, 32.0, 1.0, pytest.approx(1.138629, rel=1e-6))
    seen = block_causal(len(TOKENS), 1)
    with torch.no_grad():
        ours = model.logits(model(TOKENS, torch.arange(len(TOKENS)), Dense(seen)))
    torch.testing.assert_close(ours, plain(TOKENS, seen), rtol=0, atol=NEAR)
    save_model(model, tmp_path / "again", torch.float32)
    assert replace(config_of(str(tmp_path / "again")), name=model.config.name) == model.config


def test_other_ways_to_stretch_rope_are_refused_by_name(tmp_path: Path) -> None:
    sdar(tmp_path)
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64, "mscale_all_dim": 1.0}
    for rope, said in (
        ({"rope_type": "longrope"}, 'rope_type is "longrope", expected one of default, yarn, llama3'),
        ({"type": ["linear"]}, "rope_type is a list of 1, expected a text"),
        ({**yarn, "mscale": "a"}, 'mscale is "a", expected a number'),
        ({**yarn, "truncate": False}, "truncate is false, expected true"),
    ):
        rewrite(tmp_path, rope_parameters={"rope_theta": 1e4, **rope})
        with pytest.raises(ModelError, match=f"{re.escape(said)}$"):
            config_of(str(tmp_path))
