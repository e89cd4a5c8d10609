"""`dsim profile --model M`: a model measured on this machine's device."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from ..engine.errors import DsimError
from ..files.duration import seconds_of
from ..files.read import float_of, printable, quoted
from ..files.write import tell
from . import options
from .bar import Bar

if TYPE_CHECKING:
    from ..profiler.profile import Profile


def measure_profile(
    model: str,
    output: Path,
    page: Path,
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
    """Measure, fit, and write the profile and then its page.

    `prompts`: files, or NAME=FILE to name the workload. given: the mask and the block length, where a directory does
    not say them. eos: logged requests end at the checkpoint's EOS.
    """
    from ..device.profiled import measured
    from ..profiler.profile import save
    from ..report.profile_page import write_page

    total = seconds_of(budget)
    wanted = [_threshold(part) for part in thresholds.split(",")]
    kept = False
    with ExitStack() as stack:
        bar = Bar(screen, "measuring", "s", round(total))

        def keep(so_far: "Profile") -> None:
            nonlocal kept
            save(so_far, output, True)
            kept = True

        try:
            made = measured(
                model, name=printable(output.stem), budget=total, device=device, graphs=graphs,
                mask_token_id=given[0], block_length=given[1], tokenizer=tokenizer, eos=eos,
                full_sequence=full_sequence, thresholds=wanted, temperature=temperature, prompts=prompts,
                yields=yields, max_batch=max_batch, max_context=max_context, seed=seed, keep=keep,
                ready=lambda: stack.enter_context(bar),
                on_progress=lambda what, share: bar.update(round(share * total), note=what, share=share),
            )  # fmt: skip
        except BaseException:
            if kept:
                tell(f"{output} holds the profile of what was measured before")
            raise
    assert made.steps is not None
    write_page(page, made.profile, made.steps, made.logs, options.command())
    return made.profile


def _threshold(text: str) -> float:
    value = float_of(text)
    if not 0 < value <= 1:
        raise DsimError(f"--thresholds holds {quoted(text)}, expected numbers above 0 and at most 1, as in 0.8,0.9")
    return value
