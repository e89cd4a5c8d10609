"""Options that several commands share."""

import inspect
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from functools import wraps
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..engine.errors import DsimError
from ..files.interrupt import INTERRUPTED as INTERRUPTED
from ..files.read import cut, float_of, printable, without_secrets
from . import choices

if TYPE_CHECKING:
    from ..results.scenario import Scenario
    from ..sim.setting import Setting
    from ..traces import Trace
    from .screen import Screen

MOST_SAID = 8  # warnings of a kind
# Options that do not change the result, with their number of values.
PLACES = {"-o": 1, "--out": 1, "--output": 1, "--force": 0, "--json": 0}
SPEED = {"--jobs": 1, "--backend": 1, "--address": 1}

# Options, by parameter, that have an effect only with one of others (where the command has these).
NEEDS: dict[str, tuple[str, ...]] = {
    "currency": ("gpu_hour",), "force": ("out", "output"), "missing_fails": ("slo",),
    "fails_on_slo": ("slo",), "allow_code": ("fields",), "eager": ("roofline",),
    "tp": ("roofline", "gpu"), "weights": ("roofline", "gpu"), "kv": ("roofline", "gpu"),
    "model": ("gpu",), "commits": ("gpu",),
    "speed": ("twin",), "tokenizer": ("twin",),
}  # fmt: skip

# Panels of every command's help, in order (cli/help.py).
PANELS: dict[str, tuple[str, ...]] = {
    panel: tuple(names.split())
    for panel, names in {
        "What to do": "--roofline --from-log --client --list --fields --as-logged --version",
        "Traffic": "--trace --arrival --rate --cv --concurrency --sessions --lengths "
        "--num-requests --duration --time-scale --drain --prompts --load --seconds",
        "Trace file": "--format --time-unit --columns --only --skip-bad --hash-ids",
        "Policy and profile": "--policy --profile --twin --workload --yield --yields --frontend "
        "--ensemble --commits --allow-code --check-rules",
        "Model and device": "--model --random-weights --weights --kv --gpu --tp --device --graphs --eager "
        "--mask-token-id --block-length --tokenizer --temperature --eos",
        "Fleet and price": "--replicas --max-replicas --spare --growth --horizon --buy-now --today --router --pool "
        "--link --decider --fleet --gpus --scaler --startup --speed --gpu-hour --currency",
        "SLOs and quality": "--slo --fail-on-slo --attainment --missing-fails --emit --bound --min-quality "
        "--quality-table",
        "Search": "--as-given --change-answers --research --objective --trials --space --precision",
        "Measurement": "--budget --thresholds --full-sequence --max-batch --measured --benchmark --log",
        "Server": "--host --port --allow-host --served-name --api-key",
        "Logs": "--metrics-as --access-log --steps",
        "Following": "--interval --window --min-requests --once --token-file --ca-file",
        "Selection": "--from --to --rows --file",
        "Execution": "--jobs --backend --address --seed --seeds",
        "Output": "--out --output --json --force --install-completion --show-completion --help",
    }.items()
}


def option(metavar: str, text: str, *names: str, values: Callable[[], Iterable[str]] | None = None) -> Any:
    """values: for the shell's completion."""
    return typer.Option(*names, metavar=metavar, help=text, autocompletion=values and _completes(values))


def policies() -> Iterable[str]:
    from ..engine.policy import PRESETS

    return PRESETS


def profiles() -> Iterable[str]:
    from ..profiler.profile import shipped

    return shipped()


def is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def check_needs(context: typer.Context) -> None:
    """DsimError for an option without effect."""
    names = {param.name: max(param.opts, key=len) for param in context.command.params}
    for name, others in NEEDS.items():
        known = [other for other in others if other in names]
        if known and is_given(context, name) and not any(is_given(context, other) for other in known):
            wanted = " or ".join(names[other] for other in known)
            raise DsimError(f"{names[name]} is given without {wanted}, expected both: alone it has no effect")


def _completes(values: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    def begun(incomplete: str) -> list[str]:
        """With this beginning; without any, the shell completes files."""
        return [value for value in values() if value.startswith(incomplete)]

    return begun


Graphs = Annotated[
    bool | None,
    typer.Option("--graphs/--no-graphs", help="Run decode steps as captured CUDA graphs; the default on a GPU."),
]
TraceName = Annotated[
    str,
    typer.Argument(
        metavar="TRACE", help=f"A trace file, or: {', '.join(choices.TRACES)}.",
        autocompletion=_completes(lambda: choices.TRACES),
    ),
]  # fmt: skip
Policies = Annotated[
    list[str] | None,
    option("SPEC", "name[:value][,field=value...] or a TOML file; repeat to compare.", "--policy", values=policies),
]
OnePolicy = Annotated[str, option("SPEC", "name[:value][,field=value...] or a TOML file.", "--policy", values=policies)]
ProfileName = Annotated[
    str, option("P", "A profile file, or one that `dsim profiles` lists.", "--profile", values=profiles)
]
Workload = Annotated[
    str | None, option("W", "The profile's commit model to draw from; its first by default.", "--workload")
]
Frontend = Annotated[
    float | None,
    option("SECONDS", "Time between client and engine, both directions; the profile's by default.", "--frontend"),
]
Yields = Annotated[
    str | None,
    option(
        "Y",
        "A yield in place of the profile's commit models: tokens a denoise step (3.2), per-forward:X, "
        "processed-per-token:X, a .csv by threshold, or a step log.",
        "--yield",
    ),
]
Ensemble = Annotated[
    int | None,
    option(
        "N", "Also use N profiles drawn from the profile's uncertainty; 19 or more give 90 % intervals.", "--ensemble"
    ),
]
Router = Annotated[
    str,
    option(
        "R", f"One of: {', '.join(choices.ROUTERS)}; or your own: ./mine.py:ROUTER.", "--router",
        values=lambda: choices.ROUTERS,
    ),
]  # fmt: skip
Replicas = Annotated[
    int | None, option("N", "Replicas behind the router; by default the policy file's number, or 1.", "--replicas")
]

Pools = Annotated[
    list[str] | None,
    option("POOL", "[NAME:]COUNT@PROFILE,POLICY: a pool of the fleet, in place of --policy; repeat.", "--pool"),
]
Links = Annotated[
    list[str] | None,
    option(
        "LINK", "BANDWIDTH[,LATENCY][,field=value...], such as 450GB/s,10us: from a prefill pool to another; repeat.",
        "--link",
    ),
]  # fmt: skip
Decider = Annotated[
    str,
    option(
        "D", f"Which requests a prefill pool takes: {', '.join(choices.DECIDERS)}, or ./mine.py:DECIDER; then "
        ",field=value...", "--decider", values=lambda: choices.DECIDERS,
    ),
]  # fmt: skip
FleetFile = Annotated[
    Path | None,
    option("FILE", "A TOML file with pools, links, router, decider, scaler and startup.", "--fleet"),
]
Scaler = Annotated[
    str,
    option(
        "S", f"{', '.join(choices.SCALERS)}, or your own ./mine.py:SCALER; then ,field=value...", "--scaler",
        values=lambda: choices.SCALERS,
    ),
]  # fmt: skip
Startup = Annotated[
    str,
    option(
        "SECONDS", "Time to start a replica; or its parts, such as provision=240+-30,load=18, or a measured set.",
        "--startup",
    ),
]  # fmt: skip

OnDevice = Annotated[str | None, option("D", "cuda or cpu; by default the GPU, if there is one.", "--device")]
Temperature = Annotated[float, option("T", "Draw tokens at this temperature; 0: the likeliest.", "--temperature")]
MaskTokenId = Annotated[
    int | None, option("N", "The mask token's id, if the directory does not state it.", "--mask-token-id")
]
BlockLength = Annotated[
    int | None, option("N", "The block that the directory's weights were trained with.", "--block-length")
]
RandomWeights = Annotated[
    str | None,
    option(
        "CONFIG", "Instead of --model: random weights for a config.json, or sdar-8b ... (docs/checkpoints.md).",
        "--random-weights",
    ),
]  # fmt: skip
Tokenizer = Annotated[str | None, option("PATH", "tokenizer.json or its folder; the model's own by default.")]
EndsAtEos = Annotated[
    bool, typer.Option("--eos", help="Requests end at the checkpoint's EOS, if it comes before their limit.")
]

Arrival = Annotated[
    str, option("A", f"One of: {', '.join(choices.ARRIVALS)}.", "--arrival", values=lambda: choices.ARRIVALS)
]
Rate = Annotated[float | None, option("R", "Requests per second; the trace's own by default.", "--rate")]
Cv = Annotated[float | None, option("C", "Coefficient of variation of gamma or weibull gaps.", "--cv")]
Lengths = Annotated[
    str | None,
    option(
        "L",
        f"Other lengths than the trace's: {', '.join(choices.LENGTHS)}, {choices.LENGTH_FORMS}, or a trace; "
        "then ,max_tokens=N: a limit for all.",
        "--lengths",
    ),
]
NumRequests = Annotated[int | None, option("N", "How many requests to replay.", "--num-requests")]
TimeScale = Annotated[float | None, option("X", "Multiply the trace's gaps.", "--time-scale")]
TimeUnit = Annotated[
    str | None,
    option("|".join(choices.TIME_UNITS), "Unit of the file's times, if its format has none.", "--time-unit"),
]
Columns = Annotated[
    str | None,
    option("ours=C,...", "The trace's own columns, such as arrival=sent,input=num_in,output=num_out.", "--columns"
    ),
]  # fmt: skip
Only = Annotated[
    str | None, option("model=NAME", "Keep this model's rows of a log, or the rows with COLUMN=VALUE.", "--only")
]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="Leave bad rows out and count them.")]

PerReplay = Annotated[
    int | None, option("N", "Requests in a replay; by default enough for one pass over the trace, 6000 to 24000.")
]

Slos = Annotated[
    list[str] | None,
    option(
        "SLO", "[class/][stat:]metric=bound: ttft=2s, 50ms/token, p90:tpot_chunk=50ms, chat/95%:ttft=2s; repeat.",
        "--slo",
    ),
]  # fmt: skip
Emit = Annotated[
    str, option("E", f"What reaches the client when: {', '.join(choices.EMIT)}.", "--emit", values=lambda: choices.EMIT)
]
Eos = Annotated[
    bool | None,
    typer.Option(
        "--eos/--no-eos",
        help="Requests end at an EOS that no scheduler foresees; the default if --lengths names a workload.",
    ),
]
MissingFails = Annotated[bool, typer.Option("--missing-fails", help="A request without a metric misses bounds on it.")]

Weights = Annotated[
    str | None, option("W", f"Of a data sheet's model: {', '.join(choices.WEIGHTS)}; by default its checkpoint's.")
]
Kv = Annotated[str | None, option("K", "Its keys and values: bf16 or fp8.", "--kv")]
Attainment = Annotated[
    str, option("X%", "Share of arrivals that must meet all SLOs without a statistic.", "--attainment")
]
MinQuality = Annotated[str | None, option("Q", "Least quality relative to the full cache, such as 98%.")]
QualityTable = Annotated[Path | None, option("CSV", "Your own scores instead of the published ones.")]

AllowCode = Annotated[
    list[Path] | None,
    typer.Option(
        "--allow-code", metavar="FILE.py", exists=True, dir_okay=False,
        help="A code file that a TOML file, a table or a run may load; repeat (docs/security.md).",
    ),
]  # fmt: skip

CheckRules = Annotated[
    bool, typer.Option("--check-rules", help="A rule of your own runs checked in Python to the end, not only at first.")
]

Backend = Annotated[
    str, option("B", f"One of: {', '.join(choices.BACKENDS)}.", "--backend", values=lambda: choices.BACKENDS)
]
Address = Annotated[str | None, option("ADDR", "HOST:PORT of a running Ray cluster, or auto.", "--address")]
Jobs = Annotated[int | None, option("N", "Replays at once; by default all cores, on Ray all its CPUs.", "--jobs")]
GpuHour = Annotated[float | None, option("PRICE", "Price of one GPU per hour; adds costs to the result.", "--gpu-hour")]
Seed = Annotated[int, option("S", "Same seed, same bytes.", "--seed")]
Force = Annotated[bool, typer.Option("--force", help="Replace the output folder.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Currency = Annotated[str, option("C", "Currency of the price.", "--currency")]
FailOnSlo = Annotated[
    bool,
    typer.Option("--fail-on-slo", help="End with 1 if an SLO is missed; without a statistic, by over 1 % of requests."),
]
RunOut = Annotated[Path | None, option("DIR", "Write the run and report.html.", "-o", "--out")]

MISSED, LEAST = 1, 0.99  # exit code; share of requests within SLOs without a statistic
# A scenario's options with defaults, in help's order.
SCENARIO: dict[str, tuple[Any, Any]] = {
    "profile": (ProfileName, choices.PROFILE), "workload": (Workload, None), "frontend": (Frontend, None),
    "yields": (Yields, None), "ensemble": (Ensemble, None), "replicas": (Replicas, None),
    "router": (Router, "round-robin"), "arrival": (Arrival, "trace"), "rate": (Rate, None), "cv": (Cv, None),
    "lengths": (Lengths, None),
    "num_requests": (NumRequests, None), "time_scale": (TimeScale, None), "time_unit": (TimeUnit, None),
    "columns": (Columns, None), "only": (Only, None), "skip_bad": (SkipBad, False),
    "emit": (Emit, "block"), "eos": (Eos, None),
    "slo": (Slos, None), "missing_fails": (MissingFails, False), "seed": (Seed, 0),
    "allow_code": (AllowCode, None), "check_rules": (CheckRules, False),
}  # fmt: skip
Given = Mapping[str, Any]  # by name
NONE_GIVEN: Given = MappingProxyType({})


def of_scenario(*left_out: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command SCENARIO's options in place of its parameter `given`."""
    shared = {name: asked for name, asked in SCENARIO.items() if name not in left_out}

    def with_options(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def called(*args: Any, **values: Any) -> None:
            bound = signature.bind(*args, **values)
            bound.apply_defaults()
            given = {name: bound.arguments.pop(name) for name in shared}
            command(**bound.arguments, given=given)

        parameters: list[inspect.Parameter] = []
        for parameter in inspect.signature(command, eval_str=True).parameters.values():
            if parameter.name == "given":
                kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
                parameters += [
                    inspect.Parameter(name, kind, default=default, annotation=annotation)
                    for name, (annotation, default) in shared.items()
                ]
            else:
                parameters.append(parameter)
        signature = inspect.Signature(parameters)
        called.__signature__ = signature  # type: ignore[attr-defined]
        called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return called

    return with_options


def scenario(given: Given, policies: Iterable[str], **other: Any) -> "Scenario":
    """A command's options as a scenario; `other` adds or replaces fields.

    policies: named by the user, so their code, and the router's, may be loaded.
    """
    from ..results.scenario import Scenario, named_code
    from ..results.slo import Slo

    policies = list(policies)
    of_files = given["allow_code"] or any(".py:" in spec or spec.endswith(".toml") for spec in policies)
    if given.get("check_rules") and policies and not of_files:
        raise DsimError(f"--check-rules is given and --policy is {', '.join(policies)}, expected one of a file")
    known = {field.name: given[field.name] for field in fields(Scenario) if field.name in given}
    known["slos"] = tuple(str(Slo.parse(text)) for text in given["slo"] or [])
    known["missing_passes"] = not given["missing_fails"]
    known["allow_code"] = named_code([*policies, given.get("router", "")], given["allow_code"] or [])
    return Scenario(**{**known, **other})


def fail_on_slo(screen: "Screen", policies: Sequence[Mapping[str, Any]]) -> None:
    """Exit with MISSED if runs' summaries, as in run.json, miss an SLO; DsimError if they have none."""
    missed = []
    if not any(summary["slos"] for summary in policies):
        raise DsimError("--fail-on-slo is given and the runs have no SLO, expected at least one")
    for summary in policies:
        missed += [f"{summary['policy']} misses {slo['slo']}" for slo in summary["slos"] if slo["met"] is False]
        share = summary["slo_attainment"]
        if share is not None and share < LEAST:
            missed.append(f"{summary['policy']} meets the SLOs for {100 * share:.4g} % of requests, of {LEAST:.0%}")
    exit_if_any(screen, missed)


def exit_if_any(screen: "Screen", missed: Sequence[str]) -> None:
    for line in missed:
        screen.alarm(line)
    if missed:
        raise typer.Exit(MISSED)


def words_of(given: Given, *left_out: str) -> list[str]:
    """SCENARIO's options as on a command line, without defaults."""
    words: list[str] = []
    for name, (annotation, default) in SCENARIO.items():
        value = given.get(name, default)
        if value == default or name in left_out:
            continue
        said = next(iter(annotation.__metadata__[0].param_decls), f"--{name.replace('_', '-')}")
        if isinstance(value, bool):
            words.append(said.split("/")[0 if value else 1] if "/" in said else said)
        else:
            values = value if isinstance(value, list) else [value]
            words += [word for one in values for word in (said.split("/")[0], str(one))]
    return words


def percent(name: str, text: str) -> float:
    """`2%` or `0.02`."""
    value = float_of(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    if not 0 < value <= 1:
        raise DsimError(f"{name} is {cut(text)}, expected a share above 0% and up to 100%, such as 2%")
    return value


def check_pools(pools: Sequence[str], policies: list[str] | None, given: Given) -> None:
    """DsimError for options that pools replace."""
    if not pools:
        return
    for name, value, usual in (
        ("--policy", policies, None), ("--replicas", given["replicas"], None),
        ("--profile", given["profile"], choices.PROFILE), ("--yield", given["yields"], None),
    ):  # fmt: skip
        if value != usual:
            raise DsimError(f"--pool is {cut(pools[0])} and {name} is {cut(value)}, expected pools alone")


def warn(screen: "Screen", *scenarios: "Scenario") -> None:
    """Of their traces, in general and for their policies."""
    from ..engine.prefix import caches_prefixes
    from ..traces.prefixes import warning

    lines: list[str | None] = []
    for own in scenarios:
        source, wanted = own.source(), own.num_requests or 0
        lines += source.notes.warnings
        if wanted > len(source):
            lines.append(f"{source.name} holds {len(source)} requests and the run asks for {wanted}: it begins again")
        named = source if own.lengths is None else replace(source, extras={})
        lines.append(warning(named, own.router, caches_prefixes(own.parsed_policy())))
    screen.warn(filter(None, dict.fromkeys(lines)))


def warn_of_yields(screen: "Screen", *scenarios: "Scenario") -> None:
    """Of settings that the profiles do not cover."""
    warn_of_runs(
        screen,
        # A server's requests are unknown yet.
        [(s.setting(), s.source() if s.trace else None) for s in scenarios],
    )


def warn_of_runs(screen: "Screen", runs: Iterable[tuple["Setting", "Trace | None"]]) -> None:
    """The first ones, and the number of the others."""
    from ..sim.unknown import warnings_of

    found = list(dict.fromkeys(line for run in runs for line in warnings_of(*run)))
    if len(found) > MOST_SAID:
        found[MOST_SAID:] = [f"{len(found) - MOST_SAID} more policies need data that their profiles lack"]
    screen.warn(found)


def command(left_out: Mapping[str, int] | None = None) -> str:
    """For a page, without options that do not change the result."""
    drop = PLACES if left_out is None else {**PLACES, **left_out}
    kept, skip = [], 0
    for word in sys.argv[1:]:
        name, equals, _ = word.partition("=")
        if skip:
            skip -= 1
        elif name in drop:
            skip = 0 if equals else drop[name]
        else:
            kept.append(without_secrets(word))
    return printable(shlex.join(["dsim", *kept]))
