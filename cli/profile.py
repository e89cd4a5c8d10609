"""dsim profile: measure a profile here, fit one to a step log, or derive one from data sheets."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import KW_ONLY, dataclass
from datetime import date
from functools import partial
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
    from ..profiler.canvas import Opened
    from ..profiler.profile import Profile
    from ..report.profiled import Profiled

PAGE = 7.0  # s, to start and to write the page


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
    eager: A[bool, Opt("Without captured graphs, with --roofline.", "", "Model and device", needs=("roofline",))] = (
        False
    )
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
        from ..profiler import hardware, models
        from ..profiler.profile import save
        from ..report.html import to_html
        from ..report.profile_words import derived_facts, derived_lines, fitted_lines

        file, page, samples = self._files(watch)
        name = "" if file is None else printable(file.stem)
        doubts: list[str] = []
        if self.roofline is not None:
            done = self._derived(self.roofline, name)
        elif self.from_log is not None:
            done, doubts = self._fitted(Path(self.from_log), name)
            watch.warn(doubts)
        else:
            done = self._measured(watch, file, name, PAGE if page is not None else 0.0)
        if file is not None:
            save(done.profile, file, self.force or done.is_measured)  # this measurement wrote it
        if page is not None and done.steps is not None:
            write_whole(page, to_html(done.page(watch.command())))
        if samples is not None:
            write_whole(samples, done.to_frame().to_csv(index=False))
        written = [str(path) for path in (file, page, samples) if path is not None]
        profile = done.profile
        lines = [f"{profile.description}: {profile.verdict}"]
        if self.roofline is not None:
            assert self.model is not None
            facts = derived_facts(profile, hardware.gpu(self.roofline), models.model(self.model), self.tp)
            lines += ["  " + line for line in derived_lines(profile, facts)]
            json = {**facts, "written": written[0] if written else None}
        else:
            lines += ["  " + line for line in fitted_lines(profile)]
            if self.from_log is not None:
                measured = f"{profile.frontend * 1e3:.3g} ms between a client and the engine, by {self.client}"
                lines.append(f"  front end {'not measured: 0 (--client)' if self.client is None else measured}")
            lines += ["Not valid: " + line for line in done.doubts]
            json = {**done.to_json(), "doubts": done.doubts, "written": written}
        lines += [f"Wrote {', '.join(written)}"] if written else []
        return Answer(value=done, json=json, lines=lines, code=int(bool(done.doubts)))

    def _files(self, watch: Watch) -> tuple[Path | None, Path | None, Path | None]:
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
        page = samples = None
        if file is not None and file.name and is_fit and not watch.in_python:
            page = file.with_suffix(".html")
            samples = file.with_suffix(".csv") if self.from_log is None else None
        if file is not None and file in (page, samples):
            raise DsimError(f"--out is {file}, as its page or steps, expected another name, such as {file.stem}.json")
        for path in filter(None, (file, page, samples)):
            check_file(path, force=self.force)
        return file, page, samples

    def _measured(self, watch: Watch, file: Path | None, name: str, for_page: float) -> "Profiled":
        from ..live.config_file import named  # loads PyTorch, as the next
        from ..profiler.canvas import LoadedCanvas, open_any
        from ..profiler.measure import profile_model
        from ..profiler.measure_canvas import profile_canvas
        from ..profiler.profile import load
        from ..report.profiled import Profiled

        for threshold in self.thresholds:
            if not (isinstance(threshold, float | int) and 0 < threshold <= 1):
                raise DsimError(f"thresholds holds {quoted(threshold)}, expected numbers above 0 and at most 1")
        begin = time.monotonic()
        lender = load(self.yields) if self.yields else None
        model, settings = named(self.model, self.random_weights, self.mask_token_id, self.block_length)
        loaded = open_any(model, self.device, self.seed, self.graphs, settings)
        workloads = self._workloads(loaded)
        if isinstance(loaded, LoadedCanvas):
            measure = partial(profile_canvas, loaded, laws=lender.canvas_laws if lender else ())
        else:
            measure = partial(
                profile_model, loaded, thresholds=self.thresholds, temperature=self.temperature, yields=lender,
                both_ways=self.full_sequence, eos=self.eos,
            )  # fmt: skip
        with ExitStack() as stack:
            total = self.budget
            bar = stack.enter_context(watch.bar("measuring", "s", round(total)))
            keep = stack.enter_context(_keeping(file))
            profile, evidence = measure(
                name=name or printable(Path(self.model).name if self.model else loaded.model.config.name),
                budget=max(total / 2, total - (time.monotonic() - begin) - for_page), workloads=workloads,
                max_batch=self.max_batch, seed=self.seed, tokenizer=self.tokenizer, keep=keep,
                on_progress=lambda what, share: bar.update(round(share * total), note=what, rest=(1 - share) * total),
            )  # fmt: skip
        return Profiled(profile, evidence.steps, evidence.logs, evidence.served, is_measured=True)

    def _derived(self, gpu: str, name: str) -> "Profiled":
        from ..profiler import hardware, models
        from ..profiler.precision import precision
        from ..profiler.profile import load
        from ..profiler.roofline import roofline
        from ..report.profiled import Profiled

        if self.model is None:
            raise DsimError(f"--model is missing, expected one of {', '.join(models.MODELS)}")
        sheet, shape = hardware.gpu(gpu), models.model(self.model)
        return Profiled(
            roofline(
                sheet, shape, self.tp, graphs=not self.eager, name=name or None, date=date.today().isoformat(),
                generates=models.family(shape, models.architecture_of(self.model)),
                yields=load(self.yields).commits if self.yields else (),
                precision=precision(self.model, self.weights, self.kv),
            )
        )  # fmt: skip

    def _fitted(self, path: Path, name: str) -> "tuple[Profiled, list[str]]":
        """With its doubts."""
        from ..profiler.steplog import of_random_tokens, profile_of_log, read_log
        from ..report.profiled import Profiled

        log, frontend = read_log(path), 0.0
        if self.client is not None:
            from ..comparison.clients.engine import frontend_of
            from ..comparison.clients.read import read_client

            frontend = frontend_of(log, read_client(Path(self.client)))
        profile = profile_of_log(log, name or printable(path.stem), str(path), frontend)
        key = log.header.workload, log.header.threshold
        doubts = [f"{path}: {why}" for why in filter(None, [of_random_tokens(log)])]
        return Profiled(profile, log.steps, {key: log.commits} if len(log.commits) else {}), doubts

    def _workloads(self, loaded: "Opened") -> Mapping[str, str]:
        """Prompt files by workload."""
        from ..profiler.canvas import LoadedCanvas
        from ..profiler.measure import default_workloads

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


@contextmanager
def _keeping(file: Path | None) -> "Iterator[Callable[[Profile], object]]":
    """Saves the profile so far; a later failure's message names the file."""
    from ..profiler.profile import save

    is_saved = False

    def keep(so_far: "Profile") -> None:
        nonlocal is_saved
        if file is not None:
            save(so_far, file, True)
            is_saved = True

    try:
        yield keep
    except BaseException:
        if is_saved:
            tell(f"{file} holds the profile of what was measured before")
        raise
