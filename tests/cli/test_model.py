"""Checkpoints of several families on the command line: what is printed, refused, and asked for."""

import socket
from pathlib import Path
from typing import Any

import pytest

from dsim.profiler import measure

from ..checks import cases
from ..live.checkpoints import CHECKPOINTS, rewrite, sdar
from ..traces.files import save
from .command import dsim, succeed


@pytest.fixture
def files() -> None:
    pytest.importorskip("transformers")
    rows = [{"timestamp": 10 * i, "input_length": 5 + 3 * i, "output_length": 3 + 2 * i} for i in range(4)]
    save(rows, "trace.jsonl")
    save([[i, i + 1, 2 * i] for i in range(40)], "prompts.jsonl")


@cases(
    "name policy",
    ("LLaDA2MoeModelLM", "lmdeploy-bd32:16"),
    ("DreamModel", "dllm-serve,block_length=4"),
    ("LlamaForCausalLM", "ar"),
)
@pytest.mark.usefixtures("files")
def test_a_checkpoint_of_each_kind_serves_a_trace(name: str, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    CHECKPOINTS[name](Path("m"))
    # Nothing is downloaded, and no code of a model is run.
    Path("m/modeling.py").write_text("open('ran', 'w')\n")
    rewrite(Path("m"), auto_map={"AutoModel": "modeling.Model", "AutoConfig": "modeling.Config"})
    monkeypatch.setattr(socket.socket, "connect", lambda *address: pytest.fail(f"connects to {address}"))
    served = f"--policy {policy},page_size=16,num_pages=20 --prompts prompts.jsonl --json"
    (summary,) = succeed("live trace.jsonl --model m", served).json["policies"]
    assert summary["completed"] == 4
    assert not Path("ran").exists()


class StoppedError(Exception):
    """Enough was seen."""


MODEL = "--model model --device cpu -o out.json"
PROFILE = f"profile {MODEL} --block-length 4 --mask-token-id 95 --budget 2s --prompts ids.jsonl --eos"


@pytest.fixture(autouse=True)
def _untold() -> None:
    """A checkpoint that does not say its block, its mask and its EOS, and prompts."""
    sdar(Path("model"))
    rewrite(Path("model"), block_size=None, mask_token_id=None, eos_token_id=7)
    save([[3, 4, 5, 6] * 20] * 3, "ids.jsonl")


@cases("command", "profile", "validate --profile a100-sdar-8b", "serve")
@cases(
    "given said",
    ("", "has no block_size, which the checkpoint was trained with: say it (--block-length)"),
    ("--block-length 4 --mask-token-id 97", "mask_token_id is 97, expected below vocab_size, 97"),
)
def test_what_a_directory_does_not_say_is_asked_for(command: str, given: str, said: str) -> None:
    assert said in dsim(command, MODEL, given).refusal


def test_profile_logs_commits_with_the_mask_the_block_and_the_eos_that_are_given(
    monkeypatch: pytest.MonkeyPatch,
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
    with pytest.raises(StoppedError):
        dsim(PROFILE)
    assert seen == [(4, 95, (7,))]


def test_validate_serves_with_the_options_of_the_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    def listen(_out: Any, _base: Any, live: Any, **how: Any) -> Any:
        assert (live.loaded.model.config.block_length, live.tokenizer) == (4, ".")
        raise StoppedError

    monkeypatch.setattr("dsim.planner.validation.validate", listen)
    options = "--seconds 1 --profile a100-sdar-8b --block-length 4 --mask-token-id 95 --tokenizer ."
    with pytest.raises(StoppedError):
        dsim("validate", MODEL, options)


def test_an_eos_that_the_checkpoint_does_not_name_ends_nothing() -> None:
    rewrite(Path("model"), eos_token_id=None)
    assert "names EOS [] and 1 workloads: expected some of both" in dsim(PROFILE).refusal
