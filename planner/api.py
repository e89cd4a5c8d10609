"""The functions that `import dsim` offers: what the commands do, for scripts and notebooks (docs/python.md)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from ..engine.errors import DsimError
from ..engine.policy import Policy, parse
from ..files.read import quoted
from ..profiler.profile import Profile
from ..profiler.profile import load as load_profile
from ..report.manifest import Manifest
from ..report.metrics import Summary
from ..report.page import Page
from ..report.shown import Showable
from ..report.slo import Slo
from ..sim.twin import Result
from ..traces import Trace
from ..traces import load as load_trace
from .capacity import Capacity, fewest_replicas
from .capacity import capacity as _capacity
from .plan import Planned, candidates_of
from .plan import plan as _plan
from .plan_replays import Posed
from .record import in_twin, record
from .scenario import Scenario, named_code
from .space import candidate_of, load_space, runs_on, searchable, space_of
from .sweep import Sweep, sweep
from .tune import tune as _tune
from .tuned import Tuned

__all__ = [
    "Capacity",
    "Planned",
    "Policy",
    "Profile",
    "Replay",
    "Summary",
    "Sweep",
    "Trace",
    "Tuned",
    "capacity",
    "load_profile",
    "load_trace",
    "parse_policy",
    "plan",
    "replay",
    "sweep",
    "tune",
]


FIELDS = {f.name for f in fields(Scenario)}


@dataclass(frozen=True, repr=False)
class Replay(Showable):
    """The outcome of a replay: one entry a policy, in the order in which they were given."""

    results: list[Result]  # request tables and totals
    summaries: list[Summary]  # metrics
    manifest: Manifest  # what was replayed

    def page(self) -> Page:
        from ..report.story import words

        return words(self.to_json(), self.manifest)

    def to_json(self) -> list[dict[str, Any]]:
        """The metrics of each policy, as `dsim replay --json` has them."""
        return [summary.to_json() for summary in self.summaries]


@dataclass(frozen=True)
class _Given(Posed):
    """A scenario of objects instead of names, where they were given."""

    given_trace: Trace | None = None
    given_policies: tuple[Policy, ...] = ()

    def source(self) -> Trace:
        return super().source() if self.given_trace is None else self.given_trace

    def parsed_policy(self) -> Policy:
        return next((p for p in self.given_policies if p.name == self.policy), None) or super().parsed_policy()


def parse_policy(spec: str, allow_code: Sequence[str | Path] = ()) -> Policy:
    """The policy of a SPEC, whose own file of code is loaded, or of a TOML file. Raises DsimError.

    allow_code: files of code that a TOML file may name (docs/security.md).
    """
    return parse(spec, named_code([spec], allow_code))


def replay(
    trace: str | Path | Trace,
    policy: str | Policy | Sequence[str | Policy] = Scenario.policy,
    *,
    profile: str | Path | Profile = Scenario.profile,
    slos: Sequence[str] = (),
    out: str | Path | None = None,
    force: bool = False,
    **more: Any,
) -> Replay:
    """Replay a trace in the twin under one or several policies.

    trace, profile, policy: names, files and SPECs as on the command line, or what `load_trace`, `load_profile` and
    `parse_policy` return. more: fields of `dsim.planner.Scenario` (replicas, rate, seed ...). out: a folder for the
    run's files and report, as `dsim replay -o`. Raises DsimError.
    """
    policies = [policy] if isinstance(policy, str | Policy) else list(policy)
    if not policies:
        raise DsimError("no policy is given, expected at least one")
    names = [p.name if isinstance(p, Policy) else p for p in policies]
    allow_code = named_code((p for p in policies if isinstance(p, str)), more.pop("allow_code", ()))
    for name in names:
        if names.count(name) > 1:
            raise DsimError(f"policy {name} is given {names.count(name)} times, expected once")
    for name in more:
        if name not in FIELDS:
            raise DsimError(f"there is no option {quoted(name)}, expected one of: {', '.join(sorted(FIELDS))}")
    first = _Given(
        trace=trace.name if isinstance(trace, Trace) else str(trace),
        policy=names[0],
        profile=profile.name if isinstance(profile, Profile) else str(profile),
        slos=_checked(slos),
        given_trace=trace if isinstance(trace, Trace) else None,
        given_policies=tuple(p for p in policies if isinstance(p, Policy)),
        given_profile=profile if isinstance(profile, Profile) else None,
        allow_code=allow_code,
        **more,
    )
    scenarios = [replace(first, policy=name) for name in names]
    for scenario in scenarios:
        runs_on(scenario.loaded_profile(), scenario.workload)(scenario.parsed_policy())
    done = record(scenarios, first.requests(), in_twin, out=None if out is None else Path(out), force=force)
    return Replay(done.results, done.summaries, done.manifest)


def capacity(trace: str | Path, slos: Sequence[str], *, rate: float | None = None, **more: Any) -> Capacity:
    """How much traffic a fleet sustains while every SLO holds; with `rate` (req/s), how many replicas that needs.

    more: fields of `dsim.planner.Scenario` (policy, profile, replicas ...), which are names, for replays run in other
    processes, and options of `dsim.planner.capacity` (precision, jobs ...). Raises DsimError.
    """
    scenario, options = _posed(trace, slos, more, [], "num_requests")
    return _capacity(scenario, **options) if rate is None else fewest_replicas(scenario, rate, **options)


def plan(
    trace: str | Path,
    slos: Sequence[str],
    *,
    policies: Sequence[str] = (),
    profiles: Sequence[str | Path | Profile] = (Scenario.profile,),
    gpu_hour: float | Mapping[str, float] | None = None,
    **more: Any,
) -> Planned:
    """One ranked answer: which policy on which profile, with how many replicas, at what cost.

    policies: every shipped one that a profile's model runs, where none is given. gpu_hour: a price for all, or by a
    profile's name. more: fields of `dsim.planner.Scenario`, and options of `dsim.planner.plan.plan` (rate, jobs ...).
    Raises DsimError.
    """
    scenario, options = _posed(trace, slos, more, policies, "rate", "num_requests")
    loaded = [p if isinstance(p, Profile) else load_profile(p) for p in profiles]
    prices = gpu_hour if isinstance(gpu_hour, Mapping) else {p.name: gpu_hour for p in loaded}
    candidates, left_out = candidates_of(scenario, policies, loaded, lambda profile: prices.get(profile.name))
    return _plan(scenario, candidates, left_out, **options)


def tune(
    trace: str | Path,
    *,
    slos: Sequence[str] = (),
    policy: str | None = None,
    space: str | Path | Mapping[str, Any] | None = None,
    **more: Any,
) -> Tuned:
    """The settings that serve a trace best, confirmed on traffic that the search never saw.

    policy: what you run today, to beat. space: what may be moved, a file as of `dsim tune --space` or the same as a
    dictionary. more: fields of `dsim.planner.Scenario`, which are names, and options of `dsim.planner.tune` (trials,
    objectives, storage ...). Raises DsimError.
    """
    scenario, options = _posed(trace, slos, more, [] if policy is None else [policy])
    code = scenario.allow_code
    if policy is not None:
        options["default"] = candidate_of(policy, scenario.replicas, code)
    if space is not None:
        check = searchable(scenario.loaded_profile(), scenario.workload)
        declared = isinstance(space, Mapping)
        options["space"] = (
            space_of(space, "space", check, code) if declared else load_space(space, check, code)  # type: ignore[arg-type]
        )
    return _tune(scenario, **options)


def _checked(slos: Sequence[str]) -> tuple[str, ...]:
    given = [slos] if isinstance(slos, str) else slos
    return tuple(str(Slo.parse(text)) for text in given)


def _posed(
    trace: str | Path, slos: Sequence[str], more: Mapping[str, Any], policies: Sequence[str], *both: str
) -> tuple[Scenario, dict[str, Any]]:  # fmt: skip
    """The scenario of these fields, and the options among them; both: names of fields that are meant as options.

    policies: those that the caller names, in addition to the scenario's own.
    """
    options = {name: value for name, value in more.items() if name not in FIELDS or name in both}
    own = {name: value for name, value in more.items() if name not in options}
    own["allow_code"] = named_code([own.get("policy", Scenario.policy), *policies], own.get("allow_code", ()))
    return Scenario(trace=str(trace), slos=_checked(slos), **own), options
