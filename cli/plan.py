"""dsim plan: which policy, on which GPUs, how many, at what cost; one ranked answer."""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from typing import Annotated as A

from ..engine.errors import DsimError
from . import choices
from . import questions as q
from .answer import Answer, Stopped
from .cautions import warn, warn_of_runs
from .declared import Opt, Question, Watch

if TYPE_CHECKING:
    from ..planner.given import PolicyLike, ProfileLike
    from ..planner.planned import PlanCandidate, Planned
    from ..profiler.profile import Profile
    from ..results.scenario import Scenario


@dataclass(frozen=True)
class PlanQuestion(q.InTwin, q.Somewhere, q.Priced, q.Forced, Question["Planned"]):
    """Rank policies on GPUs by the cost of the smallest fleet that meets the SLOs, with its uncertainty.

    dsim plan azure-conv --rate 12 --slo ttft=2s --slo 100ms/token --gpu-hour 2 -o runs/plan
    dsim plan mine.jsonl --gpu a100,h100 --gpu-hour a100=2,h100=3.5 --slo ttft=2s --json
    """

    COMMON: ClassVar = (
        "slos", "rate", "policies", "gpu", "model", "profiles", "gpu_hour", "growth", "horizon", "today",
        "research", "lengths", "jobs", "out",
    )  # fmt: skip

    slos: A[Sequence[str], q.SLO] = ()
    _: KW_ONLY
    rate: A[float | None, Opt("Requests per second to serve; the trace's own by default.", "R", "Traffic")] = None
    policies: A[
        "Sequence[PolicyLike]",
        Opt(
            "A policy to compare, as elsewhere; repeat. By default those of released engines that run the model.",
            "SPEC", "Policy and profile", ("--policy",), q.policies,
        ),
    ] = ()  # fmt: skip
    gpu: A[
        Sequence[str],
        Opt(
            "GPUs by data sheet: a100, h100, b200 ..., or TOML files (docs/plan.md); estimates.",
            "GPU,...",
            "Model and device",
        ),
    ] = ()
    model: A[
        str | None,
        Opt(
            "With --gpu: SDAR-8B by default, another known name, or a config.json.", "M", "Model and device",
            needs=("gpu",),
        ),
    ] = None  # fmt: skip
    tp: A[int, q.TP] = 1
    weights: A[str | None, q.WEIGHTS] = None
    kv: A[str | None, q.KV] = None
    commits: A[
        str | None,
        Opt(
            "With --gpu: a profile that provides the commit models.",
            "P",
            "Policy and profile",
            ("--yields",),
            needs=("gpu",),
        ),
    ] = None
    profiles: A[
        "Sequence[ProfileLike]",
        Opt(
            "Instead of --gpu: a profile file or shipped profile; repeat.",
            "P",
            "Policy and profile",
            ("--profile",),
            q.profiles,
        ),
    ] = ()
    gpu_hour: A[
        float | str | Mapping[str, float] | None,
        Opt(
            "Price of one GPU per hour: 2, or by GPU, a100=2,h100=3.5.",
            "PRICE",
            "Fleet and price",
            read=lambda name, text: text,
        ),
    ] = None
    attainment: A[float, q.ATTAINMENT] = 0.99
    max_replicas: A[int, Opt("Try at most N replicas.", "N", "Fleet and price")] = 64
    spare: A[
        int,
        Opt(
            "Standby replicas (N+1): included in cost and launch files; the SLOs hold without them.",
            "N",
            "Fleet and price",
        ),
    ] = 0
    growth: A[
        str | None,
        Opt(
            "Growth of traffic, also per /month or /week; costs are then of the horizon.", "X%/year", "Fleet and price"
        ),
    ] = None
    horizon: A[float, Opt("With --growth: the years that are paid.", "YEARS", "Fleet and price")] = 1.0
    buy_now: A[
        bool, Opt("With --growth: buy what the end needs, instead of each quarter's.", "", "Fleet and price")
    ] = False
    today: A[str | None, Opt("What runs today: replayed beside the answer.", "SPEC,replicas=N", "Fleet and price")] = (
        None
    )
    min_quality: A[float | str | None, q.MIN_QUALITY] = None
    quality_table: A[str | Path | None, q.QUALITY_TABLE] = None
    as_given: A[bool, Opt("Use the policies as given, without a search over engine settings.", "", "Search")] = False
    change_answers: A[
        bool, Opt("Also search block, threshold and canvas, which change the model's answers.", "", "Search")
    ] = False
    research: A[bool, Opt("Also what a scheduler that no released engine has would save.", "", "Search")] = False
    router: A[str, q.ROUTER] = choices.UNROUTED
    num_requests: A[int | None, q.PER_REPLAY] = None
    jobs: A[int | None, q.JOBS] = None
    fail_on_slo: A[bool, q.FAIL_ON_SLO] = False
    out: A[
        str | Path | None, q.out("Write plan.toml, plan.json, report.html and deploy/; reuses the replays in it.")
    ] = None

    def answer(self, watch: Watch) -> "Answer[Planned]":
        from ..planner.plan_folder import PLAN, PlanFolder
        from ..planner.plan_run import Options, question_of, write_plan
        from ..planner.prices import prices
        from ..results.scenario import Scenario, different

        if not self.slos:
            raise DsimError("no SLO is given, expected at least one, such as --slo ttft=2s --slo 100ms/token")
        if self.fail_on_slo and self.today is None:
            raise DsimError(
                "--fail-on-slo is given and no --today, expected what runs today: a plan's own fleet meets the SLOs"
            )
        options = Options(**{field.name: getattr(self, field.name) for field in fields(Options)})
        specs = different([q.spec(policy) for policy in self.policies])
        sheets, profiles = self._profiles(specs)
        scenario = q.named_scenario(
            self, specs, self.slos, policy=Scenario.policy, profile=choices.PROFILE, rate=None, num_requests=None
        )
        question = question_of(scenario, specs, profiles, prices(self.gpu_hour), options)
        price = None if self.gpu_hour is None else str(self.gpu_hour)
        folder = PlanFolder(self.folder, PLAN, force=self.force)
        _warn(watch, scenario, specs, question.candidates)
        try:
            with watch.bar("plan", "replays", note="starting") as bar, folder:
                planned, info, page, written = write_plan(
                    question, folder, watch.command(), sheets=sheets, gpu_hour=price,
                    currency=self.currency, jobs=self.jobs, ray=self.ray,
                    progress=lambda doing, done, of: bar.update(done, of, doing, ""),
                )  # fmt: skip
        except KeyboardInterrupt:
            kept = (
                f"the replays are kept in {self.out}/: the same command continues" if self.out else "nothing was kept"
            )
            raise Stopped(f"Interrupted: {kept}") from None
        return Answer(
            value=planned, json=info, page=lambda: page, explained=folder.memo.sentence(), out=self.folder,
            files=written, missed=self._missed(info) if self.fail_on_slo else (),
        )  # fmt: skip

    def _missed(self, info: dict[str, Any]) -> list[str]:
        """The first SLO that today's fleet misses."""
        for text, value in (info["today"] or {"values": {}})["values"].items():
            sign = -1 if text in info["share_criteria"] else 1
            if sign * (value["value"] - info["bounds"][text]) > 0:
                return [f"{self.today} misses {text}"]
        return []

    def _profiles(self, specs: list[str]) -> "tuple[list[Profile], list[Profile] | None]":
        """From data sheets, and all to compare (None if no option names one)."""
        from ..planner.plan_run import name_their_profiles
        from ..planner.prices import from_sheets
        from ..profiler.profile import Profile, load
        from ..results.scenario import different

        gpus = ",".join(self.gpu)
        if gpus and self.profiles:
            raise DsimError(f"--gpu is {gpus} and --profile is {q.name_of(self.profiles[0])}, expected one of them")
        names = different([name.strip() for name in gpus.split(",")]) if gpus else []
        sheets = from_sheets(names, self.model or "SDAR-8B", self.tp, self.commits, self.weights, self.kv)
        if name_their_profiles(specs) and (gpus or self.profiles):
            every = ", ".join(specs)
            raise DsimError(f"every policy names its own profile, expected none of --profile and --gpu: {every}")
        different([q.name_of(profile) for profile in self.profiles])
        given = [profile if isinstance(profile, Profile) else load(profile) for profile in self.profiles]
        return sheets, sheets or given or None


def _warn(watch: Watch, scenario: "Scenario", specs: list[str], candidates: "Sequence[PlanCandidate]") -> None:
    """Of the trace, and of each policy on its first profile."""
    from ..engine.policy import parse
    from ..profiler.placed import placed
    from ..sim.setting import Setting

    code, source = scenario.allow_code, scenario.source()
    warn(watch, *(replace(scenario, policy=spec) for spec in specs or [scenario.policy]))
    on_first = {placed(c.policy)[0]: c.profile for c in reversed(candidates)}
    warn_of_runs(
        watch, [(Setting(parse(spec, code), own, scenario.workload), source) for spec, own in on_first.items()]
    )
