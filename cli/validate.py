"""dsim validate: profile, replay, serve and compare over policies and loads, in one run."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..engine.errors import DsimError
from . import questions as q
from .answer import Answer
from .declared import Question, Watch

if TYPE_CHECKING:
    from ..device.validate import Cell, Validated
    from ..engine.policy import Policy
    from ..profiler.measure import Opened
    from ..profiler.profile import Profile
    from .objects import PolicyLike, ProfileLike, TraceLike

PROFILE_SHARE = 0.4  # of the budget, without a profile
CELLS_SHARE = 0.75  # of the rest: serving outlasts arrivals
FILES = ("profile.json", "cells/", "comparison/", "validation.json")


@dataclass(frozen=True)
class ValidateQuestion(q.OnDevice, q.Coded, Question["Validated"]):
    """Measure how far the twin is from this device: profile, predict, serve, compare.

    dsim validate --model tiny --budget 10m --lengths lognormal:96,48,64,32 -o runs/validation
    dsim validate --model ./SDAR-8B-Chat --policy optimus --bound e2el=3% -o runs/validation

    Output:
      -o, --out DIR: Folder of all runs, the profile and the comparison; a second call continues.
    Measurement:
      --budget TIME: About how long it may take: 90s, 20m, 1h.
      --seconds S: More time of each cell than 30 requests take; by default from the budget.
    Model and device:
      --model M: tiny (the default), or a Hugging Face directory.
    Policy and profile:
      --profile P: A measured profile of the model; by default it is measured now.
      --policy SPEC (policies): A policy; repeat. By default {VALIDATE_POLICIES}.
      --commits C: twin: the profile's draws; model: the weights decide.
    Traffic:
      --load X (loads): Requests in flight, full (the largest batch), or a share (below 1) of the policy's predicted
          capacity; repeat, the most important first. By default {VALIDATE_LOADS}.
      --trace TRACE: Trace with the requests' lengths; not one used for profiling.
      --prompts FILE: The prompts, for --commits model.
    SLOs and quality:
      --bound BOUND (bounds): [stat:]metric=percent: e2el=3%; exit 1 when missed; repeat.
    """

    COMMON = (
        "out budget model random_weights device profile policies loads trace lengths commits workload prompts bounds"
    )

    out: str | Path
    _: KW_ONLY
    budget: float = 1200.0
    model: str | None = None
    profile: "ProfileLike | None" = None
    policies: "Sequence[PolicyLike]" = ()
    loads: Sequence[str | float] = ()
    seconds: float | None = None
    trace: "TraceLike" = "azure-conv"
    columns: str | None = None
    lengths: str | None = None
    commits: str = "twin"
    workload: str | None = None
    prompts: str | None = None
    seed: int = 1
    bounds: Sequence[str] = ()

    def answer(self, watch: Watch) -> "Answer[Validated]":
        from ..comparison.bounds import Bound
        from ..comparison.comparison import COMPARISON
        from ..device.on_device import LiveSetting
        from ..device.validate import FEWEST_OF_TTFT, LOADS, POLICIES, canvas_policies, load_of
        from ..device.validate import validate as validate_cells
        from ..engine.policy import parse
        from ..files.place import hold_folder, write_folder
        from ..files.write import write_whole
        from ..planner.memo import STORE, Memo
        from ..report.html import result_files
        from ..results.world import World, named_code
        from .objects import profile_name, spec_of, trace_name

        begin = time.monotonic()
        out = Path(self.out)
        trace = trace_name(self.trace, vars(self))
        bounds = [Bound.parse(text) for text in self.bounds]
        specs = list(map(spec_of, self.policies)) or list(POLICIES)
        loads = list(map(load_of, self.loads or LOADS))
        code = named_code(specs, self.allow_code)
        families = {parse(spec, code).family == "full-sequence" for spec in specs}
        if len(families) > 1:
            raise DsimError(f"{' and '.join(specs)}: expected policies of full-sequence models, or none of these")
        from ..profiler.measure import LoadedCanvas, seconds_to_compile  # loads PyTorch
        from ..profiler.profile import load, save

        loaded = self.loaded(self.model, 0)
        if isinstance(loaded, LoadedCanvas) and not self.policies:
            specs = canvas_policies(loaded.model.config.canvas_length)
        parsed = [parse(spec, code) for spec in specs]
        file = Path(q.optional(profile_name, self.profile) or out / "profile.json")
        is_profiled = self.profile is not None or file.is_file()
        compiling = seconds_to_compile(parsed)
        with watch.bar("validate", "s", round(self.budget)) as bar:

            def elapsed() -> float:
                return time.monotonic() - begin

            def report(phase: str) -> None:
                bar.update(min(round(elapsed()), round(self.budget)), note=phase)

            def watch_cell(cell: "Cell", policy: str) -> AbstractContextManager[None]:
                report(f"{policy} at load {cell.load}")
                return nullcontext()

            lock = hold_folder(out)  # earlier errors leave no folder
            memo = Memo()
            memo.open(out / STORE)
            if not is_profiled:
                save(self._measured(loaded, parsed, True in families, report), file)
            base = World(
                trace=trace,
                policy=specs[0],
                profile=str(file),
                num_requests=200,
                columns=self.columns if isinstance(self.trace, str | Path) else None,
                allow_code=code,
                **self.values("workload", "lengths", "seed"),
            )
            live = LiveSetting(loaded, load(str(file)), self.commits, self.prompts, self.tokenizer)
            validated = validate_cells(
                out / "cells",
                base,
                live,
                policies=specs,
                loads=loads,
                seconds=self.seconds,
                bounds=bounds,
                within=CELLS_SHARE * max(0.0, self.budget - elapsed() - compiling),
                fits=lambda expected: elapsed() + expected / CELLS_SHARE < self.budget,
                watch=watch_cell,
                memo=memo,
            )
        write_whole(out / "validation.json", validated.to_text())
        comparison = validated.comparison
        write_folder(out / "comparison", COMPARISON, result_files(comparison, watch.command()), force=True)
        memo.close()
        lock.close()
        if "ttft" in str(self.bounds):
            watch.say(f"At least {FEWEST_OF_TTFT} requests a cell, as ttft is bounded")
        if validated.unmeasured:
            watch.say(f"Left out for the budget: {', '.join(validated.unmeasured)}")
        return Answer(value=validated, out=out, files=FILES, missed=comparison.missed)

    def _measured(
        self, loaded: "Opened", policies: "Sequence[Policy]", both_ways: bool, report: Callable[[str], None]
    ) -> "Profile":
        from ..profiler.measure import LoadedCanvas, default_workloads, profile_model
        from ..profiler.measure_canvas import profile_canvas

        options: dict[str, Any] = {"name": f"{Path(self.out).name}-profile", "budget": PROFILE_SHARE * self.budget}
        options |= {"tokenizer": self.tokenizer, "on_progress": lambda phase, _: report(f"profile: {phase}")}
        if isinstance(loaded, LoadedCanvas):
            workloads = {Path(prompts).stem: prompts for prompts in filter(None, [self.prompts])}
            return profile_canvas(loaded, workloads=workloads, **options)[0]
        thresholds = {
            policy.unmasking.threshold
            for policy in policies
            if policy.rows.commits == "masks" and policy.unmasking.strategy == "low_confidence_dynamic"
        }
        workloads = {} if both_ways else default_workloads(loaded, self.prompts)
        options |= {"thresholds": sorted(thresholds) or [0.9], "both_ways": both_ways}
        return profile_model(loaded, workloads=workloads, **options)[0]
