"""Checkpoints of several families on the command line: what is printed, refused, and asked for."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from dsim.profiler import measure

from ..live.checkpoints import CHECKPOINTS, rewrite, sdar
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
        ("LLaDA2MoeModelLM", "lmdeploy-bd32:16"),
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


# ---- what a checkpoint's directory does not say --------------------------------------------------------------------


class StoppedError(Exception):
    """Enough was seen."""


@pytest.fixture
def untold(tmp_path: Path) -> Path:
    """A folder with a checkpoint that does not say its block, its mask and its EOS, and with prompts."""
    sdar(tmp_path / "model")
    rewrite(tmp_path / "model", block_size=None, mask_token_id=None, eos_token_id=7)
    (tmp_path / "ids.jsonl").write_text("\n".join(json.dumps([3, 4, 5, 6] * 20) for _ in range(3)))
    return tmp_path


@pytest.mark.parametrize("command", ["profile", "validate", "serve"])
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((), "has no block_size, which the checkpoint was trained with: say it (--block-length)"),
        (("--block-length", 4, "--mask-token-id", 97), "mask_token_id is 97, expected below vocab_size, 97"),
    ],
)
def test_what_a_directory_does_not_say_is_asked_for(
    command: str, given: tuple[object, ...], said: str, untold: Path
) -> None:
    given = ("--model", untold / "model", "--device", "cpu", "-o", untold / "out.json", *given)
    if command == "validate":
        given += ("--profile", "a100-sdar-8b")
    assert said in dsim(command, *given).refusal


def test_profile_logs_commits_with_the_mask_the_block_and_the_eos_that_are_given(
    untold: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    serve = measure.run

    def listen(serving: Any, *rest: Any, **how: Any) -> Any:
        if not serving.eos:  # steps are measured before commits
            return serve(serving, *rest, **how)
        seen.append((serving.model.config.block_length, serving.model.config.mask_token, serving.eos))
        raise StoppedError

    monkeypatch.setattr(measure, "run", listen)
    monkeypatch.setattr(measure, "measure_eviction", lambda *_: 0.0)
    given = ("--block-length", 4, "--mask-token-id", 95, "--budget", "2s", "--prompts", untold / "ids.jsonl")
    with pytest.raises(StoppedError):
        dsim("profile", "--model", untold / "model", "--device", "cpu", "-o", untold / "p.json", *given, "--eos")
    assert seen == [(4, 95, (7,))]


def test_validate_serves_with_the_options_of_the_checkpoint(untold: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def listen(_out: Any, _base: Any, live: Any, **how: Any) -> Any:
        seen.append((live.loaded.model.config.block_length, live))
        raise StoppedError

    monkeypatch.setattr("dsim.device.validate.validate", listen)
    given = ("--block-length", 4, "--mask-token-id", 95, "--tokenizer", untold)
    with pytest.raises(StoppedError):
        dsim(
            "validate", "--model", untold / "model", "--device", "cpu", "-o", untold / "v", "--seconds", 1,
            "--profile", "a100-sdar-8b", *given,
        )  # fmt: skip
    [(block, live)] = seen
    assert (block, live.tokenizer) == (4, str(untold))


def test_an_eos_that_the_checkpoint_does_not_name_ends_nothing(untold: Path) -> None:
    rewrite(untold / "model", eos_token_id=None)
    given = ("--block-length", 4, "--mask-token-id", 95, "--budget", "2s", "--prompts", untold / "ids.jsonl")
    ran = dsim("profile", "--model", untold / "model", "--device", "cpu", "-o", untold / "p.json", *given, "--eos")
    assert "names EOS [] and 1 workloads: expected some of both" in ran.refusal
