"""`dsim profile --model M`: a model measured on this machine's device."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from ..engine.errors import DsimError
from ..files.read import float_of, printable, quoted
from ..files.write import tell
from . import options
from .bar import Bar
from .duration import seconds_of

if TYPE_CHECKING:
    from ..profiler.profile import Profile


def measure_profile(
    model: str,
    output: Path,
    beside: Path,
    *,
    device: str | None,
    graphs: bool | None,
    budget: str,
    thresholds: str,
    temperature: float,
    prompts: Sequence[str],
    yields: str | None,
    max_batch: int | None,
    max_context: int | None,
    seed: int,
    full_sequence: bool,
    given: tuple[int | None, int | None],
    tokenizer: str | None,
    eos: bool,
    screen: Console,
) -> "Profile":
    """Measure, fit, and write the profile and, once that is safe, its page `beside` it.

    `prompts`: files, or NAME=FILE to name the workload. given: the mask and the block length, where a directory does
    not say them. eos: logged requests end at the checkpoint's EOS.
    """
    from ..profiler.profile import load, save

    total = seconds_of(budget)
    wanted = [_threshold(part) for part in thresholds.split(",")]
    held = load(yields).commits if yields else ()
    from ..live.config_file import Given  # imported here, as below: it loads PyTorch
    from ..profiler.canvas import LoadedCanvas, open_any
    from ..profiler.measure import default_workloads, profile_model
    from ..profiler.measure_canvas import profile_canvas
    from ..report.profile_page import write_page

    loaded = open_any(model, device, seed, graphs, Given(*given))
    workloads = {}
    if isinstance(loaded, LoadedCanvas):
        for asked, option in ((full_sequence, "--full-sequence"), (yields, f"--yields {yields}"), (eos, "--eos")):
            if asked:
                raise DsimError(f"{model}: denoises canvases, and {option} is of decoders: expected none")
    elif not prompts and not full_sequence:
        workloads = default_workloads(loaded)
    for text in prompts:
        name, equals, file = text.partition("=")
        workloads[name if equals else printable(Path(text).stem)] = file if equals else text
    with Bar(screen, "measuring", "s", round(total)) as bar:
        measure = (
            partial(profile_canvas, loaded)
            if isinstance(loaded, LoadedCanvas)
            else partial(
                profile_model, loaded, thresholds=wanted, temperature=temperature, yields=held,
                full_sequence=full_sequence, eos=eos,
            )
        )  # fmt: skip
        kept = False

        def keep(so_far: "Profile") -> None:
            nonlocal kept
            save(so_far, output, True)
            kept = True

        try:
            profile, taken = measure(
                name=printable(output.stem),
                budget=total,
                workloads=workloads,
                max_batch=max_batch,
                max_context=max_context,
                seed=seed,
                tokenizer=tokenizer,
                keep=keep,
                on_progress=lambda what, share: bar.update(round(share * total), note=what, share=share),
            )
        except BaseException:
            if kept:
                tell(f"{output} holds the profile of what was measured before")
            raise
    write_page(beside, profile, taken.steps, taken.logs, options.command())
    return profile


def _threshold(text: str) -> float:
    value = float_of(text)
    if not 0 < value <= 1:
        raise DsimError(f"--thresholds holds {quoted(text)}, expected numbers above 0 and at most 1, as in 0.8,0.9")
    return value
