"""dsim import: a load generator's measurements of a server as a run."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..engine.errors import DsimError
from . import questions as q
from .answer import Answer
from .declared import Question, Watch

if TYPE_CHECKING:
    from ..report.run_page import RunResult
    from .objects import TraceLike


@dataclass(frozen=True)
class ImportQuestion(q.OfFile, q.Forced, Question["RunResult"]):
    """Import a load generator's measurements of a server as a run, with dsim's definitions of metrics.

    dsim import bench.json --trace trace.jsonl --slo ttft=2s -o runs/measured
    dsim import spend.json --only model=sdar-8b --slo ttft=2s -o runs/measured
    dsim import bench.json --log steps.jsonl --json

    Arguments:
      file FILE: Of vllm bench serve --save-detailed, guidellm (JSON) or aiperf (profile_export.jsonl), or a gateway's
          log (LiteLLM's, or any with --columns) that has start, first token and end.
    Traffic:
      --trace T: The trace that the client replayed: its arrivals and lengths.
    Policy and profile:
      --policy NAME: Name of the server's policy: a twin's, to compare with it; by default from the step log.
    Measurement:
      --log FILE: The server's step log of the same time: adds its steps.
    Fleet and price:
      --replicas N: Replicas behind the router.
    """

    file: str | Path
    _: KW_ONLY
    trace: "TraceLike | None" = None
    policy: str | None = None
    log: str | Path | None = None
    replicas: int = 1
    slos: Sequence[str] = ()

    def answer(self, watch: Watch) -> "Answer[RunResult]":
        from ..comparison.clients.client_file import read_client
        from ..comparison.clients.measured import client_lines, measured_run, write_measured
        from ..engine.spec import PRESETS
        from ..files.read import printable
        from ..profiler.steplog import policy_of, read_log
        from ..report.run_page import RunResult
        from ..results.run import read_run
        from ..results.run_info import FILES
        from ..results.slo import Slo
        from ..results.world import MAX_REPLICAS
        from ..traces import Trace, load

        q.check_range("replicas", self.replicas, 1, MAX_REPLICAS)
        options = self.values("only", "skip_bad")
        if self.trace is None:  # else these options are the trace's
            options |= self.values("columns", "time_unit")
        client = read_client(self.file, **options)
        if self.log is not None and client.steps is not None:
            raise DsimError(f"log is {self.log} and {self.file} is a step log itself: expected one of them")
        engine = client.steps or q.optional(read_log, q.optional(Path, self.log))
        default = "server"
        if engine is not None and engine.header.preset in PRESETS:
            default = policy_of(engine.header)[0]
        trace = self.trace
        if trace is not None and not isinstance(trace, Trace):
            trace = load(trace, time_unit=self.time_unit, columns=self.columns)
        run = measured_run(
            client,
            trace,
            policy=printable(self.policy or default),
            slos=[Slo.parse(text) for text in self.slos],
            replicas=self.replicas,
            engine=engine,
        )
        about = run.info.client
        assert about is not None
        run = replace(run, info=replace(run.info, command=watch.command()))
        watch.warn([*client.warnings, *about.warnings])
        temporary, folder = q.kept_folder(self.folder, watch)
        opened = None
        if folder is not None:
            write_measured(run, folder, force=self.force)
            opened = partial(read_run, folder)
        result = RunResult.from_info(
            run.info, open=opened, columns={run.info.policies[0].policy: run.columns}, temporary=temporary
        )
        return Answer(value=result, lines=client_lines(about), out=self.folder, files=FILES)
