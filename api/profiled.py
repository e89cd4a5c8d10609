"""`dsim.profile`: measure a profile here, fit one to a step log, or derive one from data sheets."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..engine.errors import DsimError
from ..files.read import printable, quoted
from ..files.write import check_file, tell, write_whole
from ..profiler.profile import Profile, load, save
from ..report.page import Page
from ..report.shown import Showable
from .scenarios import texts_of
from .signature import real_signature, warn

if TYPE_CHECKING:
    import pandas as pd

    from ..profiler.canvas import Opened
    from ..profiler.commit_log import CommitLog
    from ..profiler.samples import Samples


PAGE = 5.0  # s, for the page


@dataclass(frozen=True, repr=False)
class Profiled(Showable):
    """A profile and the data of its fit."""

    profile: Profile
    steps: "Samples | None" = None  # None: derived
    logs: "Mapping[tuple[str, float], CommitLog]" = field(default_factory=dict)  # by workload and threshold
    served: "Samples | None" = None  # every second one judged the fit; None: part of `steps` did

    @property
    def doubts(self) -> list[str]:
        """Why not to trust the profile, a line each."""
        return self.profile.doubts

    def page(self, command: str = "") -> Page:
        from ..report.profile_page import derived_page, profile_page

        if self.steps is None:
            return derived_page(self.profile)
        return profile_page(self.profile, self.steps, self.logs, command, self.served)

    def to_frame(self) -> "pd.DataFrame":
        """One row per measured step: features, latency, device time and the fitted latency (s); empty for a derived
        profile.

        served: whether serving measured the step; the fit has every second of these, and the others judged it.
        """
        import pandas as pd

        from ..profiler.fit import predict
        from ..profiler.samples import FEATURES, samples

        parts = []
        for steps, served in ((self.steps or samples([], []), False), (self.served, True)):
            if steps is not None:
                columns: dict[str, Any] = dict(zip(FEATURES, steps.features.T, strict=True))
                columns |= {"latency": steps.latency, "device": steps.device}
                parts.append(
                    pd.DataFrame({**columns, "fitted": predict(self.profile.latency, steps.features), "served": served})
                )
        return pd.concat(parts, ignore_index=True)

    def to_json(self) -> dict[str, Any]:
        """As in its file."""
        from ..profiler.profile import to_json

        found: dict[str, Any] = to_json(self.profile)  # type: ignore[assignment]
        return found


@real_signature
def profile(
    model: str | None = None,
    *,
    random_weights: str | None = None,
    roofline: str | None = None,
    from_log: str | Path | None = None,
    client: str | Path | None = None,
    tp: int = 1,
    weights: str | None = None,
    kv: str | None = None,
    eager: bool = False,
    budget: float = 300.0,
    device: str | None = None,
    graphs: bool | None = None,
    mask_token_id: int | None = None,
    block_length: int | None = None,
    tokenizer: str | None = None,
    eos: bool = False,
    full_sequence: bool = False,
    thresholds: Sequence[float] = (0.9,),
    temperature: float = 1.0,
    prompts: Sequence[str] = (),
    yields: str | Path | None = None,
    max_batch: int | None = None,
    seed: int = 0,
    out: str | Path | None = None,
    force: bool = False,
    _page: Path | None = None,
    _samples: Path | None = None,
    _command: str = "",
    _warn: Callable[[Iterable[str]], object] = warn,
    _ready: Callable[[], object] = lambda: None,
    _progress: Callable[[str, float], None] | None = None,
) -> Profiled:
    """Make a profile: of a model measured here, a step log (`from_log`), or a GPU's data sheet (`roofline`).

    random_weights: instead of model, a config.json or a shipped name. budget: s for measuring. out: the file to write.
    The result's `.doubts` says why not to trust the fit; empty for a good one. Raises DsimError.
    """
    if client is not None and from_log is None:
        raise DsimError(f"--client is {client} and --from-log is missing: expected the log of the same time")
    if roofline is not None and from_log is not None:
        raise DsimError("--roofline and --from-log are two ways to make a profile, expected one of them")
    if roofline is None and from_log is None and model is None and random_weights is None:
        raise DsimError("nothing to profile: expected --model M, --from-log FILE, or --roofline GPU --model MODEL")
    file = None if out is None else Path(out)
    if file is not None and file in (_page, _samples):
        raise DsimError(f"--output is {file}, as its page or steps, expected another name, such as {file.stem}.json")
    for path in filter(None, (file, _page, _samples)):
        check_file(path, force=force)  # before minutes of measuring
    name = "" if file is None else printable(file.stem)
    if roofline is not None:
        found = _derived(roofline, model, tp, not eager, yields, name, weights, kv)
    elif from_log is not None:
        found, doubts = _fitted(from_log, client, name or printable(Path(from_log).stem))
        _warn(doubts)
    else:
        for threshold in thresholds:
            if not (isinstance(threshold, float | int) and 0 < threshold <= 1):
                raise DsimError(f"thresholds holds {quoted(threshold)}, expected numbers above 0 and at most 1")
        from ..live.config_file import named  # loads PyTorch, as the next
        from ..profiler.canvas import LoadedCanvas, open_any
        from ..profiler.measure import profile_model
        from ..profiler.measure_canvas import profile_canvas

        begin = time.monotonic()
        known = load(yields) if yields else None
        own, settings = named(model, random_weights, mask_token_id, block_length)
        loaded = open_any(own, device, seed, graphs, settings)
        of_decoders = {"--full-sequence": full_sequence, "--eos": eos}
        workloads = _workloads(loaded, texts_of(prompts), of_decoders)
        _ready()
        measure = (
            partial(profile_canvas, loaded, laws=known.canvas_laws if known else ()) if isinstance(loaded, LoadedCanvas)
            else partial(
                profile_model, loaded, thresholds=thresholds, temperature=temperature, yields=known,
                both_ways=full_sequence, eos=eos,
            )
        )  # fmt: skip
        spent = time.monotonic() - begin + (PAGE if _page is not None else 0.0)
        for_steps = max(budget / 2, budget - spent)
        with _keeping(file) as keep:
            measured, data = measure(
                name=name or printable(Path(model).name if model else loaded.model.config.name),
                budget=for_steps, workloads=workloads, max_batch=max_batch,
                seed=seed, tokenizer=tokenizer, keep=keep, on_progress=_progress,
            )  # fmt: skip
        found = Profiled(measured, data.steps, data.logs, data.served)
        force = True  # this measurement wrote it
    if file is not None:
        save(found.profile, file, force)
    if _page is not None and found.steps is not None:
        from ..report.html import to_html

        write_whole(_page, to_html(found.page(_command)))
    if _samples is not None:
        write_whole(_samples, found.to_frame().to_csv(index=False))
    return found


def _derived(
    gpu: str, model: str | None, tp: int, graphs: bool, yields: str | Path | None, name: str, weights: str | None,
    keys: str | None,
) -> Profiled:  # fmt: skip
    """yields: a profile with commit models."""
    from ..profiler import hardware, models
    from ..profiler.precision import precision
    from ..profiler.roofline import roofline

    if model is None:
        raise DsimError(f"--model is missing, expected one of {', '.join(models.MODELS)}")
    sheet, shape = hardware.gpu(gpu), models.model(model)
    return Profiled(
        roofline(
            sheet, shape, tp, graphs=graphs, name=name or None, date=date.today().isoformat(),
            generates=models.family(shape, models.architecture_of(model)),
            yields=load(yields).commits if yields else (), precision=precision(model, weights, keys),
        )
    )  # fmt: skip


def _fitted(path: str | Path, client: str | Path | None, name: str) -> tuple[Profiled, list[str]]:
    """With its doubts. client: a file of the same time, for the front end."""
    from ..profiler.steplog import of_random_tokens, profile_of_log, read_log

    log, frontend = read_log(path), 0.0
    if client is not None:
        from ..comparison.clients.engine import frontend_of
        from ..comparison.clients.read import read_client

        frontend = frontend_of(log, read_client(Path(client)))
    found = profile_of_log(log, name, str(path), frontend)
    key = log.header.workload, log.header.threshold
    doubts = [f"{path}: {why}" for why in filter(None, [of_random_tokens(log)])]
    return Profiled(found, log.steps, {key: log.commits} if len(log.commits) else {}), doubts


def _workloads(loaded: "Opened", prompts: Sequence[str], of_decoders: Mapping[str, object]) -> Mapping[str, str]:
    """Prompt files by workload. of_decoders: options that canvases reject. prompts: FILE or NAME=FILE."""
    from ..profiler.canvas import LoadedCanvas
    from ..profiler.measure import default_workloads

    if isinstance(loaded, LoadedCanvas):
        for option, value in of_decoders.items():
            if value:
                raise DsimError(f"{loaded.name}: {option} is given, expected none for a model that denoises canvases")
    elif not prompts and not of_decoders["--full-sequence"]:
        return default_workloads(loaded)
    workloads = {}
    for text in prompts:
        own, equals, file = text.partition("=")
        workloads[own if equals else printable(Path(text).stem)] = file if equals else text
    return workloads


@contextmanager
def _keeping(file: Path | None) -> Iterator[Callable[[Profile], object]]:
    """Saves the profile so far; a later failure's message names the file."""
    is_saved = False

    def keep(so_far: Profile) -> None:
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
