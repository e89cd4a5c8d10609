"""Weights and keys of fewer bits: published sizes, measured rates, and what a checkpoint says of itself."""

from dataclasses import replace
from typing import Any

import pytest

from dsim.engine.errors import ProfileError
from dsim.engine.policy import PRESETS, parse
from dsim.planner.deploy import deployment_of, not_served
from dsim.profiler.hardware import gpu
from dsim.profiler.models import model
from dsim.profiler.precision import BITS, Precision, precision_of
from dsim.profiler.profile import weights_of
from dsim.profiler.roofline import compute_slope, roofline, weight_read
from dsim.sim.setting import Setting

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


@pytest.mark.parametrize(
    ("name", "config", "expected"),
    [
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
    ],
)  # fmt: skip
def test_a_checkpoint_says_its_precision(name: str, config: dict[str, Any], expected: Precision) -> None:
    assert precision_of(name, {"quantization_config": config} if config else {}) == expected


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "quantization_config is bitsandbytes of 4 bits, expected fp8"),
        ({"quant_method": "gptq", "bits": 3}, "quantization_config is gptq of 3 bits, expected fp8"),
        ({"format": "pack-quantized", "config_groups": {"g": {"weights": {"num_bits": 8}}}}, "of 4, 8 bits, expected"),
        ([], r"quantization_config is \[\], expected an object"),
    ],
)
def test_a_quantisation_that_is_not_known_is_refused(config: Any, message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        precision_of("x", {"quantization_config": config})
    with pytest.raises(ProfileError, match="weights is fp9, expected one of bf16, fp8"):
        Precision("fp9")


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
