"""What a checkpoint's directory does not say, said to `dsim profile`, `dsim validate` and `dsim serve`."""

import json
from pathlib import Path
from typing import Any

import pytest

from dsim.profiler import measure

from ..live import checkpoints
from .command import dsim


class StoppedError(Exception):
    """Enough was seen."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    checkpoints.sdar(tmp_path / "model")
    checkpoints.rewrite(tmp_path / "model", block_size=None, mask_token_id=None, eos_token_id=7)
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
    command: str, given: tuple[object, ...], said: str, folder: Path
) -> None:
    given = ("--model", folder / "model", "--device", "cpu", "-o", folder / "out.json", *given)
    assert said in dsim(command, *given).refusal


def test_profile_logs_commits_with_the_mask_the_block_and_the_eos_that_are_given(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def listen(serving: Any, *rest: Any, **how: Any) -> Any:
        seen.append((serving.model.config.block_length, serving.model.config.mask_token, serving.eos))
        raise StoppedError

    monkeypatch.setattr(measure, "run", listen)
    monkeypatch.setattr(measure, "measure_eviction", lambda *_: 0.0)
    given = ("--block-length", 4, "--mask-token-id", 95, "--budget", "2s", "--prompts", folder / "ids.jsonl")
    with pytest.raises(StoppedError):
        dsim("profile", "--model", folder / "model", "--device", "cpu", "-o", folder / "p.json", *given, "--eos")
    assert seen == [(4, 95, (7,))]


def test_validate_serves_with_the_options_of_the_checkpoint(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def listen(_out: Any, _base: Any, live: Any, **how: Any) -> Any:
        seen.append((live.loaded.model.config.block_length, live))
        raise StoppedError

    monkeypatch.setattr("dsim.device.validate.validate", listen)
    given = ("--block-length", 4, "--mask-token-id", 95, "--tokenizer", folder)
    with pytest.raises(StoppedError):
        dsim(
            "validate", "--model", folder / "model", "--device", "cpu", "-o", folder / "v", "--seconds", 1,
            "--profile", "a100-sdar-8b", *given,
        )  # fmt: skip
    [(block, live)] = seen
    assert (block, live.tokenizer) == (4, str(folder))


def test_an_eos_that_the_checkpoint_does_not_name_ends_nothing(folder: Path) -> None:
    checkpoints.rewrite(folder / "model", eos_token_id=None)
    given = ("--block-length", 4, "--mask-token-id", 95, "--budget", "2s", "--prompts", folder / "ids.jsonl")
    ran = dsim("profile", "--model", folder / "model", "--device", "cpu", "-o", folder / "p.json", *given, "--eos")
    assert "names EOS [] and 1 workloads: expected some of both" in ran.refusal
