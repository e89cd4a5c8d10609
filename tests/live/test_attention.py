"""The choice between our attention and FlashInfer's: timed, compared, told, and kept to. A stand-in computes for it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dsim.engine.engine import Limits
from dsim.engine.policy import parse
from dsim.engine.request import Request
from dsim.kernels import taken
from dsim.live import attention as live_attention
from dsim.live import session
from dsim.live.attention import Attention, Timed, choose
from dsim.live.model import Decoder
from dsim.live.prompts import random_prompts
from dsim.live.weights import random_model

from ..kernels import fake_flashinfer
from ..worlds import Collector
from .dense import SMALL

CPU = torch.device("cpu")
TIMES = ("start", "latency", "device")
WIDE = replace(SMALL, head_dim=64)


def attention(*timed: Timed) -> Attention:
    return Attention(fake_flashinfer, SMALL, torch.float32, CPU, list(timed))


def served(model: Decoder, spec: str, graphs: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Any], int, int]:
    """What a run commits, how often either attention was taken, FlashInfer's first."""
    journal, before = Collector(), taken.copy()
    requests = [Request(i, 0.0, 3 + 5 * i, 9) for i in range(3)]
    monkeypatch.setattr(session.Serving, "warm_up", lambda *_: None)
    policy, kept = parse(f"{spec},max_batch=3,page_size=8"), session.Kept() if graphs else None
    serving = session.Serving(model, policy, Limits(60, 64, 3), random_prompts(SMALL, 2), graphs=kept)
    done = session.run(serving, requests, append=journal)
    assert done.failure is None, done.failure
    assert done.num_made_ready == 0
    found = taken - before
    ways = [found["ragged_paged_attention", way] for way in ("flashinfer", "reference")]
    own = {name: values.tolist() for name, values in journal.steps.items() if name not in TIMES}
    return own | {name: values[0].tolist() for name, values in journal.lists.items()}, *ways


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize(
    ("spec", "theirs"), [("lmdeploy-bd32:4", True), ("ar", True), ("chunk:3,block_length=4", False)]
)
def test_whole_blocks_are_served_by_it_and_answer_the_same(
    spec: str, theirs: bool, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = random_model(SMALL, "cpu", torch.float32, seed=1)
    expected, none, _ = served(model, spec, graphs, monkeypatch)
    model.attention = attention(*(Timed(n, 2.0, 1.0) for n in (1, 2, 4)))
    found, took, prompts = served(model, spec, graphs, monkeypatch)
    assert found == expected
    assert (none, took > 0) == (0, theirs)
    assert prompts > 0  # prefills stay


def test_it_is_taken_at_numbers_of_sequences_at_which_it_was_faster() -> None:
    found = attention(Timed(1, 1.0, 2.0), Timed(2, 2.0, 1.0), Timed(4, 1.0, 1.0), Timed(128, 2.0, 1.0))
    assert [n for n in (1, 2, 3, 4, 100, 128, 129, 1024) if found.takes(n)] == [2, 100, 128, 129, 1024]
    assert found.settings == {
        "flashinfer": "0.0-fake", "taken_at": [2, 128],
        "steps": [
            {"sequences": n, "ours_us": 1e6 * ours, "flashinfer_us": 1e6 * theirs}
            for n, ours, theirs in ((1, 1.0, 2.0), (2, 2.0, 1.0), (4, 1.0, 1.0), (128, 2.0, 1.0))
        ],
    }  # fmt: skip


def clock(*seconds: float) -> Callable[[Callable[[], object]], float]:
    """Answers in turn, for what is run all the same."""
    coming = iter(seconds)
    return lambda call: (call(), next(coming))[1]


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SEQUENCES": (1, 2), "CONTEXT": 10, "PAGE": 4, "POOL": 5, "WORKSPACE": 1}.items():
        monkeypatch.setattr(live_attention, name, value, raising=False)


@pytest.mark.usefixtures("short")
def test_a_layer_of_each_and_the_planning_are_timed() -> None:
    record = pytest.importorskip("dsim.live.graphs").recompute
    found = choose(fake_flashinfer, WIDE, torch.bfloat16, CPU, clock(3.0, 2.0, 0.5, 1.0, 0.9, 0.5), record)
    layers = WIDE.layers
    assert found.timed == [Timed(1, 3.0 * layers, 2.0 * layers + 0.5), Timed(2, layers, 0.9 * layers + 0.5)]
    assert found.settings["taken_at"] == [1]


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"off": 0.5}, r"FlashInfer reads values that differ by 0.\d+ from our kernel's, expected at most 0.00781"),
        ({"run": lambda *_: 1 / 0}, "division by zero"),
    ],
)
def test_one_that_reads_something_else_or_fails_is_refused_and_said(
    change: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in change.items():
        monkeypatch.setattr(fake_flashinfer.BatchPrefillWithPagedKVCacheWrapper, name, value)
    found = choose(fake_flashinfer, WIDE, torch.bfloat16, CPU, clock(3.0, 2.0, 0.5, 1.0, 0.9, 0.5))
    assert not found.takes(1)
    assert pytest.importorskip("re").match(says, found.settings["refused"])


@pytest.mark.usefixtures("short")
def test_a_model_has_a_choice_where_it_is_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model(WIDE, "cpu", torch.bfloat16)
    monkeypatch.setattr(live_attention, "at_hand", lambda: None)
    assert live_attention.attention_of(model) is None
    monkeypatch.setattr(live_attention, "at_hand", lambda: fake_flashinfer)
    monkeypatch.setattr(live_attention, "device_seconds", clock(3.0, 2.0, 0.5, 1.0, 0.9, 0.5))
    found = live_attention.attention_of(model)
    assert found is not None
    assert found.settings["taken_at"] == [1]


def test_one_that_is_installed_and_does_not_import_leaves_our_kernel_and_a_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "flashinfer.py").write_text("raise OSError('libcudart.so.13: cannot open\\nshared object file')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert live_attention.attention_of(random_model(WIDE, "cpu", torch.bfloat16)) is None
    assert capsys.readouterr().err == (
        "FlashInfer is installed and cannot be imported (OSError: libcudart.so.13: cannot open shared object file): "
        "attention is dsim's own kernel\n"
    )


def test_heads_that_it_has_no_kernel_for_are_ours() -> None:
    found = choose(fake_flashinfer, SMALL, torch.bfloat16, CPU, clock())
    assert found.settings["refused"].startswith(f"heads of {SMALL.head_dim} in torch.bfloat16: expected one of (64,")
