"""dsim profile: measure a profile here, fit one to a step log, or derive one from data sheets."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..engine.errors import DsimError
from ..files.read import printable, quoted
from ..files.write import check_file, tell, write_whole
from . import questions as q
from .answer import Answer
from .declared import Question, Watch

if TYPE_CHECKING:
    from ..profiler.measure import Opened
    from ..profiler.profile import Profile
    from ..profiler.samples import Samples
    from ..report.profile_page import Profiled


@dataclass(frozen=True)
class ProfileQuestion(q.OnDevice, Question["Profiled"]):
    """Measure a profile, fit one to a log, or derive one for hardware you do not own.

    dsim profile --model tiny -o mine.json
    dsim profile --from-log steps.jsonl -o mine.json
    dsim profile --roofline H200 --model SDAR-8B -o h200.json

    Exits with 1 if the fit fails its own checks, and prints the reasons.

    What to do:
      --roofline GPU: Derive the profile from a GPU's data sheet: its name, or a TOML (docs/plan.md).
      --from-log FILE: Fit the profile to a step log of any engine (docs/steplog.md).
      --client FILE: With --from-log: a load generator's file of the same time, to fit the front end.
    Model and device:
      --model M: What to measure: tiny, sdar-8b, a directory; with --roofline a name such as SDAR-8B, or a config.json.
    Measurement:
      --full-sequence: Profile for policies that attend in both directions; no commits are logged.
      --budget TIME: About how long it may take: 90s, 5m.
      --thresholds X%,...: Unmasking thresholds to log commits at: 0.8,0.9.
      --temperature X: Temperature at which commits are logged.
      --max-batch N: Most sequences of a measured step.
    Traffic:
      --prompts FILE: Text or token ids to log commits on, or NAME=FILE; repeat.
    Policy and profile:
      --yields P: A profile that provides the commit models and importance deltas, for random weights.
    Output:
      -o, --out FILE: The profile file to write.
    """

    COMMON = "model roofline from_log client random_weights budget prompts thresholds yields device weights out force"

    model: str | None = None
    _: KW_ONLY
    roofline: str | None = None
    from_log: str | Path | None = None
    client: str | Path | None = None
    tp: int = 1
    weights: str | None = None
    kv: str | None = None
    eos: bool = False
    full_sequence: bool = False
    budget: float = 300.0
    thresholds: Sequence[float] = (0.9,)
    temperature: float = 1.0
    prompts: Sequence[str] = ()
    yields: str | Path | None = None
    max_batch: int | None = None
    seed: int = 0
    out: str | Path | None = None
    force: bool = False

    def answer(self, watch: Watch) -> "Answer[Profiled]":
        files = self._files(watch)
        name = printable(next((file.stem for file in files), ""))
        if self.roofline is not None:
            profiled = self._derived(self.roofline, name, watch.command())
        elif self.from_log is not None:
            profiled = self._fitted(Path(self.from_log), name, watch)
        else:
            profiled = self._measured(watch, name, files)
        self._write(profiled, files)
        lines = [f"Wrote {', '.join(map(str, files))}"]
        return Answer(value=profiled, lines=lines * bool(files), code=int(bool(profiled.doubts)))

    def _write(self, profiled: "Profiled", files: list[Path]) -> None:
        from ..profiler.profile import save
        from ..report.html import to_html

        for path in files:
            if path == files[0]:
                save(profiled.profile, path, self.force)
            elif path.suffix == ".csv":
                write_whole(path, profiled.to_frame().to_csv(index=False))
            else:
                write_whole(path, to_html(profiled.page()))

    def _files(self, watch: Watch) -> list[Path]:
        """The profile's file, then its page and its steps' table; DsimError before minutes of measuring."""
        if self.roofline is not None and self.from_log is not None:
            raise DsimError("--roofline and --from-log are two ways to make a profile, expected one of them")
        is_fit = self.roofline is None
        if is_fit and self.from_log is None and self.model is None and self.random_weights is None:
            raise DsimError("nothing to profile: expected --model M, --from-log FILE, or --roofline GPU --model MODEL")
        if self.out is None:
            if is_fit and not watch.in_python:
                raise DsimError("--out is missing: a fitted profile is written to a file (-o FILE)")
            return []
        files = [check_file(self.out, force=self.force)]
        if is_fit and not watch.in_python:
            files.append(files[0].with_suffix(".html"))
        if is_fit and not watch.in_python and self.from_log is None:
            files.append(files[0].with_suffix(".csv"))
        for path in files[1:]:
            if path == files[0]:
                raise DsimError(f"--out is {path}, as its page or steps, expected another name: {path.stem}.json")
            check_file(path, force=self.force)
        return files

    def _measured(self, watch: Watch, name: str, files: list[Path]) -> "Profiled":
        from ..profiler.measure import profile_model  # loads PyTorch
        from ..profiler.profile import load
        from ..report.profile_page import Profiled

        for threshold in self.thresholds:
            if not (isinstance(threshold, float | int) and 0 < threshold <= 1):
                raise DsimError(f"thresholds holds {quoted(threshold)}, expected numbers above 0 and at most 1")
        begin = time.monotonic()
        lender = q.optional(load, self.yields)
        loaded = self.loaded(self.model, self.seed)
        options: dict[str, Any] = self.values("max_batch", "seed", "tokenizer", "thresholds", "temperature", "eos")

        def keep(profile: "Profile", evidence: "Samples") -> None:
            self._write(Profiled(profile, None, watch.command(), evidence), files)
            tell(f"Stopped early: wrote {', '.join(map(str, files))} with what was measured before")

        if files:
            options["keep"] = keep
        with watch.bar("measuring", "s", round(self.budget)) as bar:
            profile, evidence = profile_model(
                loaded,
                name=name or printable(Path(self.model or loaded.model.config.name).name),
                budget=max(self.budget / 2, self.budget - (time.monotonic() - begin)),
                workloads=self._workloads(loaded),
                yields=lender,
                both_ways=self.full_sequence,
                on_progress=lambda phase, share: bar.update(round(share * self.budget), note=phase),
                **options,
            )
        return Profiled(profile, None, watch.command(), evidence)

    def _derived(self, gpu_name: str, name: str, command: str) -> "Profiled":
        from ..planner.candidates import from_sheets
        from ..profiler.hardware import gpu
        from ..profiler.models import MODELS
        from ..profiler.precision import precision
        from ..profiler.roofline import sheet_of
        from ..report.profile_page import Profiled

        if self.model is None:
            raise DsimError(f"--model is missing, expected one of {', '.join(MODELS)}")
        options = self.values("weights", "kv") | {"graphs": self.graphs is not False, "name": name or None}
        options |= {"date": date.today().isoformat()}
        [profile] = from_sheets([gpu_name], self.model, self.tp, self.yields, **options)
        kind = precision(self.model, self.weights, self.kv)
        return Profiled(profile, sheet_of(profile, gpu(gpu_name), kind), command)

    def _fitted(self, path: Path, name: str, watch: Watch) -> "Profiled":
        from ..comparison.clients.client_file import read_client
        from ..comparison.clients.engine_log import frontend_of
        from ..profiler.steplog import of_random_tokens, profile_of_log, read_log
        from ..report.profile_page import Profiled

        log, frontend = read_log(path), 0.0
        if self.client is not None:
            frontend = frontend_of(log, read_client(Path(self.client)))
        profile = profile_of_log(log, name or printable(path.stem), str(path), frontend)
        if doubt := of_random_tokens(log):
            watch.warn([f"{path}: {doubt}"])
        return Profiled(profile, None, watch.command(), log.steps)

    def _workloads(self, loaded: "Opened") -> Mapping[str, str]:
        """Prompt files by workload."""
        from ..profiler.measure import LoadedCanvas, default_workloads

        if isinstance(loaded, LoadedCanvas):
            if self.full_sequence or self.eos:
                raise DsimError(f"{loaded.name} denoises canvases, expected neither --full-sequence nor --eos")
        elif not self.prompts and not self.full_sequence:
            return default_workloads(loaded)
        pairs = (text.rpartition("=") for text in self.prompts)
        return {workload or printable(Path(file).stem): file for workload, _, file in pairs}
