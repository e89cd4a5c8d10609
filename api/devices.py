"""This machine's device in `import dsim`: served, profiled and validated."""

import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Unpack

from ..device.live_run import live_run
from ..device.profiled import Profiled, derived, fitted, measured
from ..device.validate import Validated
from ..device.validation import validation
from ..engine.errors import DsimError
from ..files.read import printable
from ..files.write import check_file
from ..planner.given import PolicyLike, ProfileLike, TraceLike, name_of_profile, name_of_trace, spec_of, trace_of
from ..planner.recorded import Recorded
from ..profiler.profile import save
from ..results.run import read_run
from ..results.scenario import Scenario
from .scenarios import folder_of, scenarios_of, texts_of
from .signature import Traffic, real_signature


@real_signature
def run_live(
    trace: TraceLike,
    policy: PolicyLike | Sequence[PolicyLike] = "lmdeploy-bd32",
    *,
    model: str = "tiny",
    commits: str | None = None,
    profile: ProfileLike | None = None,
    prompts: str | None = None,
    device: str | None = None,
    graphs: bool | None = None,
    tp: int = 1,
    mask_token_id: int | None = None,
    block_length: int | None = None,
    tokenizer: str | None = None,
    temperature: float = 0.0,
    top_p: float = 1.0,
    gumbel: bool = False,
    slos: Sequence[str] = (),
    rate: float | None = None,
    num_requests: int | None = None,
    out: str | Path | None = None,
    force: bool = False,
    **traffic: Unpack[Traffic],
) -> Recorded:
    """Serve a trace on this machine's device, in real time, under the policies of the twin: `dsim live`.

    model: a shipped one, or a model's directory. commits: what decides what commits, `model` or `twin`. Needs the
    `live` extra. Raises DsimError.
    """
    named = Scenario.profile if profile is None else profile
    scenarios = scenarios_of(trace, policy, named, slos, traffic, rate=rate, num_requests=num_requests, replicas=1)
    run = live_run(
        scenarios, model=model, profiled=profile is not None, commits=commits, prompts=prompts, device=device,
        graphs=graphs, tp=tp, mask_token_id=mask_token_id, block_length=block_length, tokenizer=tokenizer,
        temperature=temperature, top_p=top_p, gumbel=gumbel,
    )  # fmt: skip
    kept, folder = folder_of(out)
    done = run.serve(folder, force=force)
    if done.failure is not None:
        raise done.failure
    return Recorded(read_run(folder, scenarios[0].allow_code), kept)


@real_signature
def profile(
    model: str | None = None,
    *,
    roofline: str | None = None,
    from_log: str | Path | None = None,
    client: str | Path | None = None,
    tp: int = 1,
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
    max_context: int | None = None,
    seed: int = 0,
    out: str | Path | None = None,
    force: bool = False,
) -> Profiled:
    """A profile: of a model measured here, of a step log (`from_log`), or of a GPU's data sheet (`roofline`).

    budget: s that measuring may take. out: the profile file to write. Whether to believe a fit is in `.doubts`, empty
    where it is. Raises DsimError.
    """
    if (roofline is not None) + (from_log is not None) > 1:
        raise DsimError("roofline and from_log are two ways to make a profile, expected one of them")
    if client is not None and from_log is None:
        raise DsimError(f"client is {client} and from_log is missing: expected the log of the same time")
    if out is not None:
        check_file(Path(out), force=force)  # before minutes are spent
    name = "" if out is None else printable(Path(out).stem)
    doubts: list[str] = []
    if roofline is not None:
        made = derived(roofline, model, tp=tp, eager=eager, yields=yields, name=name)
    elif from_log is not None:
        made, doubts = fitted(from_log, client, name or printable(Path(from_log).stem))
    elif model is None:
        raise DsimError("nothing to profile: expected a model, from_log, or roofline with a model")
    else:
        made = measured(
            model, name=name or printable(Path(model).name), budget=budget, device=device, graphs=graphs,
            mask_token_id=mask_token_id, block_length=block_length, tokenizer=tokenizer, eos=eos,
            full_sequence=full_sequence, thresholds=thresholds, temperature=temperature,
            prompts=texts_of(prompts), yields=yields, max_batch=max_batch, max_context=max_context, seed=seed,
        )  # fmt: skip
    for line in doubts:
        warnings.warn(line, stacklevel=3)
    if out is not None:
        save(made.profile, out, force)
    return made


@real_signature
def validate(
    out: str | Path,
    *,
    budget: float = 1200.0,
    model: str = "tiny",
    device: str | None = None,
    graphs: bool | None = None,
    mask_token_id: int | None = None,
    block_length: int | None = None,
    tokenizer: str | None = None,
    temperature: float = 0.0,
    top_p: float = 1.0,
    eos: bool = False,
    profile: ProfileLike | None = None,
    yields: str | Path | None = None,
    policies: Sequence[PolicyLike] = (),
    loads: Sequence[float] = (),
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
) -> Validated:
    """Say how far the twin is from this machine's device: measure, predict, serve and compare.

    out: a folder for every cell's runs, the profile and the comparison; a second call goes on. budget: s that it may
    take. Needs the `live` extra. Raises DsimError.
    """
    given = trace_of(trace, {"columns": columns})
    return validation(
        Path(out), budget=budget, model=model, device=device, graphs=graphs, mask_token_id=mask_token_id,
        block_length=block_length, tokenizer=tokenizer, temperature=temperature, top_p=top_p, eos=eos,
        profile=None if profile is None else name_of_profile(profile), yields=yields,
        policies=[spec_of(policy) for policy in policies], loads=loads, seconds=seconds,
        trace=name_of_trace(trace if given is None else given),  # type: ignore[arg-type]
        columns=columns if given is None else None, lengths=lengths, commits=commits, workload=workload,
        prompts=prompts, seed=seed, allow_code=allow_code, bounds=texts_of(bounds),
    )  # fmt: skip
