"""The functions that `import dsim` offers: what the commands do, for scripts and notebooks (docs/python.md)."""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Unpack

from ..comparison.clients.imported import imported
from ..comparison.clients.measured import write_measured
from ..comparison.measured_log import columns_of, measured_log
from ..engine.allowed_code import allowed
from ..engine.errors import DsimError
from ..engine.policy import Policy, parse
from ..files.read import printable
from ..files.write import check_file
from ..profiler.profile import Profile, save
from ..profiler.profile import load as _load_profile
from ..results.run import Run, read_run
from ..results.scenario import Scenario, named_code, replicas_of
from ..results.slo import Slo
from ..traces import Trace
from ..traces import load as _load_trace
from .capacity import MOST, Capacity, question_of
from .compared import Compared, RunLike, compared
from .ensemble import check_num
from .ensemble import ensemble as run_ensemble
from .given import PolicyLike, ProfileLike, TraceLike, name_of_profile, name_of_trace, spec_of, trace_of
from .grid import check_together
from .live_run import live_run
from .memo import Memo
from .objective import LATENCY_METRIC
from .plan_replays import Posed
from .plan_run import Options, answer
from .plan_run import question_of as plan_question
from .planned import Planned
from .profiled import Profiled, derived, fitted, measured
from .record import in_twin, memory_told, record
from .recorded import OfRun, Recorded, Replay
from .signature import Traffic, real_signature
from .space import runs_on
from .spread import moved_by_spread
from .sweep import Sweep
from .sweep import sweep as _sweep
from .tune_run import Options as TuneOptions
from .tune_run import question_of as tune_question
from .tuned import Tuned
from .validate import Validated
from .validation import validation

__all__ = [
    "Capacity",
    "Compared",
    "Planned",
    "Policy",
    "Profile",
    "Profiled",
    "Recorded",
    "Replay",
    "Sweep",
    "Trace",
    "Tuned",
    "Validated",
    "capacity",
    "compare",
    "import_run",
    "load_profile",
    "load_run",
    "load_trace",
    "parse_policy",
    "plan",
    "profile",
    "replay",
    "run_live",
    "sweep",
    "tune",
    "validate",
]


@dataclass(frozen=True)
class _Given(Posed):
    """A scenario of objects instead of names, where they were given."""

    given_trace: Trace | None = None
    given_policies: tuple[Policy, ...] = ()

    def source(self) -> Trace:
        return super().source() if self.given_trace is None else self.given_trace

    def parsed_policy(self) -> Policy:
        return next((p for p in self.given_policies if p.name == self.policy), None) or super().parsed_policy()


load_trace = real_signature(_load_trace, "load_trace")
load_profile = real_signature(_load_profile, "load_profile")


@real_signature
def parse_policy(spec: str, allow_code: Sequence[str | Path] = ()) -> Policy:
    """The policy of a SPEC, whose own file of code is loaded, or of a TOML file. Raises DsimError.

    allow_code: files of code that a TOML file may name (docs/security.md).
    """
    return parse(spec, named_code([spec], allow_code))


@real_signature
def replay(
    trace: TraceLike,
    policy: PolicyLike | Sequence[PolicyLike] = Scenario.policy,
    *,
    profile: ProfileLike = Scenario.profile,
    slos: Sequence[str] = (),
    rate: float | None = None,
    num_requests: int | None = None,
    replicas: int | None = None,
    ensemble: int | None = None,
    out: str | Path | None = None,
    force: bool = False,
    **traffic: Unpack[Traffic],
) -> Replay:
    """Replay a trace in the twin under one or several policies.

    trace, profile, policy: names, files and SPECs as on the command line, a pandas frame of requests, or what
    `load_trace`, `load_profile` and `parse_policy` return. ensemble: ask so many profiles drawn from what is not known
    of this one, too; 19 or more give intervals. out: a folder for the run's files and report, as `dsim replay -o`.
    Raises DsimError.
    """
    if ensemble is not None:
        check_num(ensemble)
    scenarios = _given(trace, policy, profile, slos, traffic, rate=rate, num_requests=num_requests, replicas=replicas)
    for scenario in scenarios:
        runs_on(scenario.loaded_profile(), scenario.workload)(scenario.parsed_policy())
    requests = scenarios[0].requests()
    folder = None if out is None else Path(out)
    told: dict[str, Any] = {} if folder is None else {"spread": moved_by_spread(scenarios, requests)}
    if ensemble is not None:
        told["ensemble"] = run_ensemble(scenarios, requests, ensemble).to_json()
    done = record(
        scenarios, requests, in_twin, out=folder, force=force,
        about=lambda results: {
            **told, "memory": memory_told(scenarios, requests, results),
            "measured": measured_log(scenarios[0], columns_of(scenarios, results)),
        },
    )  # fmt: skip
    return Replay(done.results, done.summaries, done.manifest, tuple(scenarios), requests, folder)


@real_signature
def capacity(
    trace: TraceLike,
    slos: Sequence[str],
    *,
    policy: PolicyLike = Scenario.policy,
    profile: ProfileLike = Scenario.profile,
    rate: float | None = None,
    max_replicas: int | None = None,
    replicas: int | None = None,
    gpu_hour: float | None = None,
    attainment: float = 0.99,
    precision: float = 0.02,
    confidence: float = 0.95,
    num_requests: int | None = None,
    block: int | None = None,
    max_replications: int = MOST,
    curve: bool = True,
    jobs: int | None = None,
    backend: str = "local",
    address: str | None = None,
    **traffic: Unpack[Traffic],
) -> Capacity:
    """How much traffic a fleet sustains while every SLO holds; with `rate` (req/s), how many replicas that needs.

    attainment, precision and confidence are shares: 0.99 is 99 %. Raises DsimError.
    """
    scenario = _posed(trace, slos, spec_of(policy), profile, [], traffic)
    return question_of(scenario, rate, replicas, max_replicas)(
        gpu_hour=gpu_hour, attainment=attainment, precision=precision,
        confidence=confidence, num_requests=num_requests, block=block, max_replications=max_replications, curve=curve,
        jobs=jobs, backend=backend, address=address,
    )  # fmt: skip


@real_signature
def plan(
    trace: TraceLike,
    slos: Sequence[str],
    *,
    policies: Sequence[PolicyLike] = (),
    profiles: Sequence[ProfileLike] | None = None,
    rate: float | None = None,
    gpu_hour: float | Mapping[str, float] | None = None,
    attainment: float = 0.99,
    max_replicas: int = 64,
    spare: int = 0,
    growth: str | None = None,
    ensemble: int | None = None,
    as_given: bool = False,
    min_quality: float | str | None = None,
    quality_table: str | Path | None = None,
    num_requests: int | None = None,
    jobs: int | None = None,
    backend: str = "local",
    address: str | None = None,
    **traffic: Unpack[Traffic],
) -> Planned:
    """One ranked answer: which policy on which profile, with how many replicas, at what cost.

    policies: every shipped one that a profile's model runs, where none is given. profiles: by default the one that the
    commands have, or none where each policy names its own. gpu_hour: a price for all, or by a profile's name. as_given:
    search no settings of the engines. spare: replicas that stand by. growth: such as 30%/year. ensemble: also replay
    the recommended fleet under that many profiles drawn from what is not known of its own; 19 or more give intervals.
    Raises DsimError.
    """
    specs = [spec_of(policy) for policy in policies]
    scenario = _posed(trace, slos, Scenario.policy, Scenario.profile, specs, traffic)
    options = Options(
        rate, attainment, max_replicas, num_requests, spare, growth, ensemble, min_quality, quality_table, as_given
    )  # fmt: skip
    loaded = None if profiles is None else [p if isinstance(p, Profile) else load_profile(p) for p in profiles]
    question = plan_question(
        scenario, specs, loaded,
        lambda p: gpu_hour.get(p.name) if isinstance(gpu_hour, Mapping) else gpu_hour, options,
    )  # fmt: skip
    planned, _, told = answer(question, jobs=jobs, backend=backend, address=address)
    return planned if told is None else replace(planned, ensemble=told)


@real_signature
def tune(
    trace: TraceLike,
    *,
    slos: Sequence[str] = (),
    policy: PolicyLike | None = None,
    space: str | Path | Mapping[str, Any] | None = None,
    profile: ProfileLike = Scenario.profile,
    replicas: int | None = None,
    rate: float | None = None,
    num_requests: int | None = None,
    objectives: Sequence[str] = ("goodput",),
    trials: int = 60,
    storage: str | Path | None = None,
    min_quality: float | str | None = None,
    quality_table: str | Path | None = None,
    allow_unknown_quality: bool = False,
    gpu_hour: float | None = None,
    latency_metric: str = LATENCY_METRIC,
    train: float = 0.6,
    replications: int = 10,
    sampler: str = "tpe",
    prune: bool = True,
    jobs: int = 1,
    backend: str = "local",
    address: str | None = None,
    **traffic: Unpack[Traffic],
) -> Tuned:
    """The settings that serve a trace best, confirmed on traffic that the search never saw.

    policy: what you run today, to beat. space: what may be moved, a file as of `dsim tune --space` or the same as a
    dictionary. storage: a file that keeps the replays. Raises DsimError.
    """
    spec = None if policy is None else spec_of(policy)
    fleet = replicas_of([spec or ""], replicas)
    scenario = _posed(
        trace, slos, Scenario.policy, profile, [] if spec is None else [spec], traffic,
        rate=rate, num_requests=num_requests, replicas=fleet,
    )  # fmt: skip
    options = TuneOptions(
        spec, space, objectives, trials, min_quality, quality_table, allow_unknown_quality, gpu_hour, latency_metric,
        train, replications, sampler, prune, jobs,
    )  # fmt: skip
    memo = Memo()
    if storage is not None:
        memo.open(Path(storage))
    return tune_question(scenario, options).answer(memo, backend=backend, address=address)


@real_signature
def sweep(
    config: str | Path | Mapping[str, Any],
    out: str | Path | None = None,
    *,
    jobs: int | None = None,
    backend: str = "local",
    address: str | None = None,
    force: bool = False,
    quality: Callable[[Scenario], float | None] | None = None,
    progress: Callable[[int, int], None] | None = None,
    ensemble: int | None = None,
    allow_code: Iterable[str | Path] = (),
) -> Sweep:
    """Run every cell of a configuration and tabulate the results: a TOML file, or the same as a dictionary.

    In a dictionary a trace, a profile and a policy may be what the other functions take. out: a folder that keeps
    each finished cell; a sweep into the same folder runs only what is missing, and `force` starts anew. quality: marks
    each scenario with a score. progress: called with the cells finished and their number, and then with the replays of
    the ensemble. ensemble: draws of the profile under which the best stable cells are replayed once more. Raises
    DsimError.
    """
    named = _named(config) if isinstance(config, Mapping) else config
    return _sweep(
        named, out, jobs=jobs, backend=backend, address=address, force=force, quality=quality, progress=progress,
        allow_code=allow_code, ensemble=ensemble, asking=progress,
    )  # fmt: skip


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
    scenarios = _given(trace, policy, named, slos, traffic, rate=rate, num_requests=num_requests, replicas=1)
    run = live_run(
        scenarios, model=model, profiled=profile is not None, commits=commits, prompts=prompts, device=device,
        graphs=graphs, tp=tp, mask_token_id=mask_token_id, block_length=block_length, tokenizer=tokenizer,
        temperature=temperature, top_p=top_p, gumbel=gumbel,
    )  # fmt: skip
    kept, folder = _folder(out)
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
        check_file(Path(out), force=force)  # told before minutes are spent
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
            prompts=_texts(prompts), yields=yields, max_batch=max_batch, max_context=max_context, seed=seed,
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
        prompts=prompts, seed=seed, allow_code=allow_code, bounds=_texts(bounds),
    )  # fmt: skip


@real_signature
def compare(
    predicted: RunLike | Sequence[RunLike],
    measured: RunLike | Sequence[RunLike],
    *,
    profiles: Sequence[ProfileLike] = (),
    parts: bool = True,
    bounds: Sequence[str] = (),
    trace: TraceLike | None = None,
    columns: str | None = None,
    policy: str | None = None,
    across: bool = False,
    allow_code: Iterable[str | Path] = (),
    out: str | Path | None = None,
    force: bool = False,
) -> Compared:
    """How far predicted runs are from measured ones of the same requests, and what the error is made of.

    predicted, measured: a run's folder, what `replay`, `import_run` and `load_run` return, a load generator's file, or
    a list of these, pair by pair. profiles: those that runs name and that are not shipped. bounds: each is
    `[stat:]metric=percent`, and the result says whether it is met. trace, columns, policy: of a load generator's file.
    Raises DsimError.
    """
    sides = [[s] if isinstance(s, str | Path | OfRun | Run) else list(s) for s in (predicted, measured)]
    if len(sides[0]) != len(sides[1]):
        raise DsimError(f"{len(sides[0])} predicted and {len(sides[1])} measured runs are given, expected pairs")
    return compared(
        list(zip(*sides, strict=True)), profiles=profiles, parts=parts, bounds=_texts(bounds),
        trace=trace, columns=columns, policy=policy, across=across, allow_code=allow_code,
        out=None if out is None else Path(out), force=force,
    )  # fmt: skip


@real_signature
def import_run(
    file: str | Path,
    *,
    trace: TraceLike | None = None,
    time_unit: str | None = None,
    columns: str | None = None,
    only: str | None = None,
    skip_bad: bool = False,
    policy: str | None = None,
    log: str | Path | None = None,
    metrics: str | Path | None = None,
    metrics_before: str | Path | None = None,
    replicas: int = 1,
    drop_warmup: float = 0.0,
    slos: Sequence[str] = (),
    missing_passes: bool = True,
    out: str | Path | None = None,
    force: bool = False,
) -> Recorded:
    """What a load generator measured of a server, by dsim's definitions: a run to look at and to compare with.

    file: of vllm bench serve, guidellm or aiperf, a step log, or a gateway's log. trace: what the client replayed.
    log, metrics: what the server wrote meanwhile. What is doubtful is a Python warning. Raises DsimError.
    """
    run, doubts = imported(
        file, trace=trace, time_unit=time_unit, columns=columns, only=only, skip_bad=skip_bad, policy=policy, log=log,
        metrics=metrics, metrics_before=metrics_before, replicas=replicas, drop_warmup=drop_warmup,
        slos=_texts(slos), missing_passes=missing_passes,
    )  # fmt: skip
    for line in doubts:
        warnings.warn(line, stacklevel=3)
    kept, folder = _folder(out)
    write_measured(run, folder, force=force)
    return Recorded(read_run(folder), kept)


@real_signature
def load_run(folder: str | Path, *, allow_code: Iterable[str | Path] = ()) -> Recorded:
    """The run in a folder that `dsim replay`, `dsim live` or `dsim import` wrote. Raises DsimError."""
    return Recorded(read_run(folder, allowed(allow_code)))


def _given(
    trace: TraceLike, policy: PolicyLike | Sequence[PolicyLike], profile: ProfileLike, slos: Sequence[str],
    traffic: Traffic, *, replicas: int | None = None, **more: Any,
) -> list[Scenario]:  # fmt: skip
    """A scenario a policy, with the objects that were given, for runs in this process."""
    policies = [policy] if isinstance(policy, str | Policy) else list(policy)
    if not policies:
        raise DsimError("no policy is given, expected at least one")
    names = [p.name if isinstance(p, Policy) else p for p in policies]
    for name in names:
        if names.count(name) > 1:
            raise DsimError(f"policy {name} is given {names.count(name)} times, expected once")
    given = trace_of(trace, traffic)
    first = _Given(
        trace=str(trace) if given is None else given.name,
        policy=names[0],
        profile=profile.name if isinstance(profile, Profile) else str(profile),
        given_trace=given,
        given_policies=tuple(p for p in policies if isinstance(p, Policy)),
        given_profile=profile if isinstance(profile, Profile) else None,
        **_fields(traffic, slos, names, replicas=replicas_of(names, replicas), **more),
    )
    check_together(first)
    return [replace(first, policy=name) for name in names]


def _folder(out: str | Path | None) -> tuple["TemporaryDirectory[str] | None", Path]:
    """The folder of a run, or one in a folder that lasts as long as what holds it."""
    if out is not None:
        return None, Path(out)
    kept = TemporaryDirectory(prefix="dsim-")
    return kept, Path(kept.name) / "run"


def _fields(traffic: Traffic, slos: Sequence[str], policies: Sequence[str], **more: Any) -> dict[str, Any]:
    """The fields of a scenario; policies: those that the caller names, whose code may be loaded."""
    code = named_code(policies, traffic.get("allow_code", ()))
    return {**traffic, **more, "slos": tuple(str(Slo.parse(text)) for text in _texts(slos)), "allow_code": code}


def _texts(given: Sequence[str]) -> Sequence[str]:
    return [given] if isinstance(given, str) else given


def _posed(
    trace: TraceLike, slos: Sequence[str], policy: str, profile: ProfileLike, policies: Sequence[str],
    traffic: Traffic, **more: Any,
) -> Scenario:  # fmt: skip
    """The scenario of these fields in names alone, for replays in other processes."""
    given = trace_of(trace, traffic)
    name = name_of_trace(trace if given is None else given)  # type: ignore[arg-type]
    fields = _fields(traffic, slos, [policy, *policies], **more)
    if given is not None:  # it was read, and what was kept is kept
        fields = {n: value for n, value in fields.items() if n not in ("time_unit", "skip_bad", "columns", "only")}
        fields["keep_failed"] = True
    scenario = Scenario(trace=name, policy=policy, profile=name_of_profile(profile), **fields)
    check_together(scenario)
    return scenario


def _named(config: Any, field: str = "") -> Any:
    """A sweep's configuration with names in place of frames and objects."""
    if isinstance(config, Mapping):
        return {name: _named(value, str(name)) for name, value in config.items()}
    if isinstance(config, list):
        return [_named(value, field) for value in config]
    if isinstance(config, Profile):
        return name_of_profile(config)
    if isinstance(config, Policy):
        return spec_of(config)
    found = None if isinstance(config, str | Path) else trace_of(config, {})
    if found is not None:
        return name_of_trace(found)
    return str(config) if isinstance(config, Path) else config
