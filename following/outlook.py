"""The fleet under a window's traffic: what-ifs, headroom, the cheapest fleet, and one recommendation."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..engine.errors import DsimError
from ..results.metrics import no_nan
from ..results.scenario import Scenario
from ..traces import Trace
from .residuals import RULE

if TYPE_CHECKING:
    from ..planner.deploy import Deployment

MORE = 1.3  # times the traffic, in a what-if
HOUR = 12  # windows
SOON = 60.0  # minutes until growth reaches the capacity, below which the advice is to add a replica
PRECISION, REQUESTS, REPLICATIONS = 0.1, 1000, 2  # of a capacity: rough, because it runs hourly
PLAN_REQUESTS = 2000  # of a plan's replay, at most
MOST_MEMO = 64 << 20  # bytes of stored replays, above which a plan begins with none
CONFIG = "dllm.yaml"  # the engine's configuration file
MOST_REPLICAS = 256  # of a what-if, and of a plan


@dataclass(frozen=True)
class WhatIf:
    """The outcome of a window's traffic on another fleet, or of more traffic on this one."""

    name: str
    replicas: int
    policy: str
    gpus: int
    attainment: float | None  # share of requests that meet the SLOs; None: no SLO is given
    e2el_p90: float | None  # s

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = no_nan(vars(self))
        return found


def ask(name: str, scenario: Scenario, trace: Trace) -> WhatIf:
    """Replay a trace on a fleet."""
    summary = scenario.run(trace)
    met = summary.slo_attainment if scenario.slos else math.nan
    p90 = (summary.e2el_ms.p90 or math.nan) / 1e3
    gpus = scenario.replicas * scenario.setting().profile.device.count
    return WhatIf(
        name, scenario.replicas, scenario.policy, gpus, *(None if math.isnan(x) else round(x, 4) for x in (met, p90))
    )


def asked(name: str, scenario: Scenario, trace: Trace) -> Iterator[dict[str, Any]]:
    """`ask` as a question for the background."""
    yield ask(name, scenario, trace).to_json()


def what_ifs(scenario: Scenario, trace: Trace, replicas: int, others: Sequence[str]) -> list[WhatIf]:
    """Replay the traffic unchanged, with a replica less and more, with 30 % more of it, and under other policies."""
    now = replace(scenario, replicas=replicas)
    found = [ask("as it is", now, trace)]
    if replicas > 1:
        found.append(ask("a replica less", replace(now, replicas=replicas - 1), trace))
    found.append(ask("a replica more", replace(now, replicas=replicas + 1), trace))
    found.append(ask(f"{MORE - 1:.0%} more traffic", now, trace.time_scaled(1 / MORE)))
    return found + [ask(other, replace(now, policy=other), trace) for other in others]


@dataclass(frozen=True)
class Shadow:
    """The fleet that the twin would have run in a window, compared with the current fleet."""

    replicas: int
    policy: str
    agrees: bool
    attainment: float  # regret: share within the SLOs of the twin's fleet minus that of the current fleet
    gpu_hours: float  # regret: of the current fleet minus those of the twin's fleet

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))


def shadow(found: Sequence[WhatIf], target: float, hours: float) -> Shadow | None:
    """Of the fleets asked about, the one with the fewest GPUs that meets the SLOs, or the best; None without SLOs.

    The current fleet stays if no fleet is smaller, or, where none meets the SLOs, if none has a better attainment.
    """
    now, *others = [w for w in found if not w.name.endswith("traffic")]
    if now.attainment is None:
        return None

    def rank(own: WhatIf) -> tuple[bool, float, bool]:
        met = own.attainment or 0.0
        return met < target, own.gpus if met >= target else -met, own is not now

    best = min((now, *others), key=rank)
    gained = (best.attainment or 0.0) - now.attainment
    return Shadow(best.replicas, best.policy, best is now, gained, (now.gpus - best.gpus) * hours)


@dataclass(frozen=True)
class Headroom:
    """How much more traffic the fleet takes."""

    capacity: float  # req/s
    low: float  # of its interval
    high: float
    limited_by: str
    binding_slo: str
    time: float  # s since 1970, of the question
    version: int  # of the profile

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass(frozen=True)
class Plan:
    """The cheapest fleet that meets the SLOs, by the search of `dsim plan`."""

    policy: str
    replicas: int
    gpus: int
    per_hour: float | None  # None: no price is given
    flags: str  # to launch a replica, as `dsim plan` writes them; empty if no engine is known to serve it
    attained: tuple[float, float] | None  # interval of the share within the SLOs
    rate: float  # req/s
    evidence: str
    time: float  # s since 1970, of the newest window behind it
    version: int  # of the profile

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass(frozen=True)
class Ahead:
    """A question for a background process: the fleet's capacity, and the cheapest fleet."""

    scenario: Scenario  # the current one
    replicas: int
    rate: float  # req/s to plan for
    attainment: float
    gpu_hour: float | None
    others: tuple[str, ...]  # policies to plan with, in addition to the running one
    folder: Path
    time: float  # s since 1970
    version: int

    def __call__(self, trace: Trace) -> Iterator[dict[str, Any]]:
        """Yield the headroom and then the plan, each as soon as it is known.

        The traffic is written to a file of the folder, so that the user can repeat the question.
        """
        if not self.scenario.slos or len(trace) < 2:
            return
        from ..traces.write import write

        own = replace(self.scenario, trace=str(write(trace, self.folder / "traffic.jsonl", force=True)))
        room = headroom(replace(own, replicas=self.replicas), self.attainment, self.time, self.version)
        yield {"headroom": None if room is None else room.to_json()}
        yield {"plan": self._plan(own).to_json()}

    def _plan(self, scenario: Scenario) -> Plan:
        from ..planner.memo import Memo  # imported here, as the next one: it loads SciPy
        from ..planner.plan_run import Options, answer, question_of
        from ..planner.space import candidate_of

        memo, store = Memo(), self.folder / "replays.db"
        if store.exists() and store.stat().st_size > MOST_MEMO:
            store.unlink()
        memo.open(store)
        most = min(MOST_REPLICAS, 4 * self.replicas + 4)
        options = Options(self.rate, self.attainment, most, PLAN_REQUESTS)
        question = question_of(
            scenario, list(dict.fromkeys((freed(scenario), *self.others))), [scenario.loaded_profile()],
            lambda profile: self.gpu_hour, options,
        )  # fmt: skip
        planned, _ = answer(question, memo, jobs=1)
        best = planned.recommended
        spelt = [candidate_of(spec, allow_code=scenario.allow_code).spec for spec in (best.policy, scenario.policy)]
        policy = scenario.policy if spelt[0] == spelt[1] else best.policy
        shares = [best.values[name] for name in planned.share_criteria if name in best.values]
        room = (
            "" if best.headroom is None else f"; it takes {max(0.0, best.headroom.low):.0%} more before an SLO breaks"
        )
        evidence = (
            f"{planned.num_replays} replays of {planned.num_requests:,} requests at {self.rate:.3g} req/s, the busiest "
            f"window of the last day, on profile version {self.version}{room}"
        )
        return Plan(
            policy, best.replicas or 0, best.gpus or 0, best.per_hour, flags_of(planned.deployment),
            (shares[0].low, shares[0].high) if shares else None, self.rate, evidence, self.time, self.version,
        )  # fmt: skip


def flags_of(launch: "Deployment | None") -> str:
    """Lines that launch a replica, with the engine's configuration file as comments; empty if no engine is known."""
    if launch is None:
        return ""
    files = launch.files()
    return "\n".join([launch.shell, *(f"# {CONFIG}: {line}" for line in files.get(CONFIG, "").splitlines())])


def freed(scenario: Scenario) -> str:
    """The policy without the settings that a plan chooses: those that have a flag and change no answers."""
    from ..engine.policy import preset_of
    from ..planner.space import candidate_of

    own = candidate_of(scenario.policy, allow_code=scenario.allow_code)
    preset = preset_of(own.preset, own.spec, scenario.allow_code)
    free = preset.policy.neutral & preset.flags.keys() & (preset.space or {}).keys() if preset.engine else set()
    return ",".join([own.preset, *(f"{name}={value}" for name, value in own.settings if name not in free)])


def headroom(scenario: Scenario, target: float, now: float, version: int) -> Headroom | None:
    """The fleet's capacity under its SLOs with its trace's lengths, by the search of `dsim capacity`."""
    from ..planner.capacity import capacity  # imported here: it loads SciPy

    try:
        found = capacity(
            scenario, precision=PRECISION, attainment=target, num_requests=max(REQUESTS, 100 * scenario.replicas),
            max_replications=REPLICATIONS, jobs=1, curve=False,
        )  # fmt: skip
    except DsimError as error:  # an SLO holds at every rate, or at none
        if "holds at no rate" not in str(error):
            return None
        return Headroom(0.0, 0.0, 0.0, "the SLOs hold at no rate", str(error), now, version)
    return Headroom(
        found.rate.value, found.rate.low, found.rate.high, found.limited_by, found.binding_slo, now, version
    )  # fmt: skip


def growth(times: Sequence[float], rates: Sequence[float]) -> float:
    """The traffic's growth over the last hour (req/s a minute); 0 where it is not clear."""
    x, y = np.array(times[-HOUR:]) / 60, np.array(rates[-HOUR:])
    if len(x) < HOUR // 2:
        return 0.0
    x = x - x.mean()
    slope = float((x * y).sum() / (x * x).sum())
    left = y - y.mean() - slope * x
    error = math.sqrt(float((left**2).sum()) / max(1, len(x) - 2) / float((x * x).sum()))
    return slope if abs(slope) > 2 * error else 0.0


@dataclass(frozen=True)
class Advice:
    """One recommendation."""

    do: str  # "Do nothing." is one
    why: str
    flags: str = ""  # to copy
    gain: str = ""
    price: str = ""
    evidence: str = ""

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))


def advice(
    found: Sequence[WhatIf], room: Headroom | None, plan: Plan | None, rate: float, grows: float, target: float,
    alarms: Mapping[str, Any], gpu_hour: float | None = None,
) -> Advice:  # fmt: skip
    """What to do.

    The plan's fleet if it is smaller, or if the current fleet misses the SLOs or is beyond its capacity; one more
    replica if growth soon reaches the capacity; otherwise nothing.
    """
    if RULE in alarms:
        return Advice(
            "Check the server's flags and version.",
            f"{alarms[RULE]}, while prices and yield agree: its scheduler is not the one that --policy names.",
        )
    now = next((w for w in found if w.name == "as it is"), None)
    if now is None or now.attainment is None:
        return Advice(
            "Do nothing.", "No SLO is given, so nothing can be missed." if found else "No window is over yet."
        )
    met = f"{now.attainment:.1%} of requests meet the SLOs, of {target:.1%} wanted"
    more = next(w for w in found if w.name == "a replica more")
    missed = now.attainment < target or (room is not None and room.capacity < rate)
    other = plan is not None and (plan.policy, plan.replicas) != (now.policy, now.replicas)
    if plan is not None and other and (missed or plan.gpus < now.gpus):
        share = "" if plan.attained is None else "{:.1%} to {:.1%} of requests within the SLOs, ".format(*plan.attained)
        saved = now.gpus - plan.gpus
        gain = f"{share}{_gpus(abs(saved))} {'fewer' if saved > 0 else 'more'}" if saved else share.removesuffix(", ")
        return Advice(
            f"Run {_replicas(plan.replicas)} of {plan.policy}.",
            met if now.attainment < target or not missed else f"{rate:.3g} req/s come, and the fleet takes "
            f"{room.capacity if room else 0.0:.3g}",
            plan.flags, gain, _price(now.gpus, plan.gpus, gpu_hour), plan.evidence,
        )  # fmt: skip
    if missed:
        gain = f"{now.attainment:.1%} to {more.attainment or 0.0:.1%} of requests within the SLOs"
        evidence = "a replay of the last two windows"
        return Advice(
            f"Run {_replicas(more.replicas)}.", met, "", gain, _price(now.gpus, more.gpus, gpu_hour), evidence
        )
    if room is not None and grows > 0 and (minutes := (room.capacity - rate) / grows) < SOON:
        return Advice(
            f"Run {_replicas(more.replicas)} within {max(0.0, minutes):.0f} minutes.",
            f"traffic grows by {60 * grows:.2g} req/s an hour, and the fleet takes {room.capacity:.3g} req/s",
            "", f"about {room.capacity * more.replicas / now.replicas:.3g} req/s within the SLOs",
            _price(now.gpus, more.gpus, gpu_hour), "the rates of the last hour, and a search of the fleet's capacity",
        )  # fmt: skip
    return Advice("Do nothing.", met, evidence="" if plan is None else plan.evidence)


def _replicas(num: int) -> str:
    return f"{num} replica{'' if num == 1 else 's'}"


def _gpus(num: int) -> str:
    return f"{num} GPU{'' if num == 1 else 's'}"


def _price(before: int, after: int, gpu_hour: float | None) -> str:
    """The text on the cost of `after` GPUs instead of `before`."""
    if gpu_hour is None:
        return f"{_gpus(after)} in place of {before}" if after != before else ""
    return f"{(after - before) * gpu_hour:+g} an hour, {after * gpu_hour:g} in place of {before * gpu_hour:g}"
