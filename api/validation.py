"""`dsim.validate`: measure or load a profile, predict and serve every cell, write the findings."""

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..comparison import files as compare_files
from ..comparison.bounds import Bound
from ..device.on_device import LiveSetting, check_eos
from ..device.validate import LOADS, POLICIES, Cell, Validated, canvas_policies, load_of
from ..device.validate import validate as validate_cells
from ..engine.errors import DsimError
from ..engine.policy import Policy, parse
from ..files.place import hold_folder
from ..files.write import write_whole
from ..planner.backend import Pool
from ..planner.given import PolicyLike, ProfileLike, TraceLike, name_of_profile, name_of_trace, spec_of, trace_of
from ..planner.memo import STORE, Memo
from ..profiler.profile import Profile, load, save
from ..results.metrics import no_nan
from ..results.scenario import Scenario, named_code
from .scenarios import texts_of
from .signature import real_signature

if TYPE_CHECKING:
    from ..sim.twin import Progress

PROFILE_SHARE = 0.4  # of the budget, without a profile
CELLS_SHARE = 0.75  # of the rest: serving outlasts arrivals


@real_signature
def validate(
    out: str | Path,
    *,
    budget: float = 1200.0,
    model: str | None = None,
    random_weights: str | None = None,
    device: str | None = None,
    graphs: bool | None = None,
    mask_token_id: int | None = None,
    block_length: int | None = None,
    tokenizer: str | None = None,
    temperature: float = 0.0,
    eos: bool = False,
    profile: ProfileLike | None = None,
    yields: str | Path | None = None,
    policies: Sequence[PolicyLike] = (),
    loads: Sequence[str | float] = (),
    seconds: float | None = None,
    trace: TraceLike = "azure-conv",
    columns: str | None = None,
    lengths: str | None = None,
    commits: str = "twin",
    workload: str | None = None,
    prompts: str | None = None,
    seed: int = 1,
    allow_code: Iterable[str | Path] = (),
    bounds: Sequence[str] = (),
    backend: str = "local",
    address: str | None = None,
    _command: str = "",
    _ready: Callable[[], object] = lambda: None,
    _progress: Callable[[float, str, float], object] = lambda elapsed, phase, left: None,
) -> Validated:
    """Find how far the twin is from this machine's device: measure, predict, serve, compare.

    out: a folder of all runs, the profile and the comparison; a later call continues. budget: s in total. backend,
    address: where the twin replays, as in `dsim.sweep`; by default here. Needs the `live` extra. Raises DsimError.
    """
    begin = time.monotonic()
    out = Path(out)
    given = trace_of(trace, {"columns": columns})
    judged = [Bound.parse(text) for text in texts_of(bounds)]
    pool = partial(Pool, backend, 1 if backend == "local" else None, address)
    with pool() as replays:
        replays.join()  # check the cluster before measuring
    specs = [spec_of(policy) for policy in policies] or list(POLICIES)
    chosen = list(map(load_of, loads or LOADS))
    code = named_code(specs, allow_code)
    both_ways, *others = {parse(spec, code).family == "full-sequence" for spec in specs}
    if others:
        raise DsimError(f"{' and '.join(specs)}: expected policies of full-sequence models, or none of these")
    from ..live.config_file import named  # loads PyTorch, as the next
    from ..live.sampling import Sampling
    from ..profiler.canvas import LoadedCanvas, open_any
    from ..profiler.measure import default_workloads, profile_model, seconds_to_compile
    from ..profiler.measure_canvas import profile_canvas

    name, settings = named(model, random_weights, mask_token_id, block_length)
    loaded = open_any(name, device, 0, graphs, settings)
    if isinstance(loaded, LoadedCanvas):
        if temperature or yields:
            option = f"--yields is {yields}" if yields else f"--temperature is {temperature:g}"
            raise DsimError(f"{name}: {option}, expected none: the checkpoint's own rule decides canvases")
        if not policies:
            specs = canvas_policies(loaded.model.config.canvas_length)
    parsed = [parse(spec, code) for spec in specs]
    for policy in parsed if eos else ():
        check_eos(policy, loaded.model.config, commits)
    file = out / "profile.json" if profile is None else Path(name_of_profile(profile))
    is_profiled = profile is not None or file.is_file()
    compiling = seconds_to_compile(parsed)
    base = Scenario(
        trace=name_of_trace(trace if given is None else given),  # type: ignore[arg-type]
        policy=specs[0], profile=str(file), workload=workload, lengths=lengths, num_requests=200,
        columns=columns if given is None else None, seed=seed, eos=eos, allow_code=code,
    )  # fmt: skip
    _ready()

    def elapsed() -> float:
        return time.monotonic() - begin

    def report(phase: str, left: float) -> None:
        _progress(elapsed(), phase, left)

    def measure() -> Profile:
        how: Any = {
            "name": f"{out.name}-profile", "budget": PROFILE_SHARE * budget, "tokenizer": tokenizer,
            "on_progress": lambda phase, _: report(f"profile: {phase}", budget - elapsed()),
        }  # fmt: skip
        if isinstance(loaded, LoadedCanvas):
            workloads = {} if prompts is None else {Path(prompts).stem: prompts}
            return profile_canvas(loaded, workloads=workloads, **how)[0]
        measured, _ = profile_model(
            loaded, workloads={} if both_ways else default_workloads(loaded, prompts),
            thresholds=sorted({policy.unmasking.threshold for policy in parsed if _goes_by_threshold(policy)}) or [0.9],
            yields=load(yields) if yields else None, both_ways=both_ways, eos=eos, **how,
        )  # fmt: skip
        return measured

    least = compiling / (1 if is_profiled else 1 - PROFILE_SHARE)
    if seconds is None and budget < least and not (out / "cells").is_dir():
        raise DsimError(
            f"--budget is {budget:g} s, expected at least {math.ceil(least)} s, to compile {', '.join(specs)}: give "
            "more, or fewer --policy"
        )
    lock = hold_folder(out)  # earlier errors leave no folder
    memo = Memo()
    memo.open(out / STORE)
    if not is_profiled:
        save(measure(), file)

    @contextmanager
    def watch(cell: Cell, seconds: float, later: float, _policy: str) -> "Iterator[Progress]":
        name = f"{cell.policy} at load {cell.load}"
        later += seconds_to_compile(parse(spec, code) for spec in specs if spec != cell.policy)
        report(f"{name}: warming up", seconds_to_compile([parse(cell.policy, code)]) + seconds + later)
        yield lambda ended, now: report(f"{name}: {ended} requests, {now:,.1f} s", max(0.0, seconds - now) + later)

    sampling = Sampling(temperature, seed) if temperature else None
    live = LiveSetting(loaded, load(str(file)), commits, prompts, tokenizer, sampling)
    with pool() as replays:
        found = validate_cells(
            out / "cells", base, live, policies=specs, loads=chosen, seconds=seconds, bounds=judged,
            within=CELLS_SHARE * max(0.0, budget - elapsed() - compiling),
            more=lambda expected: elapsed() + expected / CELLS_SHARE < budget, watch=watch, memo=memo, pool=replays,
        )  # fmt: skip
    text = json.dumps(no_nan(found.to_json()), indent=1, allow_nan=False)
    write_whole(out / "validation.json", text + "\n")
    compare_files.write(out / "comparison", found.comparison, found.pairs, force=True, command=_command)
    memo.close()
    lock.close()
    return found


def _goes_by_threshold(policy: Policy) -> bool:
    return policy.rows.commits == "masks" and policy.unmasking.strategy == "low_confidence_dynamic"
