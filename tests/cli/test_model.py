"""dsim live on checkpoints of several families: what is printed, and what is refused in a line."""

import json
import socket
from pathlib import Path

import pytest

from ..live.checkpoints import CHECKPOINTS, rewrite, sdar_moe
from .command import dsim, succeed


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    rows = [{"timestamp": 10 * i, "input_length": 5 + 3 * i, "output_length": 3 + 2 * i} for i in range(4)]
    Path("trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("prompts.jsonl").write_text("\n".join(json.dumps([i, i + 1, 2 * i]) for i in range(40)) + "\n")
    return tmp_path / "m"


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
    assert json.loads(ran.out)["live"]["settings"]["sampling"] == {"temperature": 0.7, "seed": 3}
    assert dsim(*command, "--temperature", "-1").refusal.startswith("--temperature is -1.0, expected a finite number")
    assert "--graphs captures" in dsim(*command, "--temperature", "1", "--graphs").refusal
