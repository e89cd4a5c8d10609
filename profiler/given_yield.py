"""A user's yield in place of a profile's commit models: a number, a table by threshold, or a log.

docs/profiles.md lists the forms. Spreads are assumed (calibrate.py).
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from ..engine.commits import CanvasLaw, CommitModel
from ..engine.errors import ProfileError
from ..engine.spec import Policy
from ..files.metrics_text import read_samples
from ..files.read import cut, quoted, read_csv
from .calibrate import calibrate_commits, per_denoise_step
from .canvas_law import with_mean
from .fit_commits import fit_commits
from .placed import yield_files
from .profile import Profile
from .steplog import read_log

FORMS = "tokens a denoise step (3.2), per-forward:X, a .csv by threshold, a step log, or for canvases a page of metrics"
# Forwards of rows, with the commits, and delivered tokens.
COUNTERS = ("vllm:diffusion_num_denoising_steps_total", "vllm:diffusion_num_committed_tokens_total")
MOST_BLOCK = 256  # tokens of a block or canvas
COLUMNS = ("threshold", "yield")  # optional: block_length


def with_yield(profile: Profile, text: str, policy: Policy) -> Profile:
    """The profile with commit models from `text`; unchanged for an autoregressive policy."""
    if policy.commits_by == "acceptance":
        return profile
    unmasking = policy.unmasking
    if policy.commits_by == "law":
        return replace(profile, canvas_laws=(given_law(text, policy, profile.canvas_laws),))
    models = given_yield(text, policy.block_length, unmasking.threshold, unmasking.temperature)
    return replace(profile, commits=models, commit_fits=())


def given_yield(
    text: str, block_length: int, threshold: float, temperature: float | None = None
) -> tuple[CommitModel, ...]:
    """The commit models of a `--yield`; a number is the yield at this block length and threshold.

    ProfileError for a form not in FORMS and for an impossible yield.
    """
    changed = os.stat(text).st_mtime_ns if os.path.isfile(text) else 0
    if text.endswith(".csv"):
        return _table(text, changed, block_length, temperature)
    if os.path.isfile(text):
        return _log(text, changed)
    kind, _, number = text.rpartition(":")
    if kind not in ("", "per-forward"):
        raise ProfileError(f"yield is {cut(text)}, expected {FORMS}")
    tokens = _number(text, number)
    if kind:
        tokens = per_denoise_step(tokens, block_length) if tokens < block_length else float("inf")
    return (_model(text, _mean(text, tokens, block_length), block_length, threshold, temperature),)


def given_law(text: str, policy: Policy, laws: Sequence[CanvasLaw]) -> CanvasLaw:
    """The law of forwards per canvas or edited block whose mean gives these tokens a forward.

    A number counts denoising forwards, `per-forward:X` also the last, which writes a canvas's KV. Spreads and bounds
    are those of the profile's first law of that length. ProfileError for other forms.
    """
    length = policy.block_length
    like = next((law for law in laws if law.canvas_length == length), None)
    if like is None:
        lengths = ", ".join(str(n) for n in sorted({law.canvas_length for law in laws})) or "none"
        raise ProfileError(f"--yield is {cut(text)} and the profile holds laws of {lengths} tokens, expected {length}")
    if pages := yield_files(text):
        text = f"per-forward:{_counted(pages)!r}"
    kind, _, number = text.rpartition(":")
    if kind not in ("", "per-forward"):
        raise ProfileError(
            f"yield is {cut(text)}, and {policy.name} takes its number of forwards from a law: expected tokens a "
            "forward (3.2) or per-forward:X"
        )
    forwards = length / _number(text, number)
    if kind and not policy.granularity.on_a_grid:
        forwards -= 1.0
    limit = like.most - 0.5
    if not like.least <= forwards < limit:
        raise ProfileError(
            f"yield is {cut(text)}, {forwards:.3g} forwards for {length} tokens, expected {like.least} to {like.most}"
        )
    return replace(
        with_mean(replace(like, drift=1.0), forwards), workload="given",
        source=f"--yield {','.join(pages) or text}: {forwards:.4g} forwards for {length} tokens; requests and blocks "
        f"differ as in {like.workload}",
    )  # fmt: skip


def _counted(pages: Sequence[str]) -> float:
    """Tokens a forward by vLLM's counters: of one page of metrics, or between two.

    The answers' last canvases count as what was delivered of them, so the yield is never too high.
    """
    if len(pages) > 2:
        raise ProfileError(f"yield is {cut(','.join(pages))}, expected one page of metrics, or two: before,after")
    after = read_samples(pages[-1])
    before = read_samples(pages[0]) if len(pages) == 2 else {}
    steps, tokens = (after.get(name, 0.0) - before.get(name, 0.0) for name in COUNTERS)
    if not (steps > 0 and tokens > 0):
        raise ProfileError(
            f"{','.join(pages)}: {COUNTERS[0]} counts {steps:g} and {COUNTERS[1]} {tokens:g}, expected both above 0"
        )
    return tokens / steps


def _number(text: str, number: str) -> float:
    try:
        value = float(number)
    except ValueError:
        if text != number:
            raise ProfileError(f"{text}: yield is {quoted(number)}, expected a number above 0") from None
        raise ProfileError(f"yield is {cut(text)}, expected {FORMS}") from None
    if not 0 < value < 1e9:
        problem = f"yield is {cut(text)}" if text == number else f"{text}: it has {quoted(number)}"
        raise ProfileError(f"{problem}, expected a number above 0 and below 1e9")
    return value


def _mean(text: str, mean: float, block_length: int) -> float:
    if not 1.0 <= mean < block_length:
        raise ProfileError(
            f"yield is {cut(text)}, {mean:.3g} tokens a denoise step, expected at least 1 and fewer than the "
            f"{block_length} of a block"
        )
    return mean


@lru_cache(maxsize=64)
def _model(
    text: str, mean: float, block_length: int, threshold: float, temperature: float | None, place: str = "--yield"
) -> CommitModel:
    return calibrate_commits(
        mean,
        block_length=block_length,
        workload="given",
        threshold=threshold,
        temperature=temperature,
        source=f"{place} {text}: {mean:.4g} tokens a denoise step of {block_length}; how steps and requests differ is "
        "assumed",
    )


@lru_cache(maxsize=8)
def _table(path: str, _changed: int, block_length: int, temperature: float | None) -> tuple[CommitModel, ...]:
    models: dict[tuple[float, int], CommitModel] = {}
    for place, row in read_csv(path, COLUMNS, kind=ProfileError):
        threshold = _number(place, row["threshold"])
        if threshold > 1:
            raise ProfileError(f"{place}: threshold is {threshold:g}, expected at most 1")
        length = _block(place, row["block_length"]) if row.get("block_length") else block_length
        if (threshold, length) in models:
            raise ProfileError(f"{place}: threshold {threshold:g} is given a second time, expected each once")
        mean = _mean(place, _number(place, row["yield"]), length)
        models[threshold, length] = _model(f"{mean:.4g}", mean, length, threshold, temperature, path)
    if not models:
        raise ProfileError(f"{path}: holds no rows, expected at least one of {', '.join(COLUMNS)}")
    return tuple(models.values())


def _block(place: str, text: str) -> int:
    length = _number(place, text)
    if length != int(length) or length > MOST_BLOCK:
        raise ProfileError(f"{place}: block_length is {cut(text)}, expected a whole number up to {MOST_BLOCK}")
    return int(length)


@lru_cache(maxsize=8)
def _log(path: str, _changed: int) -> tuple[CommitModel, ...]:
    log = read_log(path)
    h = log.header
    model, _ = fit_commits(
        log.commits, workload=h.workload, threshold=h.threshold, temperature=h.temperature,
        source=f"--yield {Path(path).name}, a step log of {h.engine} ({h.workload})",
    )  # fmt: skip
    return (model,)
