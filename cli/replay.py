"""dsim replay: a trace through the twin, with one or several policies side by side."""

import os
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from typing import Annotated as A

from . import choices
from . import questions as q
from .answer import Answer
from .bar import watch_runs
from .cautions import missed_slos, stopped, warn, warn_of_yields
from .declared import Opt, Question, Watch

if TYPE_CHECKING:
    from ..report.run import RunResult
    from ..results.run import Run
    from ..results.world import World
    from .objects import PolicyLike


@dataclass(frozen=True)
class ReplayQuestion(q.OnFleet, q.Paced, q.Priced, q.Forced, Question["RunResult"]):
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
    ensemble: A[int | None, q.ENSEMBLE] = None
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
            "Time to start a replica; or its parts, such as provision=240+-30,load=18.", "SECONDS",
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

    def resolve(self) -> "list[World]":
        """One world a policy."""
        from ..results.world import on_fleet, replicas_of

        words = self.fleet_words(self.specs or None, scaler=self.scaler, startup=str(self.startup))
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
        from ..comparison.measured_log import columns_of, measured_log
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
        serve = partial(in_twin, threads=self.jobs or os.cpu_count() or 1)
        with watch.bar("replay", "requests") as bar:
            run = record(
                worlds, requests, serve, out=self.folder, force=self.force,
                watch=watch_runs(bar, len(worlds), len(requests), "starting", " simulated"),
                about=lambda results: {
                    **about, "shortages": shortages(worlds[: len(results)], requests),
                    "measured": measured_log(worlds[0], columns_of(worlds, results)),
                },
            )  # fmt: skip
        if self.folder is None:
            temporary, folder = q.kept_folder(None, watch)

            def replayed_again() -> "Run":
                assert folder is not None
                record(worlds, requests, in_twin, out=folder)
                return read_run(folder, worlds[0].allow_code)

            run = replace(run, open=replayed_again, temporary=temporary)
        return Answer(
            value=run, out=self.folder, files=FILES, interrupted=stopped(run, worlds),
            missed=missed_slos(run.policies) if self.fail_on_slo else (),
        )  # fmt: skip
