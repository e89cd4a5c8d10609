"""A run in text: warnings, answer, setting, notes."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..results.manifest import CommitInfo, FleetInfo, Manifest, ProfileInfo
from ..results.spread import uncertain_of
from . import measured
from .digits import counted, percent
from .ensemble import decided, of_ensemble
from .memory import shortages
from .page import Page, Row, Section, Table, priced_apart
from .table import MetricRow, compare, number

Json = dict[str, Any]

OF_ARRIVALS = "part of every time from an arrival"
QUESTION = "Which scheduler settings meet the latency target for this traffic?"


def words(policies: Sequence[Json], info: Manifest) -> Page:
    """For a terminal."""
    return Page(
        name=f"dsim: {info.get('trace', {}).get('name', 'a run')}",
        question=info.get("question", QUESTION),
        answer=decided(answer(policies, profiles_of(info)), uncertain_of(info.get("ensemble"))),
        details=measured.verdict(info.get("measured")),
        alarms=tuple(warnings(policies, info)),
        facts=tuple(setting(info)),
        sections=(
            *((Section("Every number", (_table(policies),)),) if policies else ()),
            *measured.sections(info.get("measured")),
            *of_ensemble(uncertain_of(info.get("ensemble"))),
        ),
        notes=tuple(notes(info)),
    )


def warnings(policies: Sequence[Json], manifest: Manifest) -> list[str]:
    """Interrupted, overloaded, unfinished, rejected."""
    lines = []
    if manifest.get("interrupted"):
        lines.append("INTERRUPTED: the run was stopped; these are the requests and steps until then")
    lines += shortages(manifest.get("memory", []))
    for p in policies:
        if p["unfinished"]:
            lines.append(
                f"UNFINISHED {p['policy']}: {p['unfinished']:,} of {p['num_requests']:,} requests were still in "
                "flight when the run ended; latencies cover only those that completed"
            )
        elif not p["stable"]:
            wait = p["queue_time_ms"]["p99"]
            how_long = "" if wait is None else f" (p99 wait {number(wait / 1e3)} s)"
            lines.append(
                f"OVERLOADED {p['policy']}: the queue grows without bound{how_long}; its "
                "latencies say how long the trace is, not how the policy serves"
            )
    if manifest.get("driver") == "client":
        failed = [p for p in policies if p["rejected"]]
        return lines + [f"FAILED {p['rejected']:,} of {p['num_requests']:,} requests had no answer" for p in failed]
    return lines + _rejections(policies)


def answer(policies: Sequence[Json], profiles: Mapping[str, ProfileInfo]) -> str:
    """By SLOs, else by time a token; profiles: by policy, if they differ."""
    apart = priced_apart(profiles[p["policy"]].get("implementation", "") for p in policies if p["policy"] in profiles)
    judged = [p for p in policies if p["slo_attainment"] is not None]
    ranked = sorted(judged, key=lambda p: -round(p["slo_attainment"], 3))
    if not ranked:
        return _pace(policies, apart)
    best, *others = ranked
    if others and _percent(best) == _percent(others[-1]):
        return f"Every policy meets the SLOs for {_percent(best)} of requests{apart}."
    sentence = f"{best['policy']} meets the SLOs for {_percent(best)} of requests"
    if others:
        sentence += ", " + ", ".join(f"{p['policy']} for {_percent(p)}" for p in others)
    return f"{sentence}{apart}."


def _pace(policies: Sequence[Json], apart: str) -> str:
    """By median time a token; empty if nothing completed."""
    known = [(p["norm_latency_ms"]["p50"], p["policy"]) for p in policies if p["norm_latency_ms"]["p50"] is not None]
    times = [f"{policy} {number(ms)} ms" for ms, policy in sorted(known)]
    return f"The median request's time a token: {', '.join(times)}{apart}." if times else ""


def setting(manifest: Manifest) -> list[tuple[str, str]]:
    """(name, value)."""
    trace, lines = manifest.get("trace", {}), []
    if trace:
        parts = [trace.get("name", "")]
        if "num_requests" in trace:
            parts.append(f"{trace['num_requests']:,} requests")
        if trace.get("rate") and not manifest.get("closed_loop"):
            parts.append(f"{number(trace['rate'])} req/s")
        if "arrival" in trace:
            parts.append(f"arrivals: {trace['arrival']}")
        lines.append(("Trace", ", ".join(part for part in parts if part)))
    if manifest.get("driver") == "live":
        lines.append(("Measured on", _device(manifest)))
    if manifest.get("driver") == "client":
        lines.append(("Measured by", manifest.get("client", {}).get("tool", "a client")))
    if logged := manifest.get("as_logged"):
        lines.append(("As logged", f"{logged['log']}, by a profile {logged['profile']}"))
    profiles = profiles_of(manifest)
    if profiles:
        lines += [
            ("Profile" if len(profiles) == 1 else f"Profile of {policy}", _profile(p, manifest))
            for policy, p in profiles.items()
        ]
        if text := front_end(next(iter(profiles.values()))):
            lines.append(("Front end", text))
    lines += [("Commit model", text) for text in _commits(manifest.get("commit_models", []))]
    serving = []
    if "replicas" in manifest:
        serving.append(counted(manifest["replicas"], "replica"))
    if fleet := manifest.get("fleet"):
        serving[-1] += " at the start" if "scaler" in fleet else ""
        serving += _fleet(fleet)
    if "router" in manifest and manifest.get("replicas", 1) > 1:
        serving.append(f"router {manifest['router']}")
    if lengths := lengths_told(manifest):
        lines.append(("Lengths", lengths))
    if "emit" in manifest:
        serving.append(f"emits by {manifest['emit']}")
    if "seed" in manifest:
        serving.append(f"seed {manifest['seed']}")
    if serving:
        lines.append(("Serving", ", ".join(serving)))
    if manifest.get("slos"):
        lines.append(("SLOs", ", ".join(manifest["slos"])))
    if "cost" in manifest:
        lines.append(("Cost", _cost(manifest)))
    return lines


def _fleet(fleet: FleetInfo) -> list[str]:
    pools = fleet.get("pools", [])
    names = [f"{p.get('name')} of {p.get('replicas')}" for p in pools]
    found = [f"pools {' and '.join(names)}"] if len(pools) > 1 else []
    runs = fleet.get("runs", [])
    if links := fleet.get("links"):
        moved = sum(run.get("moved", 0) for run in runs)
        found += [f"links {' and '.join(links)}", f"decider {fleet.get('decider', '')}", f"{moved:,} requests moved"]
        found += [f"{percent(run['sent'])} % of their keys and values travelled" for run in runs if "sent" in run]
    if "scaler" not in fleet:
        return found
    hours = [f"{number(run['replica_hours'])} replica-hours" for run in runs if run.get("replica_hours")]
    startup = fleet.get("startup", 0.0)
    seconds = startup if isinstance(startup, str) else f"{startup:g}"
    return [*found, f"scaler {fleet['scaler']}", f"{seconds} s to start one", *hours]


def lengths_told(manifest: Manifest) -> str:
    """What routers and a user's policies saw; empty if lengths are unused."""
    lengths = manifest.get("lengths")
    if lengths is None:
        return ""
    factor = number(math.exp(lengths.get("spread", 0.0)))
    return (
        f"{lengths.get('guessed', 0):,} requests set no limit: the router or policy saw estimates, two of three within "
        f"a factor of {factor} of the truth"
    )


def estimated(manifest: Manifest) -> bool:
    """Unless a profile is marked as measured."""
    profiles = profiles_of(manifest) or {"": ProfileInfo()}
    predicted = manifest.get("driver") not in ("live", "client")
    return predicted and any(profile.get("estimated", True) for profile in profiles.values())


def profiles_of(manifest: Manifest) -> dict[str, ProfileInfo]:
    """By policy, or one under ""; empty if unknown."""
    one = {"": manifest["profile"]} if "profile" in manifest else {}
    return manifest.get("profiles") or one


def notes(manifest: Manifest) -> list[str]:
    """Requests left out or changed, and the profile's limits."""
    trace, lines = manifest.get("trace", {}), _of_profile(manifest)
    if trace.get("skipped_bad"):
        count = trace["skipped_bad"]
        lines.append(f"{counted(count, 'row')} of the trace could not be read and {_were(count)} skipped")
    if trace.get("failed_in_trace"):
        count = trace["failed_in_trace"]
        lines.append(f"{counted(count, 'row')} with output_length 0 (failed in the trace) {_were(count)} dropped")
    if trace.get("sorted_rows"):
        count = trace["sorted_rows"]
        lines.append(f"{counted(count, 'row')} {_were(count)} out of order and {_were(count)} sorted by timestamp")
    if trace.get("hash_ids"):
        lines += _of_prefixes(manifest)
    if manifest.get("missing_passes") is False:
        lines.append("a request that lacks a metric does not meet a bound on it")
    lines += manifest.get("doubted", [])
    if manifest.get("closed_loop"):
        lines.append("closed loop: a request arrives when another ends, so the queue cannot grow without bound")
    return lines


def _of_prefixes(manifest: Manifest) -> list[str]:
    """Policies that ignore hash_ids."""
    policies = manifest.get("policies", [])
    without = [p["policy"] for p in policies if "prefix_cache" not in p]
    if policies and not without:
        return []
    subject = "no policy reuses"
    if len(without) < len(policies):
        subject = f"{', '.join(without)} {'reuse' if len(without) > 1 else 'reuses'} no"
    return [f"the trace has hash_ids, and {subject} prefixes (prefix_caching=true does): prompts are computed whole"]


def _of_profile(manifest: Manifest) -> list[str]:
    lines = []
    for policy, profile in profiles_of(manifest).items():
        models = [m for m in manifest.get("commit_models", []) if policy in ("", m.get("policy"))]
        lines += notes_on(profile, models)
    return list(dict.fromkeys(lines))


def notes_on(profile: ProfileInfo, models: Sequence[CommitInfo]) -> list[str]:
    """Another yield than its calibration's, unknown host terms, another implementation's costs."""
    lines = []
    if "calibrated_with" in profile:
        others = dict.fromkeys(
            f"{m['tokens_per_step']:.3g} ({m['workload']})" for m in models if m.get("tokens_per_step") is not None
        )
        if others:
            lines.append(
                f"{profile['name']}'s step times were calibrated under a yield of {profile['calibrated_with']}; "
                f"this run commits {', '.join(others)} tokens a step"
            )
    unknown = profile.get("unknown_host")
    if unknown:
        lines.append(
            f"{profile['name']} does not know {' and '.join(unknown)}, which {'is' if len(unknown) == 1 else 'are'} 0 "
            "in it: `dsim replay --ensemble 19` shows how much that may cost"
        )
    if profile.get("host_or_device"):
        lines.append(
            f"{profile['name']} cannot tell whether host_request is the host's time or the device's, which matters "
            "where one hides the other: `dsim replay --ensemble 19` spans it"
        )
    if elsewhere := profile.get("unpriced"):
        lines.append(
            f"{profile['name']} does not hold the costs of {' and '.join(elsewhere)}: steps cost what its own "
            f"implementation takes ({profile['implementation']})"
        )
    if like := profile.get("costs_of"):
        lines.append(
            f"{profile['name']} takes the engine's host time from {like}, another build or GPU: "
            "`dsim replay --ensemble 19` shows how much that may change"
        )
    return lines


def _table(policies: Sequence[Json]) -> Table:
    """One row per metric, one column per policy; transposed on a narrow terminal."""
    names, rows = [policy["policy"] for policy in policies], compare(policies)
    brief = [row for row in rows if row.brief]
    heads = tuple(f"{row.label}\n{row.unit}" for row in brief)
    turned = Table(
        head=("policy", *heads),
        rows=tuple(
            Row(
                (name, *(row.cells[i] for row in brief)),
                frozenset(k + 1 for k, row in enumerate(brief) if i in row.best),
            )
            for i, name in enumerate(names)
        ),
        spare=heads[::-1],
    )
    return Table(
        head=("", "unit", *names),
        rows=tuple(_down(row) for row in rows),
        caption="Bold: the best of the policies, or within 0.5 % of it.",
        left=frozenset({0, 1}),
        coloured=2,
        turned=turned,
    )


def _down(row: MetricRow) -> Row:
    best = frozenset(i + 2 for i in row.best)
    return Row((row.label, row.unit, *row.cells), best, row.group, row.about)


def _rejections(policies: Sequence[Json]) -> list[str]:
    rejecting = [(p["policy"], p) for p in policies if p["rejected"]]
    if len({(p["rejected"], p["num_requests"]) for p in policies}) == 1 < len(rejecting):
        rejecting = [("by every policy", rejecting[0][1])]
    return [
        f"REJECTED {name}: {p['rejected']:,} of {p['num_requests']:,} requests can never fit the KV pool or the "
        "context limit"
        for name, p in rejecting
    ]


def _device(manifest: Manifest) -> str:
    live = manifest.get("live", {})
    about = ", ".join(str(live[key]) for key in ("device", "model", "dtype") if live.get(key))
    about += f", weights {live['weights']}" if live.get("weights") else ""
    decided = {"model": "the weights decide the commits", "twin": "the profile's draws decide the commits"}
    host = [f"{name} {number(ms['p50'])} ms" for name, ms in live.get("host_ms", {}).items()]
    return f"{about}; {decided.get(manifest.get('commits', ''), 'unknown what decides the commits')}" + (
        f"; host time of a step in addition to the device's: {', '.join(host)}" if host else ""
    )


def _profile(profile: ProfileInfo, manifest: Manifest) -> str:
    about = ", ".join(str(profile[key]) for key in ("model", "device", "implementation") if profile.get(key))
    name = profile.get("name", "unnamed")
    return (f"{name} ({about})" if about else name) + (
        ": estimated, not measured" if estimated(manifest) and profile.get("estimated", True) else ""
    )


def _cost(manifest: Manifest) -> str:
    """The fleet's, and that of a million good (without SLOs, completed) requests."""
    cost = manifest["cost"]
    text = f"{cost['per_hour']:,.2f} {cost['currency']} an hour for {cost['gpus']} GPU{'s' * (cost['gpus'] != 1)}"
    each = []
    for p in manifest.get("policies", []):
        rate = p["request_throughput"] if p["goodput"] is None else p["goodput"]
        if rate:
            each.append(f"{p['policy']} {cost['per_hour'] / (3600 * rate) * 1e6:,.2f}")
    kind = "good" if any(p["goodput"] is not None for p in manifest.get("policies", [])) else "completed"
    return text + (f"; a million {kind} requests: {', '.join(each)}" if each else "")


def front_end(info: Mapping[str, Any]) -> str:
    """From a profile's keys; empty without one."""
    seconds = info.get("frontend") or 0.0
    return f"{number(1e3 * seconds)} ms between a client and the engine, {OF_ARRIVALS}" if seconds else ""


def _commits(models: Sequence[CommitInfo]) -> list[str]:
    """Each once; with policies if they differ."""
    found: dict[str, list[str]] = {}
    for commit in models:
        if not commit.keys() & {"block_length", "canvas_length"}:
            continue
        found.setdefault(_commit(commit), []).append(commit.get("policy", ""))
    if len(found) < 2:
        return list(found)
    return [f"{text} ({', '.join(filter(None, policies))})" for text, policies in found.items()]


def _commit(commit: CommitInfo) -> str:
    text = f"workload {commit.get('workload', 'unnamed')}"
    if "block_length" in commit:
        text += f", block {commit['block_length']}"
    if "canvas_length" in commit:
        text += f", canvas {commit['canvas_length']}"
    if "median_steps" in commit:
        text += f", a law of {commit['median_steps']:.3g} forwards (median)"
    if "threshold" in commit:
        text += f", threshold {commit['threshold']:g}"
    if "asked_threshold" in commit:
        text += f" in place of the policy's {commit['asked_threshold']:g}"
    fitted = commit.get("extrapolated_from")
    kind = "canvas" if "canvas_length" in commit else "block"
    return text + (f": extrapolated from {kind} {fitted}, nothing was fitted here" if fitted else "")


def _percent(policy: Json) -> str:
    return f"{100 * policy['slo_attainment']:.1f} %"


def _were(count: int) -> str:
    return "were" if count != 1 else "was"
