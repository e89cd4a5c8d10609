"""dsim profile: measure a profile here, fit one to a step log, or derive one from data sheets."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar
from typing import Annotated as A

from ..engine.errors import DsimError
from ..files.duration import seconds_of
from ..files.read import printable, quoted
from ..files.write import check_file, tell, write_whole
from . import questions as q
from .answer import Answer
from .declared import Opt, Question, Watch

if TYPE_CHECKING:
    from ..profiler.measure import Opened
    from ..profiler.profile import Profile
    from ..profiler.samples import Samples
    from ..report.profile import Profiled

PAGE = 7.0  # s, to start and to write the page
Files = tuple[Path | None, Path | None, Path | None]  # the profile, its page and its steps


@dataclass(frozen=True)
class ProfileQuestion(q.OnDevice, Question["Profiled"]):
    """Measure a profile, fit one to a log, or derive one for hardware you do not own.

    dsim profile --model tiny -o mine.json
    dsim profile --from-log steps.jsonl -o mine.json
    dsim profile --roofline H200 --model SDAR-8B -o h200.json

    Exits with 1 if the fit fails its own checks, and prints the reasons.
    """

    COMMON: ClassVar = (
        "model", "roofline", "from_log", "client", "random_weights", "budget", "prompts", "thresholds", "yields",
        "device", "weights", "kv", "out", "force",
    )  # fmt: skip

    model: A[
        str | None,
        Opt(
            "What to measure: tiny, sdar-8b, a directory; with --roofline a name such as SDAR-8B, or a config.json.",
            "M", "Model and device",
        ),
    ] = None  # fmt: skip
    _: KW_ONLY
    roofline: A[
        str | None,
        Opt("Derive the profile from a GPU's data sheet: its name, or a TOML (docs/plan.md).", "GPU", "What to do"),
    ] = None
    from_log: A[
        str | Path | None, Opt("Fit the profile to a step log of any engine (docs/steplog.md).", "FILE", "What to do")
    ] = None
    client: A[
        str | Path | None,
        Opt("With --from-log: a load generator's file of the same time, to fit the front end.", "FILE", "What to do"),
    ] = None
    tp: A[int, q.TP] = 1
    weights: A[str | None, q.WEIGHTS] = None
    kv: A[str | None, q.KV] = None
    eos: A[bool, q.ENDS_AT_EOS] = False
    full_sequence: A[
        bool,
        Opt("Profile for policies that attend in both directions; no commits are logged.", "", "Measurement"),
    ] = False
    budget: A[float, Opt("About how long it may take: 90s, 5m.", "T", "Measurement", read=seconds_of, text="5m")] = (
        300.0
    )
    thresholds: A[
        Sequence[float],
        Opt("Unmasking thresholds to log commits at: 0.8,0.9.", "X,...", "Measurement", read=q.shares, text="0.9"),
    ] = (0.9,)
    temperature: A[float, Opt("Temperature at which commits are logged.", "X", "Measurement")] = 1.0
    prompts: A[Sequence[str], Opt("Text or token ids to log commits on, or NAME=FILE; repeat.", "FILE", "Traffic")] = ()
    yields: A[str | Path | None, q.COMMIT_MODELS] = None
    max_batch: A[int | None, Opt("Most sequences of a measured step.", "N", "Measurement")] = None
    seed: A[int, q.SEED] = 0
    out: A[str | Path | None, Opt("The profile file to write.", "FILE", "Output", ("-o", "--out"))] = None
    force: A[bool, q.OVERWRITE] = False

    def answer(self, watch: Watch) -> "Answer[Profiled]":
        files = self._files(watch)
        file = files[0]
        name = "" if file is None else printable(file.stem)
        if self.roofline is not None:
            profiled = self._derived(self.roofline, name, watch.command())
        elif self.from_log is not None:
            profiled = self._fitted(Path(self.from_log), name, watch)
        else:
            profiled = self._measured(watch, name, files)
        written = self._write(profiled, files)
        return Answer(
            value=profiled, lines=[f"Wrote {written}"] if written else [],
            code=int(bool(profiled.doubts)),
        )  # fmt: skip

    def _write(self, profiled: "Profiled", files: Files) -> str:
        """The files written."""
        from ..profiler.profile import save
        from ..report.html import to_html

        file, page, steps = files
        if file is not None:
            save(profiled.profile, file, self.force)
        if steps is not None:
            write_whole(steps, profiled.to_frame().to_csv(index=False))
        if page is not None:
            write_whole(page, to_html(profiled.page()))
        return ", ".join(str(path) for path in files if path is not None)

    def _files(self, watch: Watch) -> Files:
        """The profile's, its page's and its steps'; DsimError before minutes of measuring."""
        if self.client is not None and self.from_log is None:
            raise DsimError(f"--client is {self.client} and --from-log is missing: expected the log of the same time")
        if self.roofline is not None and self.from_log is not None:
            raise DsimError("--roofline and --from-log are two ways to make a profile, expected one of them")
        is_fit = self.roofline is None
        if is_fit and self.from_log is None and self.model is None and self.random_weights is None:
            raise DsimError("nothing to profile: expected --model M, --from-log FILE, or --roofline GPU --model MODEL")
        if self.out is None and is_fit and not watch.in_python:
            raise DsimError("--out is missing: a fitted profile is written to a file (-o FILE)")
        file = None if self.out is None else Path(self.out)
        page = steps = None
        if file is not None and file.name and is_fit and not watch.in_python:
            page = file.with_suffix(".html")
            steps = file.with_suffix(".csv") if self.from_log is None else None
        if file is not None and file in (page, steps):
            raise DsimError(f"--out is {file}, as its page or steps, expected another name, such as {file.stem}.json")
        for path in filter(None, (file, page, steps)):
            check_file(path, force=self.force)
        return file, page, steps

    def _measured(self, watch: Watch, name: str, files: Files) -> "Profiled":
        from ..live.config import named  # loads PyTorch, as the next
        from ..profiler.measure import open_any, profile_model
        from ..profiler.profile import load
        from ..report.profile import Profiled

        for threshold in self.thresholds:
            if not (isinstance(threshold, float | int) and 0 < threshold <= 1):
                raise DsimError(f"thresholds holds {quoted(threshold)}, expected numbers above 0 and at most 1")
        begin = time.monotonic()
        lender = load(self.yields) if self.yields else None
        model, settings = named(self.model, self.random_weights, self.mask_token_id, self.block_length)
        loaded = open_any(model, self.device, self.seed, self.graphs, settings)
        workloads = self._workloads(loaded)

        def keep(profile: "Profile", evidence: "Samples") -> None:
            written = self._write(Profiled(profile, None, watch.command(), evidence), files)
            tell(f"Stopped early: wrote {written} with what was measured before")

        total, for_page = self.budget, PAGE if files[1] is not None else 0.0
        with watch.bar("measuring", "s", round(total)) as bar:
            profile, evidence = profile_model(
                loaded,
                name=name or printable(Path(self.model or loaded.model.config.name).name),
                budget=max(total / 2, total - (time.monotonic() - begin) - for_page),
                workloads=workloads,
                thresholds=self.thresholds,
                temperature=self.temperature,
                yields=lender,
                max_batch=self.max_batch,
                seed=self.seed,
                both_ways=self.full_sequence,
                tokenizer=self.tokenizer,
                eos=self.eos,
                keep=None if files[0] is None else keep,
                on_progress=lambda phase, share: bar.update(round(share * total), note=phase, eta=(1 - share) * total),
            )
        return Profiled(profile, None, watch.command(), evidence)

    def _derived(self, gpu_name: str, name: str, command: str) -> "Profiled":
        from ..profiler import models
        from ..profiler.hardware import gpu
        from ..profiler.precision import precision
        from ..profiler.profile import load
        from ..profiler.roofline import roofline, sheet_of
        from ..report.profile import Profiled

        if self.model is None:
            raise DsimError(f"--model is missing, expected one of {', '.join(models.MODELS)}")
        shape = models.model(self.model)
        kind = precision(self.model, self.weights, self.kv)
        profile = roofline(
            gpu(gpu_name), shape, self.tp, graphs=self.graphs is not False, name=name or None,
            date=date.today().isoformat(),
            generates=models.family(shape, models.architecture_of(self.model)),
            yields=load(self.yields).commits if self.yields else (), precision=kind,
        )  # fmt: skip
        return Profiled(profile, sheet_of(profile, gpu(gpu_name), kind), command)

    def _fitted(self, path: Path, name: str, watch: Watch) -> "Profiled":
        from ..profiler.steplog import of_random_tokens, profile_of_log, read_log
        from ..report.profile import Profiled

        log, frontend = read_log(path), 0.0
        if self.client is not None:
            from ..comparison.clients.engine import frontend_of
            from ..comparison.clients.read import read_client

            frontend = frontend_of(log, read_client(Path(self.client)))
        profile = profile_of_log(log, name or printable(path.stem), str(path), frontend)
        if doubt := of_random_tokens(log):
            watch.warn([f"{path}: {doubt}"])
        return Profiled(profile, None, watch.command(), log.steps)

    def _workloads(self, loaded: "Opened") -> Mapping[str, str]:
        """Prompt files by workload."""
        from ..profiler.measure import LoadedCanvas, default_workloads

        if isinstance(loaded, LoadedCanvas):
            for name in ("full_sequence", "eos"):
                if self.sets(name):
                    option = f"--{name.replace('_', '-')}"
                    raise DsimError(
                        f"{loaded.name}: {option} is given, expected none for a model that denoises canvases"
                    )
        elif not self.prompts and not self.full_sequence:
            return default_workloads(loaded)
        workloads = {}
        for text in self.prompts:
            workload, equals, file = text.partition("=")
            workloads[workload if equals else printable(Path(text).stem)] = file if equals else text
        return workloads
