"""Profiles made: measured on this machine's device, fitted to a step log, or derived from data sheets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..engine.errors import DsimError
from ..files.read import printable, quoted
from ..profiler.profile import Profile, load
from ..report.page import Page
from ..report.shown import Showable

if TYPE_CHECKING:
    import pandas as pd

    from ..profiler.commit_log import CommitLog
    from ..profiler.samples import Samples


@dataclass(frozen=True, repr=False)
class Profiled(Showable):
    """A profile, and what it was fitted to."""

    profile: Profile
    steps: Samples | None = None  # None: it was derived
    logs: Mapping[tuple[str, float], CommitLog] = field(default_factory=dict)  # by workload and threshold

    @property
    def doubts(self) -> list[str]:
        """Why the profile is not to be believed, a line each."""
        from ..report.profile_page import doubts

        return doubts(self.profile)

    def page(self, command: str = "") -> Page:
        from ..report.profile_page import derived_page, profile_page

        if self.steps is None:
            return derived_page(self.profile)
        return profile_page(self.profile, self.steps, self.logs, command)

    def to_frame(self) -> pd.DataFrame:
        """A row a measured step: what it computed, its latency and device time and the fit's latency (s).

        No rows where the profile was derived.
        """
        import pandas as pd

        from ..profiler.fit import predict
        from ..profiler.samples import FEATURES, samples

        steps = samples([], []) if self.steps is None else self.steps
        columns: dict[str, Any] = dict(zip(FEATURES, steps.features.T, strict=True))
        fitted = predict(self.profile.latency, steps.features)
        return pd.DataFrame({**columns, "latency": steps.latency, "device": steps.device, "fitted": fitted})

    def to_json(self) -> dict[str, Any]:
        """The profile as its file has it."""
        from ..profiler.profile import to_json

        found: dict[str, Any] = to_json(self.profile)  # type: ignore[assignment]
        return found


def derived(
    gpu: str, model: str | None, *, tp: int = 1, eager: bool = False, yields: str | Path | None = None, name: str = ""
) -> Profiled:
    """A profile of a model on a GPU from data sheets; yields: a profile whose commit models are taken over."""
    from ..profiler import hardware, models
    from ..profiler.roofline import roofline

    if model is None:
        raise DsimError(f"--model is missing, expected one of {', '.join(models.MODELS)}")
    device, shape = hardware.gpu(gpu), models.model(model)
    made = roofline(
        device, shape, tp, graphs=not eager, name=name or None, date=date.today().isoformat(),
        generates=models.family(shape, models.architecture_of(model)), yields=load(yields).commits if yields else (),
    )  # fmt: skip
    return Profiled(made)


def fitted(path: str | Path, client: str | Path | None, name: str) -> tuple[Profiled, list[str]]:
    """A profile fitted to a step log, its front end to a client's file of the same time, and the doubts about it."""
    from ..profiler.frontend import FrontEnd
    from ..profiler.steplog import of_random_tokens, profile_of_log, read_log

    log, front = read_log(path), FrontEnd()
    if client is not None:
        from ..comparison.clients.engine import frontend_of
        from ..comparison.clients.read import read_client

        front = frontend_of(log, read_client(Path(client)))
    profile = profile_of_log(log, name, str(path), front)
    key = log.header.workload, log.header.threshold
    told = [f"{path}: {why}" for why in filter(None, [of_random_tokens(log)])]
    return Profiled(profile, log.steps, {key: log.commits} if len(log.commits) else {}), told


def measured(
    model: str,
    *,
    name: str,
    budget: float,
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
    max_context: int | None = None,
    seed: int = 0,
    ready: Callable[[], object] = lambda: None,
    on_progress: Callable[[str, float], None] | None = None,
    keep: Callable[[Profile], object] = lambda profile: None,
) -> Profiled:
    """Measure a model on this machine's device for about `budget` seconds and fit its profile.

    prompts: files, or NAME=FILE to name the workload. The other arguments are those of `dsim profile`. ready: called
    once the model is open. keep: called with the profile so far.
    """
    for threshold in thresholds:
        if not 0 < threshold <= 1:
            raise DsimError(f"thresholds holds {quoted(threshold)}, expected numbers above 0 and at most 1")
    held = load(yields).commits if yields else ()
    from ..live.config_file import Given  # imported here, as below: it loads PyTorch
    from ..profiler.canvas import LoadedCanvas, open_any
    from ..profiler.measure import default_workloads, profile_model
    from ..profiler.measure_canvas import profile_canvas

    loaded = open_any(model, device, seed, graphs, Given(mask_token_id, block_length))
    workloads = {}
    if isinstance(loaded, LoadedCanvas):
        for asked, option in ((full_sequence, "--full-sequence"), (yields, f"--yields {yields}"), (eos, "--eos")):
            if asked:
                raise DsimError(f"{model}: denoises canvases, and {option} is of decoders: expected none")
    elif not prompts and not full_sequence:
        workloads = default_workloads(loaded)
    for text in prompts:
        own, equals, file = text.partition("=")
        workloads[own if equals else printable(Path(text).stem)] = file if equals else text
    ready()
    measure = (
        partial(profile_canvas, loaded)
        if isinstance(loaded, LoadedCanvas)
        else partial(
            profile_model, loaded, thresholds=thresholds, temperature=temperature, yields=held,
            both_ways=full_sequence, eos=eos,
        )
    )  # fmt: skip
    profile, taken = measure(
        name=name, budget=budget, workloads=workloads, max_batch=max_batch, max_context=max_context, seed=seed,
        tokenizer=tokenizer, keep=keep, on_progress=on_progress,
    )  # fmt: skip
    return Profiled(profile, taken.steps, taken.logs)
