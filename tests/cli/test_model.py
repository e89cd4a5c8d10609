"""dsim model info, and dsim live on checkpoints of several families: what is printed, and what is refused in a line."""

import json
import math
import os
import re
import socket
from pathlib import Path

import pytest

from dsim.live.canvas_model import canvas_config, shapes
from dsim.live.weights import source_of

from ..live.checkpoints import CHECKPOINTS, llada2, rewrite, sdar_moe
from .command import dsim, succeed


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    rows = [{"timestamp": 10 * i, "input_length": 5 + 3 * i, "output_length": 3 + 2 * i} for i in range(4)]
    Path("trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("prompts.jsonl").write_text("\n".join(json.dumps([i, i + 1, 2 * i]) for i in range(40)) + "\n")
    return tmp_path / "m"


def test_it_says_what_a_directory_is_and_what_it_needs(folder: Path) -> None:
    llada2(folder)
    ran = dsim("model", "info", "m", "--gpu", "h100")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.splitlines() == [
        "model    m: LLaDA2MoeModelLM, blocks of masks, block-causal, experts in groups",
        "layers   3 of 48, 4 heads over 2 of keys, 16 wide, context 64, 8 experts of 20, 3 a token and 1 shared, the "
        "first 1 dense",
        "tokens   vocabulary 97, mask 96, blocks of 32, an answer ends at 93",
        "weights  101,536 parameters, 0.000203 GB in bf16; 3 files of 0.000406 GB (float32), complete",
        "KV       384 bytes a token in bf16",
        "pages    2,783,845 of 64 tokens, 178,166,080 tokens in all, on H100 (85.5 GB)",
        "runs     dsim live --policy lmdeploy-bd32 or lmdeploy-0.18 or sglang-bd32 or sglang-fdfo or sglang-sync or "
        "chunk or optimus or delayed-cache or delayed-cache-plus or focus",
    ]


@pytest.mark.parametrize(("name", "policies"), [
    ("LLaDAModelLM", "vanilla or fast-dllm or sparse-dllm or maskkv or dllm-serve"),
    ("DreamModel", "vanilla or fast-dllm or sparse-dllm or dllm-serve"),
    (
        "Fast_dLLM_QwenForCausalLM",
        "lmdeploy-bd32,block_length=8 or lmdeploy-0.18,block_length=8 or sglang-bd32,block_length=8",
    ),
])  # fmt: skip
def test_it_names_the_policies_that_a_model_was_trained_for_and_that_run(
    folder: Path, name: str, policies: str
) -> None:
    CHECKPOINTS[name](folder)
    found = json.loads(dsim("model", "info", "m", "--json").out)
    assert found["lines"]["runs"] == f"dsim live --policy {policies}"


SERVED = ("--prompts", "prompts.jsonl", "--json")


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("LLaDA2MoeModelLM", "sglang-bd32:16"),
        ("DreamModel", "dllm-serve,block_length=4"),
        ("LlamaForCausalLM", "ar"),
    ],
)
def test_a_checkpoint_of_each_kind_serves_a_trace(
    folder: Path, name: str, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    CHECKPOINTS[name](folder)
    # Nothing is downloaded, and no code of a model is run.
    (folder / "modeling.py").write_text("open('ran', 'w')\n")
    rewrite(folder, auto_map={"AutoModel": "modeling.Model", "AutoConfig": "modeling.Config"})
    monkeypatch.setattr(socket.socket, "connect", lambda *address: pytest.fail(f"connects to {address}"))
    ran = succeed("live", "trace.jsonl", "--model", "m", "--policy", f"{policy},page_size=16,num_pages=20", *SERVED)
    (summary,) = json.loads(ran.out)["policies"]
    assert summary["completed"] == 4
    assert not Path("ran").exists()


def test_drawn_tokens_are_in_the_manifest_and_refused_where_they_make_no_sense(folder: Path) -> None:
    sdar_moe(folder)
    command = ("live", "trace.jsonl", "--model", "m", "--policy", "lmdeploy-bd32:4,page_size=16", *SERVED)
    ran = succeed(*command, "--temperature", "0.7", "--seed", "3")
    assert json.loads(ran.out)["live"]["sampling"] == {"temperature": 0.7, "seed": 3}
    assert dsim(*command, "--temperature", "-1").refusal.startswith("--temperature is -1.0, expected a finite number")
    assert "--graphs captures" in dsim(*command, "--temperature", "1", "--graphs").refusal


def test_a_diffusion_gemma_is_described_with_what_serves_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = {
        "hidden_size": 2816, "num_hidden_layers": 30, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 256, "global_head_dim": 512, "num_global_key_value_heads": 2, "intermediate_size": 2112,
        "vocab_size": 262144, "max_position_embeddings": 131072, "sliding_window": 1024, "num_experts": 128,
        "top_k_experts": 8, "moe_intermediate_size": 704, "eos_token_id": [1, 106],
    }  # fmt: skip
    said = {"architectures": ["DiffusionGemmaForBlockDiffusion"], "text_config": text, "canvas_length": 256}
    Path("config.json").write_text(json.dumps(said))
    assert "neither model.safetensors" in dsim("model", "info", ".", "--gpu", "H100").refusal
    _claim({f"model.decoder.{name}": shape for name, shape in shapes(canvas_config(source_of("."))).items()})
    ran = succeed("model", "info", ".", "--gpu", "H100", "--json")
    found = json.loads(ran.out)
    # production-dllm-serving.md 1.1
    assert (found["kv_bytes_per_token"], found["kv_bytes_per_token_in_window"]) == (20480, 204800)
    assert found["weight_bytes"] == pytest.approx(2 * 25.2e9, rel=0.01)
    assert found["lines"]["runs"] == "dsim live --policy sglang-gemma or vllm-diffusion"
    assert "canvas of 256" in found["lines"]["tokens"]
    assert found["pages"] > 0
    assert "of 64 tokens" in found["lines"]["pages"]
    assert found["lines"]["weights"].endswith("; 31 files of 50.5 GB (bfloat16), complete")
    said["text_config"]["hidden_size"] = 2048
    Path("config.json").write_text(json.dumps(said))
    assert re.search(r"is \[.*2816.*\], expected \[.*2048.*\] by config.json", dsim("model", "info", ".").refusal)
    assert dsim("model", "info", ".", "--mask-token-id", "4").refusal.startswith(
        ".: denoises canvases, and --mask-token-id is 4: expected none"
    )


def _claim(shapes: dict[str, tuple[int, ...]]) -> None:
    """Safetensors files of such weights, one a layer, that take no room: holes of their sizes."""
    found: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        found.setdefault(".".join(re.findall(r"layers\.\d+", name)) or "rest", {})[name] = shape
    for file, part in found.items():
        header, end = {}, 0
        for name, shape in part.items():
            begin, end = end, end + 2 * math.prod(shape)
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
        head = json.dumps(header).encode()
        Path(file).write_bytes(len(head).to_bytes(8, "little") + head)
        os.truncate(file, 8 + len(head) + end)
    where = {name: file for file, part in found.items() for name in part}
    Path("model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
