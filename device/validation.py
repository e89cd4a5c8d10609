"""A whole validation: a profile measured or given, every cell predicted and served, and what came out written down."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from ..comparison import files as compare_files
from ..comparison.bounds import Bound
from ..engine.errors import DsimError
from ..engine.policy import PRESETS, parse
from ..files.duration import words_of
from ..files.place import hold_folder
from ..files.write import write_whole
from ..planner.memo import STORE, Memo
from ..profiler.profile import Profile, load, save
from ..results.metrics import no_nan
from ..results.scenario import Scenario, named_code
from .validate import LOADS, POLICIES, Validated, least_time, validate

if TYPE_CHECKING:
    from ..sim.twin import Progress

PILOT_SHARE, PROFILE_SHARE = 0.05, 0.4  # of the budget, where the profile is not given
CELLS_SHARE = 0.75  # of the rest: a cell's requests go on being served after the last has come


def canvas_policies(canvas_length: int) -> list[str]:
    """The presets that denoise canvases, of this length."""
    from ..engine.policies.canvas import Canvas

    kinds = {name: preset.policy.granularity for name, preset in PRESETS.items()}
    found = {name: kind for name, kind in kinds.items() if isinstance(kind, Canvas)}
    return [
        name if kind.canvas_length == canvas_length else f"{name},canvas_length={canvas_length}"
        for name, kind in found.items()
    ]


def validation(
    out: Path,
    *,
    budget: float,
    model: str = "tiny",
    device: str | None = None,
    graphs: bool | None = None,
    mask_token_id: int | None = None,
    block_length: int | None = None,
    tokenizer: str | None = None,
    temperature: float = 0.0,
    top_p: float = 1.0,
    eos: bool = False,
    profile: str | None = None,
    yields: str | Path | None = None,
    policies: Sequence[str] = (),
    loads: Sequence[float] = (),
    seconds: float | None = None,
    trace: str = "azure-conv",
    columns: str | None = None,
    lengths: str | None = None,
    commits: str = "twin",
    workload: str | None = None,
    prompts: str | None = None,
    seed: int = 1,
    allow_code: Iterable[str | Path] = (),
    bounds: Sequence[str] = (),
    command: str = "",
    ready: Callable[[], object] = lambda: None,
    on_progress: Callable[[float, str], object] = lambda elapsed, what: None,
) -> Validated:
    """Validate the twin on this machine's device within about `budget` seconds; the arguments are those of the command.

    ready: called once all that was asked for is checked. on_progress: called with the seconds since the beginning and
    the phase. Raises DsimError.
    """
    begin = time.monotonic()
    judged = [Bound.parse(text) for text in bounds]
    asked, shares = list(policies or POLICIES), list(loads or LOADS)
    for share in shares:
        if not 0 < share < 1:
            raise DsimError(f"--load is {share:g}, expected between 0 and 1")
    code = named_code(asked, allow_code)
    kinds = {spec: parse(spec, code).family == "full-sequence" for spec in asked}
    if len(set(kinds.values())) > 1:
        both = [next(spec for spec, full in kinds.items() if full == kind) for kind in (True, False)]
        raise DsimError(
            f"{both[0]} is for a full-sequence model and {both[1]} for block diffusion: expected policies of one kind"
        )
    both_ways = all(kinds.values())
    from ..live.config_file import Given  # imported here, as below: they load PyTorch
    from ..live.sampling import Sampling
    from ..profiler.canvas import LoadedCanvas, open_any
    from ..profiler.measure import default_workloads, profile_model
    from ..profiler.measure_canvas import profile_canvas
    from .on_device import Answers, check_eos

    if not temperature and top_p != 1:
        raise DsimError(f"--temperature is {temperature:g}, and --top-p draws tokens: expected above 0")
    answers = Answers(tokenizer, Sampling(temperature, top_p, seed=seed) if temperature else None)
    loaded = open_any(model, device, 0, graphs, Given(mask_token_id, block_length))
    if isinstance(loaded, LoadedCanvas):
        if temperature or yields:
            told_of = f"--yields is {yields}" if yields else f"--temperature is {temperature:g}"
            raise DsimError(f"{model}: its canvases go by the checkpoint's own rule, and {told_of}: expected none")
        asked = list(policies or canvas_policies(loaded.model.config.canvas_length))
    if eos:
        for spec in asked:
            check_eos(parse(spec, code), loaded.model.config, commits)
    file = out / "profile.json" if profile is None else Path(profile)
    given = profile is not None or file.is_file()
    num_runs = len(asked) * (len(shares) + 1)  # the middle load's twice
    base = Scenario(
        trace=trace, policy=asked[0], profile=str(file), workload=workload, lengths=lengths, num_requests=200,
        columns=columns, seed=seed, eos=eos, allow_code=code,
    )  # fmt: skip
    ready()

    def told(what: str) -> None:
        on_progress(time.monotonic() - begin, what)

    by_confidence = [
        policy.unmasking.threshold
        for policy in (parse(spec, code) for spec in asked)
        if policy.rows.commits == "masks" and policy.unmasking.strategy == "low_confidence_dynamic"
    ]
    thresholds = sorted(set(by_confidence)) or [0.9]

    def measure(within: float) -> Profile:
        said: Any = {
            "name": f"{out.name}-profile", "budget": within, "tokenizer": tokenizer,
            "on_progress": lambda what, _: told(f"profile: {what}"),
        }  # fmt: skip
        if isinstance(loaded, LoadedCanvas):
            workloads = {} if prompts is None else {Path(prompts).stem: prompts}
            return profile_canvas(loaded, workloads=workloads, **said)[0]
        made, _ = profile_model(
            loaded,
            workloads={} if both_ways else default_workloads(loaded, prompts),
            thresholds=thresholds,
            yields=load(yields).commits if yields else (),
            both_ways=both_ways,
            eos=eos,
            **said,
        )
        return made

    if seconds is None and not (out / "cells").is_dir():
        # Of what the cells take, a pilot says enough to refuse a budget before most of it is spent.
        with TemporaryDirectory() as folder:
            pilot = file if given else Path(folder) / file.name
            if not given:
                save(measure(PILOT_SHARE * budget), pilot)
            cells = least_time(replace(base, profile=str(pilot)), asked, shares, Memo())
        least = cells / (CELLS_SHARE * (1 if given else 1 - PROFILE_SHARE - PILOT_SHARE))
        if budget < least:
            raise DsimError(
                f"--budget is {words_of(budget)}, expected at least {words_of(math.ceil(least))} for {num_runs} "
                f"runs of {', '.join(asked)}: give more, or fewer --policy and --load"
            )
    lock = hold_folder(out)  # a refusal before this leaves nothing
    memo = Memo()
    memo.open(out / STORE)
    if not given:
        save(measure(PROFILE_SHARE * budget), file)
    held = load(str(file))
    if seconds is None:
        seconds = CELLS_SHARE * (budget - (time.monotonic() - begin)) / num_runs

    @contextmanager
    def watch(name: str) -> Iterator[Progress]:
        told(f"{name}: warming up")
        yield lambda ended, now: told(f"{name}: {ended} requests, {now:,.1f} s")

    found = validate(
        out / "cells", base, loaded, held, policies=asked, loads=shares, seconds=seconds, commits=commits,
        prompts=prompts, answers=answers, bounds=judged, more=lambda: time.monotonic() - begin < budget, watch=watch,
        memo=memo,
    )  # fmt: skip
    text = json.dumps(no_nan(found.to_json()), indent=1, allow_nan=False)
    write_whole(out / "validation.json", text + "\n")
    compare_files.write(out / "comparison", found.comparison, found.pairs, force=True, command=command)
    memo.close()
    lock.close()
    return found
