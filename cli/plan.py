"""dsim plan: which policy, on which GPUs, how many, at what cost; one ranked answer."""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar
from typing import Annotated as A

from ..engine.errors import DsimError
from . import choices
from . import questions as q
from .answer import Answer, stopped
from .cautions import warn, warn_of_runs
from .declared import Opt, Question, Watch

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
    """

    COMMON: ClassVar = (
        "slos", "rate", "policies", "gpu", "model", "profiles", "gpu_hour", "growth", "horizon",
        "lengths", "jobs", "out",
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
    ensemble: A[int | None, q.ENSEMBLE] = None
    min_quality: A[float | str | None, q.MIN_QUALITY] = None
    quality_table: A[str | Path | None, q.QUALITY_TABLE] = None
    as_given: A[bool, Opt("Use the policies as given, without a search over engine settings.", "", "Search")] = False
    router: A[str, q.ROUTER] = choices.UNROUTED
    num_requests: A[int | None, q.PER_REPLAY] = None
    jobs: A[int | None, q.JOBS] = None
    out: A[
        str | Path | None, q.out("Write plan.toml, plan.json, report.html and deploy/; reuses the replays in it.")
    ] = None

    def answer(self, watch: Watch) -> "Answer[Planned]":
        from ..comparison.measured_log import measured_log
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
            world, specs, profiles, prices(self.gpu_hour), min_quality=parse_share(self.min_quality),
            quality_table=load_table(self.quality_table, world.allow_code), as_given=self.as_given,
        )  # fmt: skip
        size = {name: getattr(self, name) for name in ("rate", "attainment", "max_replicas", "num_requests")}
        inputs = inputs_of(world, candidates, **size)
        folder = StoreFolder(self.folder, PLAN, force=self.force)
        _warn(watch, world, specs, candidates)
        try:
            with watch.bar("plan", "replays", note="starting") as bar, folder:

                def progress(phase: str, done: int, total: int | None) -> None:
                    bar.update(done, total, phase, "")

                folder.begin("plan", inputs)
                options = {name: getattr(self, name) for name in ("spare", "currency", "jobs", "ray")}
                planned = plan(
                    world, candidates, left_out, **size, **options, horizon=horizon, command=watch.command(),
                    memo=folder.memo, progress=progress,
                )  # fmt: skip
                if self.ensemble is not None:
                    with Pool(self.jobs, self.ray) as pool:
                        drawn = plan_ensemble(
                            planned, world, candidates, self.ensemble, attainment=self.attainment, pool=pool,
                            memo=folder.memo, progress=partial(progress, "asking drawn profiles"),
                        )  # fmt: skip
                    planned = replace(planned, ensemble=drawn)
                ahead = fleet_worlds(replace(world, rate=planned.rate), candidates, planned.ranking[:2])
                planned = replace(
                    planned, notes=(*planned.notes, *profile_notes(ahead)),
                    measured=measured_log(replace(world, num_requests=None)),
                )  # fmt: skip
                written = _write(folder, planned, sheets)
        except KeyboardInterrupt:
            raise stopped(self.out) from None
        return Answer(
            value=planned, explained=folder.memo.sentence(), out=self.folder, files=written,
        )  # fmt: skip

    def _horizon(self) -> "Horizon | None":
        from ..planner.plan_result import Horizon

        if not self.slos:
            raise DsimError("no SLO is given, expected at least one, such as --slo ttft=2s --slo 100ms/token")
        if self.growth is None and (self.horizon != 1):
            raise DsimError("horizon is given and no growth, expected one such as 30%/year")
        return None if self.growth is None else Horizon(self.growth, self.horizon)

    def _profiles(self, specs: list[str]) -> "tuple[list[Profile], list[Profile] | None]":
        """From data sheets, and all to compare (None if no option names one)."""
        from ..planner.candidates import from_sheets, name_their_profiles
        from ..profiler.profile import Profile, load
        from ..results.world import different

        gpus = ",".join(self.gpu)
        if gpus and self.profiles:
            raise DsimError(f"--gpu is {gpus} and --profile is {q.name_of(self.profiles[0])}, expected one of them")
        names = different([name.strip() for name in gpus.split(",")]) if gpus else []
        sheets = from_sheets(names, self.model or "SDAR-8B", self.tp, self.commits, self.weights, self.kv)
        if name_their_profiles(specs) and (gpus or self.profiles):
            every = ", ".join(specs)
            raise DsimError(f"every policy names its own profile, expected none of --profile and --gpu: {every}")
        different([q.name_of(profile) for profile in self.profiles])
        profiles = [profile if isinstance(profile, Profile) else load(profile) for profile in self.profiles]
        return sheets, sheets or profiles or None


def _write(folder: "StoreFolder", planned: "Planned", sheets: "Sequence[Profile]") -> list[str]:
    """Write the results; returns their names. sheets: profiles made from data sheets."""
    from ..files.write import write_whole
    from ..planner.plan_result import DEPLOY
    from ..profiler.profile import save
    from ..report.html import result_files

    if folder.folder is None:
        return []
    launch = {} if planned.deployment is None else planned.deployment.files()
    for name, text in launch.items():
        (folder.folder / DEPLOY).mkdir(exist_ok=True)
        write_whole(folder.folder / DEPLOY / name, text)
    profiles = {f"profile-{profile.name}.json": profile for profile in sheets}
    for name, profile in profiles.items():
        save(profile, folder.folder / name, force=True)
    files = {"plan.toml": planned.plan_toml, **result_files(planned)}
    folder.put(files)
    return [*files, *([f"{DEPLOY}/"] if launch else []), *profiles]


def _warn(watch: Watch, world: "World", specs: list[str], candidates: "Sequence[PlanCandidate]") -> None:
    """Of the trace, and of each policy on its first profile."""
    from ..engine.policy import parse
    from ..profiler.placed import placed
    from ..sim.setting import Setting

    code, trace = world.allow_code, world.source()
    warn(watch, *(replace(world, policy=spec) for spec in specs or [world.policy]))
    top = {placed(c.policy)[0]: c.profile for c in reversed(candidates)}
    warn_of_runs(watch, [(Setting(parse(spec, code), profile, world.workload), trace) for spec, profile in top.items()])
