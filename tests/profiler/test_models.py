"""Parameter arithmetic against published counts: safetensors indexes and model cards."""

import pytest

from dsim.engine.errors import ProfileError
from dsim.profiler.models import MODELS, active_layer_params, active_params, layer_params, model, touched_experts


def test_weights_match_the_checkpoints_indexes_to_the_byte() -> None:
    assert MODELS["SDAR-8B"].weight_bytes == 16_381_470_720
    assert MODELS["SDAR-4B"].weight_bytes == 8_822_848_512


# Billions: all, in the layers, of them active, active with embeddings.
COUNTS = {
    "SDAR-1.7B": (1.721, 1.409, 1.409, 1.721),
    "SDAR-4B": (4.411, 3.634, 3.634, 4.411),
    "SDAR-8B": (8.191, 6.946, 6.946, 8.191),
    "SDAR-30B-A3B": (30.532, 29.910, 2.731, 3.353),
    "Qwen3-8B": (8.191, 6.946, 6.946, 8.191),
    "LLaDA2.0-mini": (16.256, 15.612, 0.789, 1.433),
    "LLaDA2.0-flash": (102.890, 101.602, 4.865, 6.152),
    "LLaDA-8B": (8.016, 6.980, 6.980, 8.016),
    "Dream-7B": (7.616, 6.526, 6.526, 7.616),
}


@pytest.mark.parametrize("name", MODELS)
def test_parameters_match_the_cards(name: str) -> None:
    m = MODELS[name]
    counts = (m.total_params, layer_params(m), active_layer_params(m), active_params(m))
    assert [round(n / 1e9, 3) for n in counts] == list(COUNTS[name])


def test_kv_bytes_per_token() -> None:
    assert {name: m.kv_bytes_per_token for name, m in MODELS.items()} == {
        "SDAR-1.7B": 114_688,
        "SDAR-4B": 147_456,
        "SDAR-8B": 147_456,
        "SDAR-30B-A3B": 98_304,
        "Qwen3-8B": 147_456,
        "LLaDA2.0-mini": 40_960,
        "LLaDA2.0-flash": 65_536,
        "LLaDA-8B": 524_288,
        "Dream-7B": 57_344,
    }


def test_one_token_touches_its_top_k_experts() -> None:
    m = MODELS["SDAR-30B-A3B"]
    assert touched_experts(m, 1) == pytest.approx(8 / 128)
    assert touched_experts(m, 2) == pytest.approx(1 - (120 / 128) ** 2)
    assert touched_experts(MODELS["SDAR-8B"], 100) == 0.0


def test_an_unknown_model_lists_the_known_ones() -> None:
    assert model("llada2.0-MINI").name == "LLaDA2.0-mini"
    with pytest.raises(ProfileError, match="no model is named GPT-5; the known ones are SDAR"):
        model("GPT-5")
