"""Quality of a policy's answers relative to the full cache: published scores and a user's own, no guesses."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from ..engine.allowed_code import NO_CODE, AllowedCode
from ..engine.errors import CodeError, DsimError, PolicyError
from ..engine.hooks import decide, holds_back, pages_to_admit, placed, preempted, rows_updated, step_over
from ..engine.jit import is_ours
from ..engine.part import CAPS
from ..engine.spec import AXES, PRESETS, Policy, name_of, parse, settings_of
from ..files.read import FilePath, cut, float_of, quoted, read_csv, share_of
from .candidate import with_fields

# Questions of scheduling: they change when and where tokens are computed, never the tokens.
SCHEDULING = frozenset({decide, step_over, rows_updated, holds_back, pages_to_admit, placed, preempted})
TEXT = ("system", "model", "benchmark", "policy", "source")  # columns, not parameters
SCORES = ("score", "baseline")
PUBLISHED = "published"
PUBLISHED_TEMPERATURE = 1.0


@dataclass(frozen=True)
class Quality:
    """A score relative to the full cache's; None: not measured."""

    relative: float | None
    source: str
    notes: tuple[str, ...] = ()
    same: bool = False  # the answers are those of the policy to beat

    def __str__(self) -> str:
        return "unknown" if self.relative is None else f"{100 * self.relative:.1f} %"

    def shortfall(self, least: float | None) -> str:
        """Why it is not enough; empty: it is."""
        if least is None or (self.relative or 0.0) >= least:
            return ""
        if self.relative is None:
            return f"unknown: {self.notes[0]}"
        return f"{self}, expected at least {100 * least:g} %"


@dataclass(frozen=True)
class Score:
    """A row of a table."""

    system: str
    model: str  # empty: any
    preset: str
    parameters: Mapping[str, str]  # as written; blank: any value
    score: float
    baseline: float  # of the full cache
    source: str


@dataclass(frozen=True, eq=False)
class QualityTable:
    """Scores by policy parameters. Compared by identity, as the caches below need."""

    name: str
    scores: tuple[Score, ...]
    allow_code: AllowedCode = field(default=NO_CODE, repr=False)


@dataclass(frozen=True)
class _Point:
    """A table's setting, by the sums over its benchmarks."""

    factors: Mapping[str, Any]  # by field; missing fields may have any value
    relative: float
    source: str

    def differences(self, factors: Mapping[str, Any]) -> list[str]:
        """Fields that differ, in their order."""
        return [name for name, value in factors.items() if name in self.factors and self.factors[name] != value]


@cache
def published() -> QualityTable:
    """Scores from papers."""
    paths = sorted(Path(__file__).with_name("published").glob("*.csv"))
    return QualityTable(PUBLISHED, tuple(score for path in paths for score in _read(path)))


def load_table(path: FilePath | None, allow_code: AllowedCode = NO_CODE) -> QualityTable | None:
    """A user's CSV of policies, their fields, `score` and `baseline`, if there is one; see docs/quality.md.

    allow_code: files that its policies may name.
    """
    if path is None:
        return None
    scores = tuple(_read(path))
    if not scores:
        raise DsimError(f"{path} holds no scores, expected at least one row")
    for score in scores:
        factors_of_row(score, str(path), allow_code)
    return QualityTable(str(path), scores, allow_code=allow_code)


def quality_of(policy: Policy, model: str, table: QualityTable | None = None) -> Quality:
    """Relative to the full cache on this model; None, with the reason, without a score."""
    factors = quality_factors(policy)
    if factors == quality_factors(reference_of(policy.family)):
        return Quality(1.0, "by definition: this is the full cache, and batching does not change tokens")
    if policy.rows.commits == "tokens":
        return Quality(None, "", ("an autoregressive model is another checkpoint, and no score compares the two",))
    table = table or published()
    place = f"in {table.name}".replace(f"in {PUBLISHED}", PUBLISHED)
    points = [
        p for p in _points(table, model) if set(p.factors) <= set(factors) and p.factors["family"] == factors["family"]
    ]
    if not points:
        return Quality(None, "", (f"no score is {place} for {name_of(policy.name)} on {model}",))
    closest = min(points, key=lambda p: len(p.differences(factors)))
    if not closest.differences(factors):
        return Quality(closest.relative, closest.source)
    [name, *further] = closest.differences(factors)
    value = factors[name]
    line = {p.factors[name]: p for p in points if name in p.factors and set(p.differences(factors)) <= {name}}
    if further or len(line) < 2 or not all(isinstance(v, int | float) for v in (value, *line)):
        return Quality(None, "", (f"{name} is {value}, and no score is {place} for that on {model}",))
    values = sorted(line)
    if not values[0] < value < values[-1]:
        scored = ", ".join(f"{v:g}" for v in values)
        return Quality(None, "", (f"{name} is {value:g}, and scores are {place} at {scored}: none is extrapolated",))
    relative = float(np.interp(value, values, [line[v].relative for v in values]))
    return Quality(relative, closest.source, (f"on a line between scores of {name}",))


def quality_factors(policy: Policy) -> dict[str, Any]:
    """Fields that may change tokens."""
    factors = {name: value for name, value in settings_of(policy).items() if name not in policy.neutral}
    # None: the temperature of the profile's fit.
    if factors.get("temperature") == PUBLISHED_TEMPERATURE:
        factors["temperature"] = None
    return {"family": _family(policy), **factors}


def parse_share(text: str | float | None) -> float | None:
    """98% or 0.98; None: not asked for."""
    if text is None:
        return None
    share = share_of(str(text).strip())
    if not 0 < share <= 1.5:
        raise DsimError(f"quality {cut(text)} is not a share of the full cache's, expected such as 98% or 0.98")
    return share


def factors_of_row(score: Score, place: str, allow_code: AllowedCode) -> dict[str, Any]:
    """The preset's fields, replaced by the row's cells; blank cells mean any value."""
    spec = with_fields(score.preset, {name: value for name, value in score.parameters.items() if value})
    try:
        factors = quality_factors(parse(spec, allow_code))
    except (CodeError, PolicyError) as error:
        raise DsimError(f"{place}: {error}") from None
    return {name: value for name, value in factors.items() if score.parameters.get(name, "-")}


def _read(path: FilePath) -> Iterator[Score]:
    for line, cells in read_csv(path, ["policy", *SCORES]):
        numbers = {name: float_of(cells[name]) for name in SCORES}
        for name, value in numbers.items():
            if not 0 <= value < math.inf or (name == "baseline" and value == 0):
                raise DsimError(f"{line}: {name} is {quoted(cells[name])}, expected a number above zero")
        yield Score(
            system=cells.get("system", ""),
            model=cells.get("model", ""),
            preset=cells["policy"],
            parameters={name: cell for name, cell in cells.items() if name not in (*TEXT, *SCORES)},
            source=cells.get("source") or str(path),
            **numbers,
        )


@cache
def _points(table: QualityTable, model: str) -> tuple[_Point, ...]:
    """A table's settings on a model, each with its benchmarks."""
    groups: dict[tuple[tuple[str, Any], ...], list[Score]] = {}
    for score in table.scores:
        if _same_model(score.model, model):
            factors = factors_of_row(score, table.name, table.allow_code)
            groups.setdefault(tuple(factors.items()), []).append(score)
    points = []
    for key, scores in groups.items():
        relative = sum(s.score for s in scores) / sum(s.baseline for s in scores)
        points.append(_Point(dict(key), relative, scores[0].source))
    return tuple(points)


def _family(policy: Policy) -> str:
    kinds = [type(axis).__name__ for axis in (policy.granularity, policy.eviction, policy.cache)]
    for axis in AXES:
        part = getattr(policy, axis)
        schedules = axis == "batching" and set(part.answers(policy)) <= SCHEDULING
        schedules = schedules or (axis == "discipline" and not part.questions & CAPS)
        if not is_ours(type(part)) and not schedules:  # may change answers
            kinds.append(f"{type(part).__module__}.{type(part).__qualname__}")
    return " ".join(kinds)


def reference_of(family: str) -> Policy:
    """The full cache, of quality 1 by definition: whole blocks, no eviction, default threshold.

    Full-sequence models: the whole sequence every step, one token committed. Canvases: the model's own.
    """
    exact = family if family in ("full-sequence", "canvas") else "block-diffusion"
    return next(p.policy for p in PRESETS.values() if p.reference and p.policy.family == exact)


def _same_model(written: str, model: str) -> bool:
    """LLaDA-8B-Instruct is LLaDA-8B."""
    a, b = written.lower(), model.lower()
    return not a or a == b or a.startswith(f"{b}-") or b.startswith(f"{a}-")
