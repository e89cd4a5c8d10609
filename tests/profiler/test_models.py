"""Parameters and bytes of models against published ones, whole and in fewer bits, and what checkpoints say of them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsim.engine.errors import ProfileError
from dsim.engine.spec import PRESETS, parse
from dsim.live.shipped_configs import CONFIGS
from dsim.planner.deploy import deployment_of, not_served
from dsim.profiler.hardware import gpu
from dsim.profiler.models import (
    BYTES,
    CHECKPOINTS,
    MODELS,
    architecture_of,
    embedding_params,
    expert_params,
    family,
    layer_params,
    model,
    touched_experts,
)
from dsim.profiler.precision import BITS, Precision, precision_of
from dsim.profiler.profile import weights_of
from dsim.profiler.roofline import compute_slope, roofline, weight_read
from dsim.sim.setting import Setting

from ..checks import cases
from ..worlds import refusal


def test_weights_match_the_checkpoints_indexes_to_the_byte() -> None:
    assert MODELS["SDAR-8B"].weight_bytes == 16_381_470_720
    assert MODELS["SDAR-4B"].weight_bytes == 8_822_848_512


# Billions: all, in the layers, of them active, active with embeddings; and bytes of keys and values a token, which of
# Gemma are those of the five layers that see all tokens (production-dllm-serving.md 1.1).
COUNTS = {
    "SDAR-1.7B": (1.721, 1.409, 1.409, 1.721, 114_688),
    "SDAR-4B": (4.411, 3.634, 3.634, 4.411, 147_456),
    "SDAR-8B": (8.191, 6.946, 6.946, 8.191, 147_456),
    "SDAR-30B-A3B": (30.532, 29.910, 2.731, 3.353, 98_304),
    "Qwen3-8B": (8.191, 6.946, 6.946, 8.191, 147_456),
    "LLaDA2.0-mini": (16.256, 15.612, 0.789, 1.433, 40_960),
    "LLaDA2.0-flash": (102.890, 101.602, 4.865, 6.152, 65_536),
    "Gemma4-26B-A4B": (25.233, 24.494, 3.084, 3.822, 20_480),
    "DiffusionGemma-26B-A4B": (25.233, 24.494, 3.084, 3.822, 20_480),  # 25.2 B, of them 3.8 B active, as its card says
    "LLaDA-8B": (8.016, 6.980, 6.980, 8.016, 524_288),
    "Dream-7B": (7.616, 6.526, 6.526, 7.616, 57_344),
}


@pytest.mark.parametrize("name", MODELS)
def test_parameters_match_the_cards(name: str) -> None:
    m = MODELS[name]
    active = layer_params(m, active=True)
    counts = (m.total_params, layer_params(m), active, active + embedding_params(m))
    assert [*(round(n / 1e9, 3) for n in counts), m.kv_bytes_per_token] == list(
        COUNTS[name.replace("2.1", "2.0").replace("2.2", "2.0")]
    )


def test_one_token_touches_its_top_k_experts() -> None:
    m = MODELS["SDAR-30B-A3B"]
    assert touched_experts(m, 1) == pytest.approx(8 / 128)
    assert touched_experts(m, 2) == pytest.approx(1 - (120 / 128) ** 2)
    assert touched_experts(MODELS["SDAR-8B"], 100) == 0.0


ROWS = (1, 2, 4, 8, 16, 32)  # of 32 tokens


def test_rows_routed_by_block_reach_48_experts_each_and_at_16_rows_nearly_all() -> None:
    by_block, by_token = MODELS["LLaDA2.2-mini"], MODELS["LLaDA2.1-mini"]
    assert [round(256 * touched_experts(by_block, 32 * rows)) for rows in ROWS] == [48, 87, 144, 207, 247, 256]
    assert [round(256 * touched_experts(by_token, 32 * rows)) for rows in ROWS] == [163, 222, 252, 256, 256, 256]
    assert all(256 * touched_experts(by_block, 32 * rows) <= 48 * rows for rows in ROWS)
    # A block that is not full may reach what its block admits.
    assert [256 * touched_experts(by_block, tokens) for tokens in (1, 8, 31)] == [48] * 3


@pytest.mark.parametrize(("size", "by_block", "by_token"), [("mini", 5.7, 19.5), ("flash", 37.4, 127.4)])
def test_one_row_s_expert_bytes_fall_to_a_third(size: str, by_block: float, by_token: float) -> None:
    shapes = MODELS[f"LLaDA2.2-{size}"], MODELS[f"LLaDA2.1-{size}"]
    gigabytes = [BYTES * expert_params(m) * touched_experts(m, 32) / 1e9 for m in shapes]
    assert gigabytes == pytest.approx([by_block, by_token], abs=0.05)
    many = [touched_experts(m, 32 * 16) for m in shapes]
    assert many[0] == pytest.approx(many[1], rel=0.04)


def test_a_config_json_says_what_a_block_admits(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    llada2 = {**CONFIGS["llada2-mini"], "architectures": ["LLaDA2MoeModelLM"], "_name_or_path": "x/LLaDA2.2-mini"}
    llada2 |= {"max_position_embeddings": 131_072, "block_size": 32, "use_qk_norm": True, "expert_capacity": 48}
    path.write_text(json.dumps(llada2))
    assert model(str(path)) == MODELS["LLaDA2.2-mini"]
    for capacity in (7, 257):
        path.write_text(json.dumps(llada2 | {"expert_capacity": capacity}))
        with pytest.raises(ProfileError, match=f"expert_capacity is {capacity}, expected .*8.* 256"):
            model(str(path))
    path.write_text(json.dumps({**llada2, "block_size": None}))
    with pytest.raises(ProfileError, match="block_size is null, expected"):
        model(str(path))


def test_a_model_of_unpublished_dimensions_is_named() -> None:
    with pytest.raises(ProfileError, match="the dimensions of inclusionAI/LLaDA-MoE-v2-30B-A3B are not published: "):
        model("inclusionAI/LLaDA-MoE-v2-30B-A3B")


def test_an_unknown_model_lists_the_known_ones() -> None:
    assert model("llada2.0-MINI").name == "LLaDA2.0-mini"
    assert "no model is named GPT-5; the known ones are SDAR" in refusal(ProfileError, model, "GPT-5")


CONFIG = {**CONFIGS["sdar-8b"], "_name_or_path": "owner/SDAR-8B"}


@pytest.mark.parametrize("name", ["sdar-1.7b", "sdar-8b", "sdar-30b-a3b", "llada-8b", "dream-7b"])
def test_a_config_json_is_the_shape_that_dsim_ships_of_it(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]), encoding="utf-8")
    for path in (tmp_path, tmp_path / "config.json"):
        found = model(str(path))
        assert found == MODELS[found.name]
        assert family(found, architecture_of(str(path))) == family(found)


def test_a_name_of_ones_own_generates_as_its_architecture_does(tmp_path: Path) -> None:
    kinds = {"SDARForCausalLM": "block-diffusion", "DreamModel": "full-sequence", "LlamaForCausalLM": "autoregressive"}
    for architecture, kind in kinds.items():
        config = CONFIG | {"architectures": [architecture], "_name_or_path": "owner/mine"}
        (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
        assert model(str(tmp_path)).name == "mine"
        (tmp_path / "config.json").write_text(json.dumps(config | {"_name_or_path": "x" * 300}), encoding="utf-8")
        assert model(str(tmp_path)).name == "x" * 77 + "..."
        assert family(model(str(tmp_path)), architecture_of(str(tmp_path))) == kind


@cases(
    "change says",
    ({"hidden_size": None}, "hidden_size or d_model is missing, expected a model's dimension"),
    ({"num_experts": 4, "num_experts_per_tok": 8, "moe_intermediate_size": 1}, "num_experts_per_tok is 8, expected"),
)
def test_a_config_json_that_cannot_be_is_refused_by_key(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | change), encoding="utf-8")
    with pytest.raises(ProfileError, match=says):
        model(str(tmp_path))


def test_a_checkpoint_goes_by_its_name_on_hugging_face() -> None:
    assert all(model(checkpoint).name == name for name, checkpoint in CHECKPOINTS.items())
    for typed, name in {
        "jetlm/sdar-8b-chat": "SDAR-8B", "SDAR-8B-Chat-b16": "SDAR-8B", "DiffusionGemma-26B-A4B-it": DIFFUSION_GEMMA,
        "RedHatAI/diffusiongemma-26B-A4B-it-FP8-dynamic": DIFFUSION_GEMMA, "dream-org/dream-v0-base-7b": "Dream-7B",
        "GSAI-ML/LLaDA-8B-Base": "LLaDA-8B", "inclusionAI/LLaDA2.0-mini-preview": "LLaDA2.0-mini",
    }.items():  # fmt: skip
        assert model(typed).name == name
    assert "no model is named jetlm/SDAR-9B (did you mean SDAR-8B?)" in refusal(ProfileError, model, "jetlm/SDAR-9B")
    assert "no model is named SDAR-8Bx" in refusal(ProfileError, model, "SDAR-8Bx")


DIFFUSION_GEMMA = "DiffusionGemma-26B-A4B"


@cases(
    "changes billions kv_bytes",
    ({}, 30.5, 98_304),  # 48 layers x 128 experts x 3 x 2,048 x 768 are 29.0
    ({"decoder_sparse_step": 2, "mlp_only_layers": [0]}, 16.9, 98_304),  # 24 layers of them, 1 to 47
    ({"mlp_only_layers": [0]}, 30.0, 98_304),
    ({"sliding_window": 1024, "sliding_window_pattern": 6}, 30.5, 16_384),  # 8 layers see everything
    ({"sliding_window": 1024, "layer_types": ["sliding_attention"] * 47 + ["full_attention"]}, 30.5, 2_048),
    ({"sliding_window": 1024, "use_sliding_window": False}, 30.5, 98_304),
)
def test_layers_of_several_kinds_are_counted(
    changes: dict[str, Any], billions: float, kv_bytes: int, tmp_path: Path
) -> None:
    config = {**CONFIGS["sdar-30b-a3b"], "architectures": ["Qwen3MoeForCausalLM"]}
    path = tmp_path / "config.json"
    for given in (config | changes, {"architectures": ["Qwen3MoeForCausalLM"], "text_config": config | changes}):
        path.write_text(json.dumps(given))
        shape = model(str(path))
        assert (round(shape.total_params / 1e9, 1), shape.kv_bytes_per_token) == (billions, kv_bytes)
    for strange in ({"kv_lora_rank": 512}, {"index_topk": 2048}, {"sliding_window": 1024}):
        path.write_text(json.dumps(config | strange))
        with pytest.raises(ProfileError, match=f"{next(iter(strange))} is [0-9]+, expected "):
            model(str(path))


GEMMA, LLADA = model("DiffusionGemma-26B-A4B"), model("LLaDA2.1-mini")


def test_sizes_are_those_of_published_checkpoints() -> None:
    vision = 0.55e9 * 2  # in bf16; not of the language model
    assert Precision("nvfp4").weight_bytes(GEMMA) + vision == pytest.approx(18.86e9, rel=0.02)
    assert Precision("bf16").weight_bytes(GEMMA) + vision == pytest.approx(51.7e9, rel=0.01)
    assert Precision("int4").weight_bytes(LLADA) == pytest.approx(9.14 * 2**30, rel=0.005)
    assert Precision("nvfp4").weight_bytes(LLADA) == pytest.approx(9.81 * 2**30, rel=0.005)


def test_price_and_memory_follow_the_bits() -> None:
    card = gpu("NVIDIA RTX PRO 6000 Blackwell Server Edition")
    for weights in BITS:
        held = Precision(weights)
        profile = roofline(card, GEMMA, precision=held)
        assert profile.memory.weight_bytes == held.weight_bytes(GEMMA)
        assert weights_of(profile) == weights
    read = [weight_read(card, GEMMA, 1, 1e9, Precision(weights)) for weights in ("bf16", "fp8", "nvfp4")]
    assert read == sorted(read, reverse=True)
    slopes = {w: compute_slope(card, GEMMA, 1, Precision(w)) / compute_slope(card, GEMMA, 1) for w in BITS}
    assert slopes["bf16"] == slopes["int4"] == slopes["mxfp4"] == 1  # weights are decoded
    assert slopes["fp8"] == pytest.approx(1 / 1.7)
    assert 1 / 2.8 < slopes["nvfp4"] < 1  # of the experts alone
    assert compute_slope(card, GEMMA, 1, Precision("nvfp4", decodes=True)) == compute_slope(card, GEMMA, 1)
    assert compute_slope(gpu("H100"), GEMMA, 1, Precision("int4")) > compute_slope(gpu("H100"), GEMMA, 1)
    half = roofline(card, GEMMA, precision=Precision(keys="fp8"))
    assert (half.memory.kv_bytes_per_token, half.memory.window_bytes_per_token) == (20480 // 2, 204800 // 2)
    assert half.latency.kv_read == pytest.approx(roofline(card, GEMMA).latency.kv_read / 2)


def test_a_card_too_small_for_bf16_holds_fewer_bits() -> None:
    with pytest.raises(ProfileError, match=r"takes 50\.5 GB of bf16 weights, .* or fewer bits \(--weights\)"):
        roofline(gpu("L40S"), GEMMA)
    assert roofline(gpu("L40S"), GEMMA, precision=Precision("nvfp4")).name == "l40s-diffusiongemma-26b-a4b-nvfp4"


@cases(
    "name config expected",
        ("Qwen3-8B", {}, Precision()),
        ("Qwen/Qwen3-8B-FP8", {}, Precision("fp8")),
        ("runs/fp8-trial/checkpoint-4000", {}, Precision()),
        ("x", {"quant_method": "fp8", "weight_block_size": [128, 128]}, Precision("fp8")),
        ("x", {"quant_method": "compressed-tensors", "format": "float-quantized"}, Precision("fp8")),
        ("x", {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, Precision("nvfp4")),
        ("x", {"format": "nvfp4-pack-quantized", "config_groups": {"g": {"input_activations": None}}},
         Precision("nvfp4", decodes=True)),
        ("x", {"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"},
         Precision("nvfp4", "fp8")),
        ("x", {"quant_method": "compressed-tensors", "format": "pack-quantized", "kv_cache_scheme": {"num_bits": 8}},
         Precision("int4", "fp8")),
        ("x", {"quant_method": "mxfp4"}, Precision("mxfp4")),
        ("x", {"quant_method": "awq", "bits": 4}, Precision("int4")),
)  # fmt: skip
def test_a_checkpoint_says_its_precision(name: str, config: dict[str, Any], expected: Precision) -> None:
    assert precision_of(name, {"quantization_config": config} if config else {}) == expected


@cases(
    "config message",
    ({"quant_method": "bitsandbytes"}, "quantization_config is bitsandbytes of 4 bits, expected fp8"),
    ({"quant_method": "gptq", "bits": 3}, "quantization_config is gptq of 3 bits, expected fp8"),
    ({"format": "pack-quantized", "config_groups": {"g": {"weights": {"num_bits": 8}}}}, "of 4, 8 bits, expected"),
    ([], r"quantization_config is \[\], expected an object"),
)
def test_a_quantisation_that_is_not_known_is_refused(config: Any, message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        precision_of("x", {"quantization_config": config})
    assert "weights is fp9, expected one of bf16, fp8" in refusal(ProfileError, Precision, "fp9")


def test_a_launch_has_the_checkpoint_and_the_keys_and_sglang_refuses_the_canvases() -> None:
    profile = roofline(gpu("RTX5090"), GEMMA, precision=Precision("nvfp4", "fp8"))
    found = deployment_of("vllm-diffusion", profile)
    assert found is not None
    assert "nvidia/diffusiongemma-26B-A4B-it-NVFP4" in found.shell
    assert "--kv-cache-dtype fp8" in found.shell
    assert "refuses a quantised DiffusionGemma" in not_served(PRESETS["sglang-gemma"], profile)
    with pytest.raises(ProfileError, match=r"^sglang-gemma:8: .* has weights of nvfp4, and SGLang .* vllm-diffusion$"):
        Setting(parse("sglang-gemma:8"), profile).check()
    whole = roofline(gpu("H200"), GEMMA)
    mixed = replace(whole, memory=replace(whole.memory, weight_bytes=28 * 10**9))  # experts of 8 bits
    assert "has weights of 1.1 bytes a parameter, and SGLang" in not_served(PRESETS["sglang-gemma"], mixed)
    assert not_served(PRESETS["sglang-gemma"], whole) == ""
