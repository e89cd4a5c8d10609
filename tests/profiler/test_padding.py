"""A log of requests that run on behind their EOS gives back where they ended, and what they yielded before."""

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from dsim.engine.commits import CommitModel
from dsim.engine.policy import parse
from dsim.profiler.commit_log import CommitLog, from_journal
from dsim.profiler.fit_commits import at_fixed_length, fit_commits
from dsim.profiler.padding import padding_of
from dsim.profiler.profile import load
from dsim.profiler.yields import complete, draw, figures
from dsim.sim.setting import Setting
from dsim.sim.twin import simulate
from dsim.traces import Trace

from .test_fit_commits import KNOWN, known, whole_blocks

BLOCK = 16
LIMIT = 14 * BLOCK
NUM = 120  # requests


def law(num: int, seed: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Answers of a known law: log-normal, cut at the limit."""
    drawn = np.random.default_rng(seed).lognormal(np.log(90.0), 0.6, num)
    return np.clip(np.rint(drawn), 1, LIMIT).astype(np.int64)


def log_of(model: CommitModel, answers: "np.ndarray[Any, np.dtype[np.int64]]", eos: str) -> CommitLog:
    """The commit log of requests that end by the law, on an engine that stops there or goes on."""
    num = len(answers)
    prompts = 40 + np.arange(num) % 23
    trace = Trace("law", np.arange(num) * 1.0, prompts, answers, {"max_tokens": [LIMIT] * num})
    steps: list[Any] = []
    policy = parse(f"lmdeploy-bd32:{BLOCK},eos={eos}")
    setting = Setting(policy, replace(load("a100-sdar-8b"), commits=(model,)))
    simulate(trace, setting, seed=5, append=lambda c, v: steps.append(v))
    requests, window, commits = (np.concatenate([v[n][0] for v in steps]) for n in ("requests", "window", "commits"))
    return complete(from_journal(BLOCK, prompts, requests, window, commits))


@cache
def running_on() -> CommitLog:
    """The log of an engine that ignores the EOS."""
    return log_of(KNOWN[4], law(NUM, seed=2), "ignored")


def blocks_of(answers: "np.ndarray[Any, np.dtype[np.int64]]") -> tuple[Any, Any]:
    """Blocks behind each answer's own, and all that begin with a mask."""
    prompts = 40 + np.arange(len(answers)) % 23
    last = (prompts + LIMIT - 1) // BLOCK
    return last - (prompts + answers - 1) // BLOCK, last - (prompts - 1) // BLOCK


def test_a_known_law_of_ends_is_given_back() -> None:
    found = padding_of(running_on())
    assert found is not None
    truth, num = blocks_of(law(NUM, seed=2))
    assert found.blocks.tolist() == num.tolist()
    # An answer that ends in an ordinary block that committed at once has one more.
    assert np.mean(found.padding == truth) > 0.97
    assert (found.padding >= truth).all()
    # Of the law itself, 120 requests know the share to 2 %.
    padding, num = blocks_of(law(20_000, seed=9))
    assert found.share == pytest.approx(padding.sum() / num.sum(), abs=2 * found.error)
    assert found.error == pytest.approx(
        np.std(padding - padding.sum() / num.sum() * num) / num.mean() / NUM**0.5, rel=0.2
    )


def test_a_fit_leaves_padding_out_and_says_how_much_there_was() -> None:
    fitted, fit = fit_commits(running_on(), workload="known", threshold=0.9)
    truth, num = blocks_of(law(20_000, seed=9))
    error = fit.standard_errors["padding_share"]
    assert fit.padding_share == pytest.approx(truth.sum() / num.sum(), abs=2 * error)
    # Served up to an EOS there is none; a run to a fixed length asks for the other workload.
    assert [(m.workload, m.padding_share) for m in at_fixed_length(fitted, fit)] == [
        ("known", 0.0), ("known-fixed", fit.padding_share)
    ]  # fmt: skip
    mine, theirs = (figures(draw(m, whole_blocks(BLOCK, 4000, 1), seed=9)) for m in (fitted, KNOWN[4]))
    assert mine["tokens per step, mean"] == pytest.approx(theirs["tokens per step, mean"], rel=0.05)
    # With its padding in it, the log commits far more a step.
    assert figures(running_on())["tokens per step, mean"] > 1.3 * theirs["tokens per step, mean"]


@pytest.mark.parametrize("model", [KNOWN[4], known(0.98, 60.0, BLOCK)], ids=["often-in-steps", "often-at-once"])
def test_requests_that_stop_at_their_eos_have_no_padding(model: CommitModel) -> None:
    assert padding_of(log_of(model, law(120, seed=3), "block")) is None


def test_a_log_without_rows_has_no_padding() -> None:
    log = log_of(KNOWN[4], law(2, seed=3), "block")
    assert padding_of(log[np.zeros(len(log), np.bool_)]) is None
