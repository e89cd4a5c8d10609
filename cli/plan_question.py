"""dsim plan: which policy, on which GPUs, how many, at what cost; one ranked answer."""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..engine.errors import DsimError
from . import choices
from . import questions as q
from .answer import Answer, stopped
from .cautions import warn, warn_of_settings
from .declared import Question, Watch

if TYPE_CHECKING:
    from ..planner.candidates import PlanCandidate
    from ..planner.memo import StoreFolder
    from ..planner.plan_result import Horizon, Planned
    from ..profiler.profile import Profile
    from ..results.world import World
    from .objects import PolicyLike, ProfileLike


@dataclass(frozen=True)
class PlanQuestion(q.InTwin, q.Somewhere, q.Priced, q.Forced, Question["Planned"]):
    """Rank policies on GPUs by the cost of the smallest fleet that meets the SLOs, with its uncertainty.

    dsim plan azure-conv --rate 12 --slo ttft=2s --slo 100ms/token --gpu-hour 2 -o runs/plan
    dsim plan mine.jsonl --gpu a100,h100 --gpu-hour a100=2,h100=3.5 --slo ttft=2s --json

    Traffic:
      --rate R: Requests per second to serve; the trace's own by default.
      --num-requests N: Requests in a replay; by default enough for one pass over the trace, 6000 to 24000.
    Policy and profile:
      --policy SPEC (policies): A policy to compare, as elsewhere; repeat. By default those of released engines that run
          the model.
      --profile P (profiles): Instead of --gpu: a profile file or shipped profile; repeat.
      --yields P (commits): With --gpu: a profile that provides the commit models.
    Model and device:
      --gpu GPU,...: GPUs by data sheet: a100, h100, b200 ..., or TOML files (docs/plan.md); estimates.
      --model M: With --gpu: SDAR-8B by default, another known name, or a config.json.
    Fleet and price:
      --gpu-hour PRICE: Price of one GPU per hour: 2, or by GPU, a100=2,h100=3.5.
      --max-replicas N: Try at most N replicas.
      --spare N: Standby replicas (N+1): included in cost and launch files; the SLOs hold without them.
      --growth X%/year: Growth of traffic, also per /month or /week; costs are then of the horizon.
      --horizon YEARS: With --growth: the years that are paid.
      --today SPEC,replicas=N: What runs today: replayed beside the answer, on its GPUs.
    SLOs and quality:
      --fail-on-slo: With --today: end with 1 if what runs today misses an SLO.
    Search:
      --as-given: Use the policies as given, without a search over engine settings.
      --research: Without --policy: also what the schedulers that no released engine has would save.
    Output:
      -o, --out DIR: Write plan.toml, plan.json, report.html and deploy/; reuses the replays in it.
    """

    COMMON = "slos rate policies gpu model profiles gpu_hour growth horizon today research lengths jobs out"

    slos: Sequence[str] = ()
    _: KW_ONLY
    rate: float | None = None
    policies: "Sequence[PolicyLike]" = ()
    gpu: Sequence[str] = ()
    model: str | None = None
    tp: int = 1
    weights: str | None = None
    kv: str | None = None
    commits: str | None = None
    profiles: "Sequence[ProfileLike]" = ()
    gpu_hour: float | str | Mapping[str, float] | None = None  # type: ignore[assignment]
    attainment: float = 0.99
    max_replicas: int = 64
    spare: int = 0
    growth: str | None = None
    horizon: float = 1.0
    today: str | None = None
    fail_on_slo: bool = False
    min_quality: float | str | None = None
    quality_table: str | Path | None = None
    as_given: bool = False
    research: bool = False
    ensemble: int | None = None
    router: str = choices.UNROUTED
    num_requests: int | None = None
    jobs: int | None = None

    def answer(self, watch: Watch) -> "Answer[Planned]":
        from ..planner.backend import Pool
        from ..planner.candidates import candidates_of, prices
        from ..planner.ensemble import check_num
        from ..planner.memo import StoreFolder
        from ..planner.plan import fleet_worlds, inputs_of, plan
        from ..planner.plan_result import PLAN
        from ..planner.quality import load_table, parse_share
        from ..planner.record import profile_notes
        from ..planner.uncertain_fleet import plan_ensemble
        from ..results.world import World, different
        from .objects import spec_of

        horizon = self._horizon()
        check_num(self.ensemble)
        specs = different(list(map(spec_of, self.policies)))
        sheets, profiles = self._profiles(specs)
        [world] = q.worlds_of(self, World.policy, choices.PROFILE, candidates=specs, rate=None, num_requests=None)
        candidates, left_out = candidates_of(
            world,
            specs,
            profiles,
            prices(self.gpu_hour),
            min_quality=parse_share(self.min_quality),
            quality_table=load_table(self.quality_table, world.allow_code),
            as_given=self.as_given,
            research=self.research,
        )
        size = self.values("rate", "attainment", "max_replicas", "num_requests")
        inputs = inputs_of(world, candidates, **size)
        folder = StoreFolder(self.folder, PLAN, force=self.force)
        _warn(watch, world, specs, candidates)
        try:
            with watch.bar("plan", "replays", note="starting") as bar, folder:

                def progress(phase: str, done: int, total: int | None) -> None:
                    bar.update(done, total, phase, note="")

                folder.begin("plan", inputs)
                options = self.values("spare", "today", "currency", "jobs", "ray")
                options |= {"horizon": horizon, "memo": folder.memo, "progress": progress}
                planned = plan(world, candidates, left_out, **size, **options, command=watch.command())
                if self.ensemble is not None:
                    with Pool(self.jobs, self.ray) as pool:
                        drawn = plan_ensemble(
                            planned,
                            world,
                            candidates,
                            self.ensemble,
                            attainment=self.attainment,
                            pool=pool,
                            memo=folder.memo,
                            progress=partial(progress, "asking drawn profiles"),
                        )
                    planned = replace(planned, ensemble=drawn)
                ahead = fleet_worlds(replace(world, rate=planned.rate), candidates, planned.ranking[:2])
                planned = replace(planned, notes=(*planned.notes, *profile_notes(ahead)))
                written = _write(folder, planned, sheets)
        except KeyboardInterrupt:
            raise stopped(self.out) from None
        missed = [f"{self.today} misses {text}" for text in planned.missed_today] * self.fail_on_slo
        return Answer(value=planned, explained=folder.memo.sentence(), out=self.folder, files=written, missed=missed)

    def _horizon(self) -> "Horizon | None":
        from ..planner.plan_result import Horizon

        if not self.slos:
            raise DsimError("no SLO is given, expected at least one, such as --slo ttft=2s --slo 100ms/token")
        return q.optional(lambda growth: Horizon(growth, self.horizon), self.growth)

    def _profiles(self, specs: list[str]) -> "tuple[list[Profile], list[Profile] | None]":
        """From data sheets, and all to compare (None if no option names one)."""
        from ..planner.candidates import from_sheets, name_their_profiles
        from ..results.world import different
        from .objects import loaded

        gpus = ",".join(self.gpu)
        if gpus and self.profiles:
            raise DsimError(f"--gpu is {gpus} and --profile is {q.name_of(self.profiles[0])}, expected one of them")
        names = different([name.strip() for text in self.gpu for name in text.split(",")], "GPU")
        model = self.model or "SDAR-8B"
        sheets = from_sheets(names, model, self.tp, self.commits, weights=self.weights, kv=self.kv)
        if any(profile.family == "block-diffusion" and not profile.commits for profile in sheets):
            raise DsimError(
                f"no yields of {sheets[0].model.name} are published, expected --yields P: a profile with commit "
                "models, such as a100-sdar-8b"
            )
        if name_their_profiles(specs) and (gpus or self.profiles):
            every = ", ".join(specs)
            raise DsimError(f"every policy names its own profile, expected none of --profile and --gpu: {every}")
        different([q.name_of(profile) for profile in self.profiles], "profile")
        return sheets, sheets or list(map(loaded, self.profiles)) or None


def _write(folder: "StoreFolder", planned: "Planned", sheets: "Sequence[Profile]") -> list[str]:
    """Write the results; returns their names. sheets: profiles made from data sheets."""
    from ..files.write import write_whole
    from ..planner.plan_result import DEPLOY
    from ..profiler.profile import save
    from ..report.html import result_files

    if folder.folder is None:
        return []
    files = {"plan.toml": planned.plan_toml, **result_files(planned)}
    folder.put(files)
    names = [*files]
    if planned.deployment is not None:
        names.append(f"{DEPLOY}/")
        (folder.folder / DEPLOY).mkdir(exist_ok=True)
        for name, text in planned.deployment.files().items():
            write_whole(folder.folder / DEPLOY / name, text)
    for profile in sheets:
        names.append(f"profile-{profile.name}.json")
        save(profile, folder.folder / names[-1], force=True)
    return names


def _warn(watch: Watch, world: "World", specs: list[str], candidates: "Sequence[PlanCandidate]") -> None:
    """Of the trace, and of each policy on its first profile."""
    from ..engine.spec import parse
    from ..profiler.placed import placed
    from ..sim.setting import Setting

    warn(watch, *(replace(world, policy=spec) for spec in specs or [world.policy]))
    runs: dict[str, Setting] = {}
    for candidate in candidates:
        spec = placed(candidate.policy)[0]
        runs.setdefault(spec, Setting(parse(spec, world.allow_code), candidate.profile, world.workload))
    warn_of_settings(watch, [(setting, world) for setting in runs.values()])
