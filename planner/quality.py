"""Quality of a policy's answers relative to the full cache: published scores and a user's own, no guesses."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from ..engine.allowed_code import NO_CODE, AllowedCode
from ..engine.errors import CodeError, DsimError, PolicyError
from ..engine.hooks import decide, holds_back, pages_to_admit, placed, preempted, rows_updated, step_over
from ..engine.jit import is_ours
from ..engine.policy import AXES, PRESETS, Policy, name_of, parse, settings_of
from ..files.read import cut, float_of, quoted, read_csv

# Questions of scheduling: they change when and where tokens are computed, never the tokens.
SCHEDULING = frozenset({decide, step_over, rows_updated, holds_back, pages_to_admit, placed, preempted})
TEXT = ("system", "model", "benchmark", "policy", "source")  # columns, not parameters
SCORES = ("score", "baseline")
NEAR = 1e-9
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
    benchmark: str
    preset: str
    parameters: Mapping[str, str]  # as written; blank: any value
    score: float
    baseline: float | None
    source: str


@dataclass(frozen=True, eq=False)
class QualityTable:
    """Scores by policy parameters. Compared by identity, as the caches below need."""

    name: str
    scores: tuple[Score, ...]
    allow_code: AllowedCode = field(default=NO_CODE, repr=False)


@dataclass(frozen=True)
class _Point:
    """A table's setting, over its benchmarks."""

    factors: Mapping[str, Any]  # by field; missing fields may have any value
    relative: float
    worst: tuple[str, float]
    benchmarks: tuple[str, ...]
    source: str


@cache
def published() -> QualityTable:
    """Scores from papers."""
    paths = sorted(Path(__file__).with_name("published").glob("*.csv"))
    return QualityTable(PUBLISHED, tuple(score for path in paths for score in _read(path)))


def load_table(path: str | Path | None, allow_code: AllowedCode = NO_CODE) -> QualityTable | None:
    """A user's CSV of policy fields and `score`, if there is one; see docs/quality.md.

    allow_code: files that its policies may name.
    """
    if path is None:
        return None
    scores = tuple(_read(path))
    if not scores:
        raise DsimError(f"{path} holds no scores, expected at least one row")
    factors = [factors_of_row(score, str(path), allow_code) for score in scores]
    if not any(s.baseline is not None or _is_reference(factor) for s, factor in zip(scores, factors, strict=True)):
        raise DsimError(f"{path} has neither a baseline nor a row of the full cache (threshold 0.9, nothing evicted)")
    return QualityTable(str(path), scores, allow_code=allow_code)


def quality_of(policy: Policy, model: str, table: QualityTable | None = None) -> Quality:
    """Relative to the full cache on this model; None, with the reason, without a score."""
    factors = quality_factors(policy)
    reference = reference_of(policy.family)
    if _family(policy) == _family(reference) and factors == quality_factors(reference):
        return Quality(1.0, "by definition: this is the full cache, and batching does not change tokens")
    if policy.rows.commits == "tokens":
        return Quality(None, "", ("an autoregressive model is another checkpoint, and no score compares the two",))
    table = table or published()
    points = [
        p for p in _points(table, model) if set(p.factors) <= set(factors) and p.factors["family"] == factors["family"]
    ]
    place = PUBLISHED if table.name == PUBLISHED else f"in {table.name}"
    if not points:
        return Quality(None, "", (f"no score is {place} for {name_of(policy.name)} on {model}",))
    closest = min(points, key=lambda p: len(_distance(p, factors)))
    distance = _distance(closest, factors)
    if not distance:
        notes: tuple[str, ...] = ()
        if len(closest.benchmarks) > 1:
            worst, share = closest.worst
            notes = (f"mean of {', '.join(closest.benchmarks)}; the worst is {worst}, {100 * share:.1f} %",)
        return Quality(closest.relative, closest.source, notes)
    if len(distance) == 1:
        (name,) = distance
        line = [p for p in points if _distance(p, factors) <= distance and name in p.factors]
        if len(line) > 1 and all(_number(p.factors[name]) for p in line) and _number(factors[name]):
            return _between(line, name, factors[name], place)
    name = min(distance, key=list(factors).index)
    return Quality(None, "", (f"{name} is {factors[name]}, and no score is {place} for that on {model}",))


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
    text_of_share = str(text).strip()
    share = float_of(text_of_share.removesuffix("%")) / (100 if text_of_share.endswith("%") else 1)
    if not 0 < share <= 1.5:
        raise DsimError(f"quality {cut(text)} is not a share of the full cache's, expected such as 98% or 0.98")
    return share


def factors_of_row(score: Score, place: str, allow_code: AllowedCode) -> dict[str, Any]:
    """The preset's fields, replaced by the row's cells; blank cells mean any value."""
    spec = ",".join([score.preset, *(f"{name}={value}" for name, value in score.parameters.items() if value)])
    try:
        factors = quality_factors(parse(spec, allow_code))
    except (CodeError, PolicyError) as error:
        raise DsimError(f"{place}: {error}") from None
    return {name: value for name, value in factors.items() if score.parameters.get(name, "-")}


def _read(path: str | Path) -> Iterator[Score]:
    for line, cells in read_csv(path, ["score"]):
        fields = [name for name in cells if name not in (*TEXT, *SCORES)]
        numbers = {name: _score(cells.get(name, ""), name, line) for name in SCORES}
        score = numbers["score"]
        if score is None:
            raise DsimError(f"{line}: score is blank, expected a number")
        yield Score(
            system=cells.get("system", ""),
            model=cells.get("model", ""),
            benchmark=cells.get("benchmark", ""),
            preset=cells.get("policy") or _preset_with(fields, line),
            parameters={name: cells[name] for name in fields},
            score=score,
            baseline=numbers["baseline"],
            source=cells.get("source") or str(path),
        )


def _score(cell: str, name: str, line: str) -> float | None:
    if not cell:
        return None
    value = float_of(cell)
    if not (math.isfinite(value) and value >= 0) or (name == "baseline" and value == 0):
        raise DsimError(f"{line}: {name} is {quoted(cell)}, expected a number above zero")
    return value


def _preset_with(fields: list[str], line: str) -> str:
    """The preset of a row without `policy`: whole blocks, if it has the row's fields."""
    for name in sorted(PRESETS, key=lambda name: not PRESETS[name].reference):
        if set(fields) <= set(settings_of(PRESETS[name].policy)):
            return name
    fields_of_presets = dict.fromkeys(f for p in PRESETS.values() for f in settings_of(p.policy))
    strange = [f for f in fields if f not in fields_of_presets]
    if strange:
        raise DsimError(
            f"{line}: there is no policy field {quoted(strange[0])}; the fields are {', '.join(fields_of_presets)}"
        )
    raise DsimError(f"{line}: no policy has all of {', '.join(fields)}, expected a column `policy` that says which")


@cache
def _points(table: QualityTable, model: str) -> tuple[_Point, ...]:
    """A table's settings on a model, each with its benchmarks."""
    groups: dict[tuple[tuple[str, Any], ...], list[Score]] = {}
    for score in table.scores:
        if _same_model(score.model, model):
            factors = factors_of_row(score, table.name, table.allow_code)
            groups.setdefault(tuple(factors.items()), []).append(score)
    # A ratio to a zero score is undefined.
    full = {s.benchmark: s.score for key, g in groups.items() if _is_reference(dict(key)) for s in g if s.score}
    points = []
    for key, scores in groups.items():
        based = [(s, s.baseline or full.get(s.benchmark)) for s in scores]
        pairs = [(s, b) for s, b in based if b is not None]
        if len(pairs) < len(based):
            continue
        relative = sum(s.score for s, _ in pairs) / sum(b for _, b in pairs)
        share, worst = min((s.score / b, s.benchmark) for s, b in pairs)
        names = tuple(s.benchmark for s, _ in pairs)
        points.append(_Point(dict(key), relative, (worst, share), names, pairs[0][0].source))
    return tuple(points)


def _between(line: list[_Point], name: str, value: float, place: str) -> Quality:
    """On the line between the nearest two settings."""
    line = sorted(line, key=lambda p: float(p.factors[name]))
    values = [float(p.factors[name]) for p in line]
    if not values[0] < value < values[-1]:
        scored = ", ".join(f"{v:g}" for v in values)
        return Quality(None, "", (f"{name} is {value:g}, and scores are {place} at {scored}: none is extrapolated",))
    i = next(i for i, v in enumerate(values) if v > value)
    low, high = line[i - 1], line[i]
    share = (value - values[i - 1]) / (values[i] - values[i - 1])
    relative = low.relative + share * (high.relative - low.relative)
    return Quality(relative, low.source, (f"on a line between {name} {values[i - 1]:g} and {values[i]:g}",))


def _distance(point: _Point, factors: Mapping[str, Any]) -> set[str]:
    """Fields that differ."""
    fields = set()
    for name, scored in point.factors.items():
        value = factors[name]
        if not (abs(scored - value) < NEAR if _number(scored) and _number(value) else scored == value):
            fields.add(name)
    return fields


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _family(policy: Policy) -> str:
    kinds = [type(axis).__name__ for axis in (policy.granularity, policy.eviction, policy.cache)]
    for axis in AXES:
        part = getattr(policy, axis)
        schedules = axis == "batching" and set(part.answers(policy)) <= SCHEDULING
        if not is_ours(type(part)) and not schedules:  # may change answers
            kinds.append(f"{type(part).__module__}.{type(part).__qualname__}")
    return " ".join(kinds)


def reference_of(family: str) -> Policy:
    """The full cache, of quality 1 by definition: whole blocks, no eviction, default threshold.

    Full-sequence models: the whole sequence every step, one token committed. Canvases: the model's own.
    """
    exact = family if family in ("full-sequence", "canvas") else "block-diffusion"
    return next(p.policy for p in PRESETS.values() if p.reference and p.policy.family == exact)


def _is_reference(factors: Mapping[str, Any]) -> bool:
    return dict(factors) == quality_factors(reference_of("block-diffusion"))


def _same_model(written: str, model: str) -> bool:
    """LLaDA-8B-Instruct is LLaDA-8B."""
    a, b = written.lower(), model.lower()
    return not a or a == b or a.startswith(f"{b}-") or b.startswith(f"{a}-")
