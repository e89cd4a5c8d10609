"""FP8 checkpoints, by blocks as DeepSeek has them and by rows or tensors as compressed-tensors has them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dsim.engine.errors import ModelError
from dsim.live import stored
from dsim.live.canvas_model import canvas_config, check_canvas_model, read_canvas_model, shapes
from dsim.live.config_file import Given
from dsim.live.weights import check_model, load, read_model, source_of
from dsim.profiler.measure import open_model

from .checkpoints import qwen3, rewrite, save_shards, sdar_moe
from .dense import logits
from .test_random_weights import GEMMA

BLOCK = (16, 24)  # rows and columns: neither divides all weights
FP8, MOST = torch.float8_e4m3fn, 448.0
Quantised = tuple[Tensor, Tensor]  # FP8, and its scales


def by_block(weight: Tensor) -> Quantised:
    scale = torch.stack(
        [
            torch.stack([part.abs().max() / MOST for part in rows.split(BLOCK[1], 1)])
            for rows in weight.split(BLOCK[0], 0)
        ]
    )
    wide = scale.repeat_interleave(BLOCK[0], 0)[: weight.shape[0]].repeat_interleave(BLOCK[1], 1)[:, : weight.shape[1]]
    return (weight / wide).to(FP8), scale


def by_row(weight: Tensor) -> Quantised:
    scale = weight.abs().amax(1, keepdim=True) / MOST
    return (weight / scale).to(FP8), scale.bfloat16()


def by_tensor(weight: Tensor) -> Quantised:
    scale = weight.abs().max() / MOST
    return (weight / scale).to(FP8), scale.reshape(1)


def compressed(strategy: str, **other: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, **other}
    return {
        "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": {"num_bits": 8}}},
    }  # fmt: skip


KINDS: dict[str, tuple[Callable[[Tensor], Quantised], str, dict[str, Any]]] = {
    "blocks": (by_block, "_scale_inv", {"quant_method": "fp8", "weight_block_size": list(BLOCK)}),
    "fp8": (by_tensor, "_scale", {"quant_method": "fp8", "activation_scheme": "static"}),
    "rows": (by_row, "_scale", compressed("channel")),
    "tensor": (by_tensor, "_scale", compressed("tensor")),
    "compressed blocks": (by_block, "_scale", compressed("block", block_structure=list(BLOCK))),
}
SAID = {
    "blocks": "FP8 by fp8 with a scale for each block of 16 x 24, dequantised to float32",
    "rows": "FP8 by compressed-tensors with a scale for each tensor or row, dequantised to float32",
}


def quantised(plain: Path, folder: Path, kind: str, end: str = "_proj.weight") -> dict[str, Tensor]:
    """Write a checkpoint again with its projections in FP8; its tensors with these rounded."""
    quantise, suffix, settings = KINDS[kind]
    tensors = {name: tensor for file in plain.glob("*.safetensors") for name, tensor in load_file(file).items()}
    stored, rounded = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        if not name.endswith(end):
            continue
        stored[name], scale = quantise(tensor)
        stored[name + suffix] = scale
        stored[name.removesuffix("weight") + "input_scale"] = torch.ones(1)  # of activations: not ours
        factor = scale.float()
        if quantise is by_block:
            factor = factor.repeat_interleave(BLOCK[0], 0)[: len(tensor)]
            factor = factor.repeat_interleave(BLOCK[1], 1)[:, : tensor.shape[1]]
        rounded[name] = stored[name].float() * factor
    config = json.loads((plain / "config.json").read_text())
    save_shards(folder, stored, config | {"quantization_config": settings})
    return rounded


@pytest.fixture(scope="module", params=[qwen3, sdar_moe])
def plain(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of transformers, in fp32."""
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("plain")
    request.param(folder)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_fp8_weights_are_read_times_their_scales(plain: Path, tmp_path: Path, kind: str) -> None:
    rounded = quantised(plain, tmp_path / "fp8", kind)
    save_shards(tmp_path / "rounded", rounded, json.loads((plain / "config.json").read_text()))
    ours, wanted = (read_model(tmp_path / name, "cpu", torch.float32) for name in ("fp8", "rounded"))
    for (name, weight), other in zip(ours.named_parameters(), wanted.parameters(), strict=True):
        assert torch.equal(weight, other), name
    exact = logits(read_model(plain, "cpu", torch.float32), [3, 1, 4, 1, 5], 1)
    assert 0 < (logits(ours, [3, 1, 4, 1, 5], 1) - exact).std() < 0.3 * exact.std()
    assert check_model(tmp_path / "fp8").dtypes == ("float8_e4m3fn", "float32")


def test_the_logits_are_those_of_transformers_with_the_dequantised_weights(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    qwen3(tmp_path / "plain")
    rounded = quantised(tmp_path / "plain", tmp_path / "fp8", "blocks")
    save_shards(tmp_path / "rounded", rounded, json.loads((tmp_path / "plain" / "config.json").read_text()))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "rounded", dtype=torch.float32)
    tokens = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    with torch.no_grad():
        expected = theirs(tokens).logits[0]
    ours = logits(read_model(tmp_path / "fp8", "cpu", torch.float32), tokens[0].tolist(), 1)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", SAID)
def test_a_model_that_was_fp8_says_so(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    qwen3(tmp_path / "plain")
    quantised(tmp_path / "plain", tmp_path / "fp8", kind)
    loaded = open_model(str(tmp_path / "fp8"), "cpu")
    assert (loaded.trained, loaded.settings["weights"]) == (True, SAID[kind])
    assert capsys.readouterr().err.endswith(f"{tmp_path / 'fp8'}: weights {SAID[kind]}\n")
    assert "weights" not in open_model(str(tmp_path / "plain"), "cpu").settings


def test_a_diffusion_gemma_whose_experts_are_stored_one_by_one_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GEMMA))
    given = Given(random_weights=True)
    source, chance = source_of(str(tmp_path), given), torch.Generator().manual_seed(1)
    tensors, wide = {}, GEMMA["text_config"]["moe_intermediate_size"]
    for name, shape in shapes(canvas_config(source, given)).items():
        weight = torch.randn(shape, generator=chance)
        at = name if name.startswith("model.") else f"model.decoder.{name}"
        if not name.endswith(("gate_up_proj", "experts.down_proj")):
            tensors[at] = weight
            continue
        for j, expert in enumerate(weight):
            begin = f"{at.rpartition('.')[0]}.{j}"
            parts = {"down": expert} if "down" in name else {"gate": expert[:wide], "up": expert[wide:]}
            tensors |= {f"{begin}.{part}_proj.weight": tensor for part, tensor in parts.items()}
    save_shards(tmp_path / "plain", tensors, GEMMA)
    rounded = quantised(tmp_path / "plain", tmp_path / "fp8", "rows")
    found = read_canvas_model(tmp_path / "fp8", "cpu", torch.float32)
    low = found.layers[1].experts[0][3, wide:]
    norm = tensors["model.decoder.layers.1.pre_feedforward_layernorm_2.weight"]  # a factor of what reads it
    assert torch.equal(low, rounded["model.decoder.layers.1.experts.3.up_proj.weight"] * norm)
    query = rounded["model.decoder.layers.0.self_attn.q_proj.weight"]
    assert torch.equal(found.layers[0].qkv[: len(query)], query)
    del tensors["model.decoder.layers.1.experts.3.up_proj.weight"]
    save_shards(tmp_path / "less", tensors, GEMMA)
    with pytest.raises(ModelError, match=r"lacks layers\.1\.experts\.gate_up_proj \(1 of \d+ weights are missing\)"):
        check_canvas_model(tmp_path / "less")


def awq(folder: Path) -> None:
    rewrite(folder, quantization_config={"quant_method": "awq", "bits": 4})


def int8(folder: Path) -> None:
    rewrite(folder, quantization_config=compressed("channel", type="int"))


def unsaid(folder: Path) -> None:
    without_scales(folder)
    rewrite(folder, quantization_config=None)


def other_blocks(folder: Path) -> None:
    rewrite(folder, quantization_config={"quant_method": "fp8", "weight_block_size": [32, 32]})


def without_scales(folder: Path) -> None:
    for file in folder.glob("*.safetensors"):
        tensors = {name: tensor for name, tensor in load_file(file).items() if "scale" not in name}
        from safetensors.torch import save_file

        save_file(tensors, file)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            awq,
            r"the checkpoint is quantised \(quant_method awq\), expected plain weights or FP8: dsim loads",
        ),
        (int8, r"the checkpoint is quantised \(quant_method compressed-tensors\), expected plain weights or FP8"),
        (unsaid, r"\S+_proj\.weight is FP8, and config\.json has no quantization_config: expected one$"),
        (other_blocks, r"the scale of \S+ is \[\d, \d\], expected \[\d, \d\] for a weight of \[\d+, \d+\]$"),
        (without_scales, r"\S+ is FP8 and has no scale, expected \S+_scale_inv or _scale$"),
    ],
)
def test_what_is_wrong_with_a_quantised_checkpoint_is_one_line(
    tmp_path: Path, change: Callable[[Path], None], says: str
) -> None:
    pytest.importorskip("transformers")
    qwen3(tmp_path / "plain")
    quantised(tmp_path / "plain", tmp_path / "fp8", "blocks")
    change(tmp_path / "fp8")
    with pytest.raises(ModelError, match=says):
        read_model(tmp_path / "fp8", "cpu", torch.float32)
