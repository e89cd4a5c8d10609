"""dsim replay: a trace through the twin, with one or several policies side by side."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import TYPE_CHECKING, Any

from . import choices
from . import questions as q
from .answer import Answer
from .bar import watch_runs
from .cautions import missed_slos, stopped, warn, warn_of_yields
from .declared import Question, Watch

if TYPE_CHECKING:
    from ..report.run_page import RunResult
    from ..results.run import Run
    from ..results.world import World
    from .objects import PolicyLike


@dataclass(frozen=True)
class ReplayQuestion(q.OnFleet, q.Paced, q.Priced, q.Forced, Question["RunResult"]):
    """Replay a trace through the twin and report what its clients would have seen.

    dsim replay azure-conv --replicas 2 --policy lmdeploy-bd32 --policy optimus --slo ttft=5s -o runs/azure
    dsim replay mooncake-conv --policy ar --rate 4 --num-requests 500 --json

    What to do:
      --as-logged: TRACE is a step log: replay its requests under the policy and settings that it names.
    Traffic:
      --concurrency N: Closed loop: N requests in flight, the trace as a queue.
      --sessions: Send a session's turn only after the previous turn has ended.
      --drain: Serve the requests in flight after the last arrival, or count them as unfinished.
    Policy and profile:
      --policy SPEC: name[:value][,field=value...] or a TOML file; repeat to compare.
    Fleet and price:
      --scaler S: {SCALERS}, or your own ./mine.py:SCALER; then ,field=value...
      --startup SECONDS: Time to start a replica.
    Execution:
      --jobs N: Replays of --ensemble at once; by default all cores.
    """

    COMMON = "policy profile slos rate arrival lengths num_requests replicas router fleet concurrency ensemble seed out"

    policy: "PolicyLike | Sequence[PolicyLike]" = ()
    _: KW_ONLY
    as_logged: bool = False
    slos: Sequence[str] = ()
    scaler: str = choices.FIXED
    startup: float = 0.0
    eos: bool | None = None
    ensemble: int | None = None
    concurrency: int | None = None
    sessions: bool = False
    drain: bool = True
    jobs: int | None = None
    fail_on_slo: bool = False

    @property
    def specs(self) -> list[str]:
        """As named; none for the default."""
        return [q.name_of(policy) for policy in q.listed(self.policy)]

    def resolve(self) -> "list[World]":
        """One world a policy."""
        from ..results.world import on_fleet, replicas_of

        words = self.fleet_words(self.specs or None, scaler=self.scaler, startup=self.startup)
        policies = choices.POLICY if self.policy == () else self.policy
        replicas = replicas_of(self.specs, self.replicas)
        return on_fleet(q.worlds_of(self, policies, self.profile, replicas=replicas), words, trusted=self.fleet is None)

    def answer(self, watch: Watch) -> "Answer[RunResult]":
        about: dict[str, Any] = {"command": watch.command()}
        if not self.as_logged:
            return self._replayed(watch, about)
        from .as_logged import as_logged

        question, logged = as_logged(self, watch)
        return question._replayed(watch, about | logged)

    def _replayed(self, watch: Watch, about: dict[str, Any]) -> "Answer[RunResult]":
        from ..planner.record import fleet_cost, in_twin, record, shortages
        from ..results.run import read_run
        from ..results.run_info import FILES

        worlds = self.resolve()
        requests = worlds[0].requests()
        warn(watch, *worlds)
        warn_of_yields(watch, *worlds)
        if self.gpu_hour is not None:
            about["cost"] = fleet_cost(worlds, self.gpu_hour, self.currency)
        if self.ensemble is not None:
            from ..planner.backend import Pool
            from ..planner.ensemble import check_num, ensemble  # loads SciPy

            check_num(self.ensemble, worlds)
            with watch.bar("ensemble", "replays", note="starting") as bar, Pool(jobs=self.jobs) as pool:
                drawn = ensemble(worlds, requests, self.ensemble, pool=pool, progress=bar.update)
            about["ensemble"] = drawn
        with watch.bar("replay", "requests") as bar:
            runs = watch_runs(bar, len(worlds), len(requests), "starting", " simulated")
            run = record(
                worlds,
                requests,
                in_twin,
                out=self.folder,
                force=self.force,
                watch=runs,
                about=lambda results: about | {"shortages": shortages(worlds[: len(results)], requests)},
            )
        if self.folder is None:
            temporary, folder = q.kept_folder(None, watch)

            def replayed_again() -> "Run":
                assert folder is not None
                record(worlds, requests, in_twin, out=folder)
                return read_run(folder, worlds[0].allow_code)

            run = replace(run, open=replayed_again, temporary=temporary)
        missed: list[str] = missed_slos(run.policies) if self.fail_on_slo else []
        return Answer(value=run, out=self.folder, files=FILES, interrupted=stopped(run, worlds), missed=missed)
