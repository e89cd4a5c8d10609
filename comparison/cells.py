"""Compare runs of the same requests, policy by policy."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ..engine.errors import DsimError, PolicyError
from ..files.read import cut
from ..profiler.placed import placed
from ..profiler.profile import Profile
from ..report.table import value
from ..results.metrics import CANCELLED, COMPLETED, METRICS, STATS, Floats, Summary, no_nan, path
from ..results.run import Columns, Run
from .bounds import DISTRIBUTIONS, Bound, Judged, judge
from .errors import DEFINITIONS as ERROR_DEFINITIONS
from .errors import Errors, errors, ks_distance, relative_error
from .parts import Parts, parts, per_request
from .ranking import DEFINITIONS as RANKING_DEFINITIONS
from .ranking import Verdict, pooled_taus, rankings
from .steps import Steps, compare_steps
from .summaries import is_client, summary

Progress = Callable[[str, int, int], None]  # policy, steps re-run, approximate total

PER_REQUEST = tuple(name for name in DISTRIBUTIONS if METRICS[name].of)
# Of a whole run; of batch and chunk the mean.
TOTALS = {
    name: path(name, *metric.stats[:1])
    for name, metric in METRICS.items()
    if metric.group in ("Requests", "Steps") and metric.unit != "ms"
}
DEFINITIONS = ERROR_DEFINITIONS | RANKING_DEFINITIONS
UNKNOWN = "unknown"
SAME_ARRIVAL = 1e-9  # s
CLOSE_ARRIVAL = 0.01  # s: a smaller difference of arrivals is a note, a larger an error


@dataclass(frozen=True)
class Side:
    """Where a run's numbers come from."""

    folder: str
    driver: str  # twin, live or client
    device: str
    model: str  # and its weights, if derived
    profile: str  # empty: a live run without one
    estimated: bool  # the profile is not measured
    doubts: tuple[str, ...]  # of the profile: failed checks and doubted kinds of steps
    commits: str  # twin: the profile's draws; model: the weights; server: unknown
    interrupted: bool


@dataclass(frozen=True)
class MetricErrors:
    """A latency metric of both runs in its unit, and its error."""

    unit: str
    predicted: dict[str, float | None]  # by statistic, over that run's completed requests
    measured: dict[str, float | None]
    error: dict[str, float]
    ks: float  # NaN for step_latency
    requests: Errors | None  # None: commits are not paired


@dataclass(frozen=True)
class Total:
    unit: str
    predicted: float | None
    measured: float | None
    error: float


@dataclass(frozen=True)
class PolicyErrors:
    pair: int  # index
    policy: str
    unpaired: str  # why not; empty: they are
    num_both: int  # completed in both
    left_out: dict[str, int]  # requests, by reason
    metrics: dict[str, MetricErrors]
    totals: dict[str, Total]
    steps: Steps | None  # None: a run has no step journal
    parts: Parts | None
    no_parts: str  # why there are none

    @property
    def name(self) -> str:
        """Names the pair unless it is the first."""
        return self.policy if self.pair == 0 else f"{self.policy} (pair {self.pair + 1})"


@dataclass(frozen=True)
class Ranking:
    """Cells with the same requests, ranked by each metric."""

    cells: list[str]
    metrics: dict[str, Verdict]


@dataclass(frozen=True)
class Comparison:
    """The fields are the keys of `--json`."""

    pairs: list[tuple[Side, Side]]
    cells: list[PolicyErrors]
    overall: dict[str, Errors]  # by metric, over all paired cells' requests
    rankings: list[Ranking]
    tau: dict[str, float]  # by metric, over pairs of cells within a ranking
    bounds: list[Judged]
    notes: list[str]

    def to_json(self) -> dict[str, Any]:
        """For `--json`, with null for NaN."""
        pairs = [{"predicted": asdict(p), "measured": asdict(m)} for p, m in self.pairs]
        return dict(no_nan({"definitions": DEFINITIONS, **asdict(self), "pairs": pairs}))


def compare_runs(
    pairs: Sequence[tuple[Run, Run]],
    profiles: Callable[[str], Profile],
    bounds: Sequence[Bound] = (),
    *,
    seeds: int = 0,
    progress: Progress | None = None,
) -> Comparison:
    """Compare (predicted, measured) pairs; DsimError if a pair's requests differ.

    profiles: by the name in a run, to re-run each policy and decompose its error. seeds: other ones to re-run with.
    """
    cells: list[PolicyErrors] = []
    notes: list[str] = []
    relative: dict[str, list[tuple[Floats, Floats]]] = {}
    of_traffic: dict[bytes, list[int]] = {}
    summaries: list[tuple[Summary, Summary]] = []
    for i, (p, m) in enumerate(pairs):
        _check_pair(p, m)
        shared = [name for name in p.policies if name in m.policies]
        alone = [name for name in (*p.policies, *m.policies) if name not in shared]
        if alone:
            notes.append(f"pair {i + 1}: only one of its runs holds {', '.join(alone)}: left out")
        for policy in shared:
            sides = summary(p, policy), summary(m, policy)
            cell, values, traffic, cell_notes = _cell(i, p, m, policy, sides, profiles, seeds, progress)
            notes += cell_notes
            if not cell.unpaired:
                for name, both in values.items():
                    relative.setdefault(name, []).append(both)
            of_traffic.setdefault(traffic, []).append(len(cells))
            cells.append(cell)
            summaries.append(sides)
    ranked: list[Ranking] = []
    groups = []
    for members in of_traffic.values():
        names = [cells[j].name for j in members]
        p_sides, m_sides = zip(*(summaries[j] for j in members), strict=True)
        found = rankings(names, p_sides, m_sides)
        if found:
            ranked.append(Ranking(names, found))
            groups.append((p_sides, m_sides))
    overall = {name: errors(*map(np.concatenate, zip(*both, strict=True))) for name, both in relative.items()}
    verdicts = [judge(bound, cell.name, cell.metrics, cell.unpaired) for bound in bounds for cell in cells]
    tau = pooled_taus(groups) if groups else {}
    return Comparison([(side(p), side(m)) for p, m in pairs], cells, overall, ranked, tau, verdicts, notes)


def side(run: Run) -> Side:
    """A run's side, from its manifest."""
    info = run.info
    machine = info.live or info.profile
    weights = f" ({info.live.weights})" if info.live is not None and info.live.weights else ""
    return Side(
        folder=str(run.folder),
        driver=info.driver,
        device=UNKNOWN if machine is None else machine.device,
        model=UNKNOWN if machine is None else machine.model + weights,
        profile="" if info.profile is None else info.profile.name,
        estimated=info.profile is None or info.profile.estimated,
        doubts=tuple(f"DOUBTED: {line}" for line in info.doubted),
        commits=info.commits,
        interrupted=info.interrupted,
    )


def not_paired(predicted: Run, measured: Run, policy: str) -> str:
    """Why commits differ by chance, so that requests are not paired; empty if they are drawn alike."""
    if _commits_tokens(predicted, policy):
        return ""
    for run in (predicted, measured):
        if is_client(run):
            return f"it is unknown what decided the commits of {run.folder}"
        if run.info.commits == "model":
            return f"the weights decided the commits of {run.folder}"
    seeds = [run.info.seed for run in (predicted, measured)]
    if seeds[0] != seeds[1]:
        return f"commits were drawn with seed {seeds[0]} and with seed {seeds[1]}"
    return ""


def _commits_tokens(run: Run, policy: str) -> bool:
    """Whether a policy commits next tokens; False for a client's unknown one."""
    try:
        return run.policy(policy).rows.commits == "tokens"
    except PolicyError:
        return False


def _cell(
    pair: int, p: Run, m: Run, policy: str, summaries: tuple[Summary, Summary],
    profiles: Callable[[str], Profile], seeds: int, progress: Progress | None,
) -> tuple[PolicyErrors, dict[str, tuple[Floats, Floats]], bytes, list[str]]:  # fmt: skip
    requests = p.requests(policy), m.requests(policy)
    index, left_out, traffic, notes = _shared_requests(p, m, policy, *requests)
    values = [per_request(columns, index) for columns in requests]
    both = {name: (values[0][name], values[1][name]) for name in PER_REQUEST}
    unpaired = not_paired(p, m, policy)
    metrics = {}
    for name in DISTRIBUTIONS:
        sides = [{stat: value(s, path(name, stat)) for stat in STATS} for s in summaries]
        metrics[name] = MetricErrors(
            METRICS[name].unit,
            sides[0],
            sides[1],
            {stat: relative_error(sides[0][stat], sides[1][stat]) for stat in STATS},
            ks_distance(*both[name]) if name in both else np.nan,
            errors(*both[name]) if name in both and not unpaired else None,
        )
    totals = {}
    for name, keys in TOTALS.items():
        x, y = (value(s, keys) for s in summaries)
        if x is not None and y is not None:
            totals[name] = Total(METRICS[name].unit, x, y, relative_error(x, y))
    latency, found, why = None, None, _no_parts(p, m, policy)
    if not why:
        profile_name = placed(policy)[1]
        tick = None if progress is None else lambda done, total: progress(policy, done, total)
        try:
            p_profile = profiles(profile_name or side(p).profile)
            # Where weights decide commits there is no profile.
            m_profile = profiles(profile_name or side(m).profile) if side(m).profile else p_profile
            found = parts(p, m, policy, p_profile, m_profile, index, tick, seeds)
            latency = p_profile.latency
        except DsimError as error:
            why = str(error)
    steps = None
    if has_steps(p, policy) and has_steps(m, policy):
        steps = compare_steps(
            p.steps(policy), p.step_lists(policy), m.steps(policy), m.step_lists(policy), m.requests(policy),
            p.policy(policy), latency,
        )  # fmt: skip
    num_both = len(index) - left_out["not completed in both"]
    cell = PolicyErrors(pair, policy, unpaired, num_both, left_out, metrics, totals, steps, found, why)
    return cell, both, traffic, notes


def has_steps(run: Run, policy: str) -> bool:
    return next(run.step_batches(policy, ["step"]), None) is not None


def _shared_requests(
    p: Run, m: Run, policy: str, a: Columns, b: Columns
) -> tuple[Any, dict[str, int], bytes, list[str]]:
    """The common requests, counts left out, their traffic's key, notes.

    DsimError if the requests differ.
    """
    clients = is_client(p) or is_client(m)
    partial = side(p).interrupted or side(m).interrupted or clients
    if len(a["request"]) != len(b["request"]) and not partial:
        raise DsimError(
            f"{p.folder} holds {len(a['request'])} requests of {cut(policy)}, {m.folder} holds {len(b['request'])}: "
            "expected two runs of the same trace"
        )
    index, i, j = np.intersect1d(a["request"], b["request"], return_indices=True)
    if not len(index):
        raise DsimError(f"{p.folder} and {m.folder} share no request of {cut(policy)}")
    notes = []
    for name in ("input_length", "output_length", "max_tokens", "arrival"):
        x, y = a[name][i].astype(np.float64), b[name][j].astype(np.float64)
        if name == "arrival" and p.info.closed_loop:
            continue  # derived from latencies
        if name in ("input_length", "max_tokens") and clients:
            continue  # a server may count otherwise; the import warns
        off = np.abs(x - y - (x[0] - y[0] if clients and name == "arrival" else 0))  # a client's clock has no zero
        if name == "output_length":  # a live request's limit, which an EOS may undercut
            off = np.minimum(off, np.abs(_returned(a, i) - _returned(b, j)))
        other = np.flatnonzero(off > (CLOSE_ARRIVAL if name == "arrival" else 0))
        if len(other):
            k = other[0]
            raise DsimError(
                f"request {index[k]} has {name} {x[k]:g} in {p.folder} and {y[k]:g} in {m.folder}: expected two runs "
                "of the same trace" + (" (dsim import FILE --trace T, the predicted run's)" if clients else "")
            )
        apart = off > SAME_ARRIVAL + 1e-9 * np.abs(y)
        if apart.any():
            notes.append(
                f"{policy}: {int(apart.sum())} of {len(index)} arrivals differ in the two runs, by at most "
                f"{1e3 * off.max():.3g} ms"
            )
    traffic = b"".join(b[name][j].tobytes() for name in ("request", "input_length", "output_length"))
    closed = p.info.closed_loop
    traffic += p.info.trace.arrival.encode() if closed else b["arrival"][j].tobytes()
    done = (a["status"][i] == COMPLETED) & (b["status"][j] == COMPLETED)
    left_out = {
        "not completed in both": int((~done).sum()),
        "not arrived in both": len(a["request"]) + len(b["request"]) - 2 * len(index),
    }
    return index.astype(np.int64), left_out, traffic, notes


def _returned(requests: Columns, rows: Any) -> Floats:
    """Tokens returned by each request; if it is unfinished, requested."""
    done = requests["status"][rows] == COMPLETED
    return np.asarray(np.where(done, requests["num_tokens"][rows], requests["output_length"][rows]), np.float64)


def check_machines(pairs: Sequence[tuple[Run, Run]]) -> None:
    """DsimError if a pair's runs are of different models or devices."""
    for p, m in pairs:
        for key in ("model", "device"):
            x, y = (getattr(side(run), key) for run in (p, m))
            if x != y and UNKNOWN not in (x, y):
                raise DsimError(f"{key} is {cut(x)} in {p.folder} and {cut(y)} in {m.folder}: expected the same")


def _check_pair(p: Run, m: Run) -> None:
    if side(p).driver != "twin" and side(m).driver == "twin":
        raise DsimError(f"{p.folder} is {_kind(p)} and {m.folder} a twin's: expected PREDICTED before MEASURED")
    if not set(p.policies) & set(m.policies):
        raise DsimError(
            f"{p.folder} holds policies {cut(', '.join(p.policies))}, {m.folder} holds {cut(', '.join(m.policies))}: "
            "expected at least one in both"
        )
    same = ["closed_loop"]
    if not (is_client(p) or is_client(m)):  # a server's are unknown
        same += ["emit", "replicas"]
    for key in same:
        x, y = (getattr(run.info, key) for run in (p, m))
        if x != y:
            raise DsimError(f"{key} is {cut(x)} in {p.folder} and {cut(y)} in {m.folder}: expected the same in both")


def _no_parts(p: Run, m: Run, policy: str) -> str:
    """Why the error cannot be decomposed, or empty."""
    if side(p).driver != "twin":
        return f"{p.folder} is {_kind(p)}: there is no prediction to take apart"
    for run in (p, m):
        if not has_steps(run, policy):
            return f"{run.folder} has no step journal"
        if (run.requests(policy, ["status"])["status"] == CANCELLED).any():
            return f"clients of {run.folder} cancelled requests, and re-runs serve all of them"
    if p.info.closed_loop:
        return "in a closed loop arrivals follow from latencies"
    return ""


def _kind(run: Run) -> str:
    return "a live run" if side(run).driver == "live" else "a client's"
