"""Arguments of `import dsim` functions as scenarios."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ..engine.errors import DsimError
from ..engine.policy import Policy
from ..planner.given import PolicyLike, ProfileLike, TraceLike, name_of_profile, name_of_trace, spec_of, trace_of
from ..planner.grid import check_together
from ..planner.plan_replays import Posed
from ..profiler.profile import Profile
from ..results.scenario import Scenario, different, named_code, replicas_of
from ..results.slo import Slo
from ..traces import Trace
from .signature import Traffic


@dataclass(frozen=True)
class GivenScenario(Posed):
    """With objects in place of names."""

    given_trace: Trace | None = None
    given_policies: tuple[Policy, ...] = ()

    def source(self) -> Trace:
        return super().source() if self.given_trace is None else self.given_trace

    def parsed_policy(self) -> Policy:
        return next((p for p in self.given_policies if p.name == self.policy), None) or super().parsed_policy()


def scenarios_of(
    trace: TraceLike, policy: PolicyLike | Sequence[PolicyLike], profile: ProfileLike, slos: Sequence[str],
    traffic: Traffic, *, replicas: int | None = None, **more: Any,
) -> list[Scenario]:  # fmt: skip
    """One a policy, with objects, for this process."""
    policies = [policy] if isinstance(policy, str | Policy) else list(policy)
    if not policies:
        raise DsimError("no policy is given, expected at least one")
    names = different([p.name if isinstance(p, Policy) else p for p in policies])
    given = trace_of(trace, traffic)
    first = GivenScenario(
        trace=str(trace) if given is None else given.name,
        policy=names[0],
        profile=profile.name if isinstance(profile, Profile) else str(profile),
        given_trace=given,
        given_policies=tuple(p for p in policies if isinstance(p, Policy)),
        given_profile=profile if isinstance(profile, Profile) else None,
        **_fields(traffic, slos, names, replicas=replicas_of(names, replicas), **more),
    )
    check_together(first)
    return [replace(first, policy=name) for name in names]


def named_scenario(
    trace: TraceLike, slos: Sequence[str], policy: str, profile: ProfileLike, policies: Sequence[str],
    traffic: Traffic, **more: Any,
) -> Scenario:  # fmt: skip
    """With names only, for other processes."""
    given = trace_of(trace, traffic)
    name = name_of_trace(trace if given is None else given)  # type: ignore[arg-type]
    fields = _fields(traffic, slos, [policy, *policies], **more)
    if given is not None:  # already read with these options
        fields = {n: value for n, value in fields.items() if n not in ("time_unit", "skip_bad", "columns", "only")}
    scenario = Scenario(trace=name, policy=policy, profile=name_of_profile(profile), **fields)
    check_together(scenario)
    return scenario


def named_config(config: Any, field: str = "") -> Any:
    """A sweep's configuration, its frames and objects named."""
    if isinstance(config, Mapping):
        return {name: named_config(value, str(name)) for name, value in config.items()}
    if isinstance(config, list):
        return [named_config(value, field) for value in config]
    if isinstance(config, Profile):
        return name_of_profile(config)
    if isinstance(config, Policy):
        return spec_of(config)
    found = None if isinstance(config, str | Path) else trace_of(config, {})
    if found is not None:
        return name_of_trace(found)
    return str(config) if isinstance(config, Path) else config


def folder_of(out: str | Path | None) -> tuple["TemporaryDirectory[str] | None", Path]:
    """A run's folder, or a temporary one with the object that removes it."""
    if out is not None:
        return None, Path(out)
    kept = TemporaryDirectory(prefix="dsim-")
    return kept, Path(kept.name) / "run"


def texts_of(given: Sequence[str]) -> Sequence[str]:
    return [given] if isinstance(given, str) else given


def _fields(traffic: Traffic, slos: Sequence[str], policies: Sequence[str], **more: Any) -> dict[str, Any]:
    """policies: given by the caller, so their code may be loaded."""
    code = named_code([*policies, traffic.get("router", "")], traffic.get("allow_code", ()))
    return {**traffic, **more, "slos": tuple(str(Slo.parse(text)) for text in texts_of(slos)), "allow_code": code}
