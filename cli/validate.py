"""dsim validate: profile, replay, serve and compare over policies and loads, in one run."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from typing import Annotated as A

from ..engine.errors import DsimError
from ..files.duration import seconds_of
from . import choices
from . import questions as q
from .answer import Answer
from .declared import Opt, Question, Watch

if TYPE_CHECKING:
    from ..device.validate import Cell, Validated
    from ..engine.policy import Policy
    from ..profiler.measure import Opened
    from ..profiler.profile import Profile
    from ..sim.twin import Progress
    from .objects import PolicyLike, ProfileLike, TraceLike

PROFILE_SHARE = 0.4  # of the budget, without a profile
CELLS_SHARE = 0.75  # of the rest: serving outlasts arrivals
FILES = ("profile.json", "cells/", "comparison/", "validation.json")


@dataclass(frozen=True)
class ValidateQuestion(q.OnDevice, q.Coded, Question["Validated"]):
    """Measure how far the twin is from this device: profile, predict, serve, compare.

    dsim validate --model tiny --budget 10m --lengths lognormal:96,48,64,32 -o runs/validation
    dsim validate --model ./SDAR-8B-Chat --policy optimus --bound e2el=3% -o runs/validation
    """

    COMMON: ClassVar = (
        "out", "budget", "model", "random_weights", "device", "profile", "policies", "loads", "trace", "lengths",
        "commits", "workload", "prompts", "bounds",
    )  # fmt: skip

    out: A[
        str | Path,
        Opt(
            "Folder of all runs, the profile and the comparison; a second call continues.", "DIR", "Output",
            ("-o", "--out"),
        ),
    ]  # fmt: skip
    _: KW_ONLY
    budget: A[
        float, Opt("About how long it may take: 90s, 20m, 1h.", "T", "Measurement", read=seconds_of, text="20m")
    ] = 1200.0
    model: A[str | None, Opt("tiny (the default), or a Hugging Face directory.", "M", "Model and device")] = None
    profile: A[
        "ProfileLike | None",
        Opt("A measured profile of the model; by default it is measured now.", "P", "Policy and profile"),
    ] = None
    policies: A[
        "Sequence[PolicyLike]",
        Opt(
            f"A policy; repeat. By default {', '.join(choices.VALIDATE_POLICIES)}.", "SPEC", "Policy and profile",
            ("--policy",),
        ),
    ] = ()  # fmt: skip
    loads: A[
        Sequence[str | float],
        Opt(
            "Requests in flight, full (the largest batch), or a share (below 1) of the policy's predicted capacity; "
            f"repeat, the most important first. By default {', '.join(choices.VALIDATE_LOADS)}.", "X",
            "Traffic", ("--load",),
        ),
    ] = ()  # fmt: skip
    seconds: A[
        float | None,
        Opt("More time of each cell than 30 requests take; by default from the budget.", "S", "Measurement"),
    ] = None
    trace: A["TraceLike", Opt("Trace with the requests' lengths; not one used for profiling.", "TRACE", "Traffic")] = (
        "azure-conv"
    )
    columns: A[str | None, q.COLUMNS] = None
    lengths: A[str | None, q.LENGTHS] = None
    commits: A[str, Opt("twin: the profile's draws; model: the weights decide.", "C", "Policy and profile")] = "twin"
    workload: A[str | None, q.WORKLOAD] = None
    prompts: A[str | None, Opt("The prompts, for --commits model.", "FILE", "Traffic")] = None
    seed: A[int, q.SEED] = 1
    bounds: A[
        Sequence[str],
        Opt("[stat:]metric=percent: e2el=3%; exit 1 when missed; repeat.", "BOUND", "SLOs and quality", ("--bound",)),
    ] = ()

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
        both_ways = True in families
        if len(families) > 1:
            raise DsimError(f"{' and '.join(specs)}: expected policies of full-sequence models, or none of these")
        from ..live.config import named  # loads PyTorch, as the next
        from ..profiler.measure import LoadedCanvas, open_any
        from ..profiler.profile import load, save

        name, settings = named(self.model, self.random_weights, self.mask_token_id, self.block_length)
        loaded = open_any(name, self.device, 0, self.graphs, settings)
        if isinstance(loaded, LoadedCanvas) and not self.policies:
            specs = canvas_policies(loaded.model.config.canvas_length)
        parsed = [parse(spec, code) for spec in specs]
        file = out / "profile.json" if self.profile is None else Path(profile_name(self.profile))
        is_profiled = self.profile is not None or file.is_file()
        with watch.bar("validate", "s", round(self.budget)) as bar:

            def elapsed() -> float:
                return time.monotonic() - begin

            def report(phase: str) -> None:
                bar.update(min(round(elapsed()), round(self.budget)), note=phase)

            @contextmanager
            def watch_cell(cell: "Cell", policy: str) -> "Iterator[Progress]":
                title = f"{policy} at load {cell.load}"
                report(f"{title}: warming up")
                yield lambda ended, now: report(f"{title}: {ended} requests, {now:,.1f} s")

            lock = hold_folder(out)  # earlier errors leave no folder
            memo = Memo()
            memo.open(out / STORE)
            if not is_profiled:
                profile = self._measured(loaded, parsed, both_ways, lambda phase, _: report(f"profile: {phase}"))
                save(profile, file)
            base = World(
                trace=trace, policy=specs[0], profile=str(file), workload=self.workload, lengths=self.lengths,
                num_requests=200, columns=self.columns if isinstance(self.trace, str | Path) else None, seed=self.seed,
                allow_code=code,
            )  # fmt: skip
            live = LiveSetting(loaded, load(str(file)), self.commits, self.prompts, self.tokenizer)
            validated = validate_cells(
                out / "cells", base, live, policies=specs, loads=loads, seconds=self.seconds, bounds=bounds,
                within=CELLS_SHARE * max(0.0, self.budget - elapsed()),
                fits=lambda expected: elapsed() + expected / CELLS_SHARE < self.budget, watch=watch_cell, memo=memo,
            )  # fmt: skip
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

    def _measured(self, loaded: "Opened", policies: "Sequence[Policy]", both_ways: bool, on_progress: Any) -> "Profile":
        from ..profiler.measure import LoadedCanvas, default_workloads, profile_model

        options: Any = {
            "name": f"{Path(self.out).name}-profile", "budget": PROFILE_SHARE * self.budget,
            "tokenizer": self.tokenizer, "on_progress": on_progress,
        }  # fmt: skip
        if isinstance(loaded, LoadedCanvas):
            workloads = {} if self.prompts is None else {Path(self.prompts).stem: self.prompts}
            return profile_model(loaded, workloads=workloads, **options)[0]
        thresholds = {
            policy.unmasking.threshold
            for policy in policies
            if policy.rows.commits == "masks" and policy.unmasking.strategy == "low_confidence_dynamic"
        }
        return profile_model(
            loaded, workloads={} if both_ways else default_workloads(loaded, self.prompts),
            thresholds=sorted(thresholds) or [0.9], both_ways=both_ways, **options,
        )[0]  # fmt: skip
