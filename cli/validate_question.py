"""dsim validate: replay, serve and compare over policies and loads, in one run."""

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from . import questions as q
from .answer import Answer
from .declared import Question, Watch

if TYPE_CHECKING:
    from ..planner.validation import Cell, Validated
    from .objects import PolicyLike, ProfileLike, TraceLike

CELLS_SHARE = 0.75  # of the budget: serving outlasts arrivals
FILES = ("cells/", "comparison/", "validation.json")


@dataclass(frozen=True)
class ValidateQuestion(q.OnDevice, q.Coded, Question["Validated"]):
    """Measure how far the twin is from this device: predict, serve, compare.

    dsim validate --model tiny --profile tiny.json --lengths lognormal:96,48,64,32 -o runs/validation
    dsim validate --model ./SDAR-8B-Chat --profile mine.json --policy optimus --bound e2el=3% -o runs/validation

    Output:
      -o, --out DIR: Folder of all runs and the comparison; a second call continues.
    Measurement:
      --budget TIME: About how long it may take: 90s, 20m, 1h.
      --seconds S: More time of each cell than 30 requests take; by default from the budget.
    Model and device:
      --model M: tiny (the default), or a Hugging Face directory.
    Policy and profile:
      --profile P: A measured profile of the model (dsim profile).
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

    COMMON = "out budget model random_weights device profile policies loads trace lengths commits prompts bounds"

    out: str | Path
    _: KW_ONLY
    profile: "ProfileLike"
    budget: float = 1200.0
    model: str | None = None
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
        from ..files.place import hold_folder, write_folder
        from ..files.write import write_whole
        from ..planner.validation import FEWEST_OF_TTFT, LOADS, POLICIES, canvas_policies, load_of
        from ..planner.validation import validate as validate_cells
        from ..report.html import result_files
        from ..results.on_device import LiveSetting
        from ..results.world import World, named_code
        from .objects import profile_name, spec_of, trace_name

        begin = time.monotonic()
        out = Path(self.out)
        trace = trace_name(self.trace, vars(self))
        bounds = [Bound.parse(text) for text in self.bounds]
        specs = list(map(spec_of, self.policies)) or list(POLICIES)
        loads = list(map(load_of, self.loads or LOADS))
        from ..profiler.measure import LoadedCanvas  # loads PyTorch

        loaded = self.loaded(self.model, 0)
        if not self.policies and isinstance(loaded, LoadedCanvas):
            specs = canvas_policies(loaded.model.config.canvas_length)
        world = World(
            trace=trace,
            policy=specs[0],
            profile=profile_name(self.profile),
            num_requests=200,
            allow_code=named_code(specs, self.allow_code),
            **self.values("workload", "lengths", "seed"),
        )
        if isinstance(self.trace, str | Path):  # else it is read
            world = replace(world, columns=self.columns)
        with watch.bar("validate", "s", round(self.budget)) as bar:

            def elapsed() -> float:
                return time.monotonic() - begin

            def watch_cell(cell: "Cell", policy: str) -> AbstractContextManager[None]:
                bar.update(min(round(elapsed()), round(self.budget)), note=f"{policy} at load {cell.load}")
                return nullcontext()

            lock = hold_folder(out)  # earlier errors leave no folder
            validated = validate_cells(
                out / "cells",
                world,
                LiveSetting(loaded, world.loaded_profile(), self.commits, self.prompts, tokenizer=self.tokenizer),
                policies=specs,
                loads=loads,
                seconds=self.seconds,
                bounds=bounds,
                within=CELLS_SHARE * max(0.0, self.budget - elapsed()),
                watch=watch_cell,
            )
        write_whole(out / "validation.json", validated.to_text())
        comparison = validated.comparison
        write_folder(out / "comparison", COMPARISON, result_files(comparison, watch.command()), force=True)
        lock.close()
        if "ttft" in str(self.bounds):
            watch.say(f"At least {FEWEST_OF_TTFT} requests a cell, as ttft is bounded")
        if validated.unmeasured:
            watch.say(f"Left out for the budget: {', '.join(validated.unmeasured)}")
        return Answer(value=validated, out=out, files=FILES, missed=comparison.missed)
