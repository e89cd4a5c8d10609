"""dsim replay: a trace through the twin, with one or several policies side by side."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from typing import Annotated as A

from . import choices
from . import questions as q
from .answer import Answer
from .bar import watch_runs
from .cautions import missed_slos, warn, warn_of_yields
from .declared import Opt, Question, Watch

if TYPE_CHECKING:
    from ..planner.given import PolicyLike
    from ..planner.recorded import Replay


@dataclass(frozen=True)
class ReplayQuestion(q.OnFleet, q.Paced, q.Priced, q.Forced, Question["Replay"]):
    """Replay a trace through the twin and report what its clients would have seen.

    dsim replay azure-conv --replicas 2 --policy lmdeploy-bd32 --policy optimus --slo ttft=5s -o runs/azure
    dsim replay mooncake-conv --policy ar --rate 4 --num-requests 500 --json
    """

    COMMON: ClassVar = (
        "policy", "profile", "slos", "rate", "arrival", "lengths", "num_requests", "replicas", "router", "fleet",
        "concurrency", "ensemble", "seed", "out",
    )  # fmt: skip

    policy: A["PolicyLike | Sequence[PolicyLike]", q.MANY_POLICIES] = ()
    _: KW_ONLY
    as_logged: A[
        bool,
        Opt("TRACE is a step log: replay its requests under the policy and settings that it names.", "", "What to do"),
    ] = False
    slos: A[Sequence[str], q.SLO] = ()
    scaler: A[
        str,
        Opt(
            f"{', '.join(choices.SCALERS)}, or your own ./mine.py:SCALER; then ,field=value...", "S", "Fleet and price",
            values=lambda: choices.SCALERS,
        ),
    ] = choices.FIXED  # fmt: skip
    startup: A[
        str,
        Opt(
            "Time to start a replica; or its parts, such as provision=240+-30,load=18, or a measured set.", "SECONDS",
            "Fleet and price",
        ),
    ] = "0"  # fmt: skip
    eos: A[bool | None, q.EOS] = None
    concurrency: A[int | None, Opt("Closed loop: N requests in flight, the trace as a queue.", "N", "Traffic")] = None
    sessions: A[bool, Opt("Send a session's turn only after the previous turn has ended.", "", "Traffic")] = False
    drain: A[
        bool,
        Opt("Serve the requests in flight after the last arrival, or count them as unfinished.", "", "Traffic"),
    ] = True
    gpu_hour: A[float | None, q.GPU_HOUR] = None
    jobs: A[
        int | None,
        Opt(
            "Replays of --ensemble at once, threads of a replay; by default all cores.", "N",
            "Execution",
        ),
    ] = None  # fmt: skip
    fail_on_slo: A[bool, q.FAIL_ON_SLO] = False
    out: A[str | Path | None, q.RUN_OUT] = None

    @property
    def specs(self) -> list[str]:
        """As named; none for the default."""
        return [q.name_of(policy) for policy in q.listed(self.policy)]

    def answer(self, watch: Watch) -> "Answer[Replay]":
        about: dict[str, Any] = {"command": watch.command()}
        if not self.as_logged:
            return self._replayed(watch, about)
        from .as_logged import as_logged

        with as_logged(self, watch) as (question, logged):
            return question._replayed(watch, about | logged)

    def _replayed(self, watch: Watch, about: dict[str, Any]) -> "Answer[Replay]":
        from ..planner.replay_run import fleet_cost, write_replay
        from ..report.story import words
        from ..results.manifest import FILES
        from ..results.metrics import no_nan
        from ..results.scenario import on_fleet

        fleet = self.fleet_words(self.specs or None, scaler=self.scaler, startup=str(self.startup))
        policies = choices.POLICY if self.policy == () else self.policy
        scenarios = on_fleet(
            q.scenarios_of(self, policies, self.slos, self.profile, self.replicas), fleet, named=self.fleet is None
        )
        requests = scenarios[0].requests()
        warn(watch, *scenarios)
        warn_of_yields(watch, *scenarios)
        if self.gpu_hour is not None:
            about["cost"] = fleet_cost(scenarios, self.gpu_hour, self.currency)
        if self.ensemble is not None:
            from ..planner.backend import Pool
            from ..planner.ensemble import check_num, ensemble  # loads SciPy

            check_num(self.ensemble, scenarios)
            with watch.bar("ensemble", "replays", note="starting") as bar, Pool(jobs=self.jobs) as pool:
                drawn = ensemble(scenarios, requests, self.ensemble, pool=pool, progress=bar.update)
            about["ensemble"] = no_nan(drawn)
        with watch.bar("replay", "requests") as bar:
            runs = watch_runs(bar, len(scenarios), len(requests), "starting", " simulated")
            done = write_replay(
                scenarios, requests, about, out=self.folder, force=self.force, jobs=self.jobs, watch=runs
            )
        manifest = done.manifest
        shown = {"policies": manifest["policies"], "profile": manifest["profile"], "interrupted": done.interrupted}
        shown |= {name: manifest[name] for name in ("measured", "ensemble", "cost") if name in manifest}
        specs = [scenario.policy for scenario in scenarios]

        def replay() -> "Replay":
            from ..planner.recorded import Replay  # loads pandas

            return Replay(done.results, done.summaries, manifest, tuple(scenarios), requests, self.folder)

        return Answer(
            value=replay,
            json=shown, page=lambda: words(manifest["policies"], manifest), out=self.folder, files=FILES,
            interrupted=f"Interrupted: {done.progress(specs, len(requests))}" * done.interrupted,
            missed=missed_slos(manifest["policies"]) if self.fail_on_slo else (),
        )  # fmt: skip
