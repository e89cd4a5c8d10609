"""Play a scenario on a dsim preset, and compare the result step by step with an engine's own recording.

A scenario (one JSON object):
    engine, family, seed, variation   where it comes from; `variation` names a row of the table
    policy                            the preset and its fields, as `dsim replay --policy` takes them
    settings                          what the engine's oracle builds its scheduler from
    limits                            fields of dsim.engine.engine.Limits
    discipline                        of disciplines.py, by name; none: first come, first served
    eos                               requests end at an EOS, which no scheduler foresees
    page_size, caching                prefix caching, by pages of so many tokens
    requests                          [{arrival, prompt, output, max_tokens, ...}]: arrival in steps, `prompt` the token
                                      ids, `output` tokens of the answer, `max_tokens` its limit; and, by the model:
        estimate                      expected tokens of the answer, which a discipline sees
        steps                         [canvases] denoising steps of each canvas or block
        diffusion_max_steps           most denoising steps of a canvas that the request allows
        accepted                      [tokens] drafts accepted behind each token
        unmasked                      [blocks] masks that a step of each block unmasks, from the left

A recording (one JSON object):
    seed, family                      of the scenario
    error                             why the oracle gave up; nothing else then
    ended                             why the engine itself ended, if it did: it is compared up to there
    steps                             [{start, rows, held, preempted, prefill, drafts}]: rows [[request, tokens, ...]]
                                      in the engine's order, held pages and preempted requests of all decided up to
                                      `start`, whether a draft forward follows; a key that the oracle leaves out is
                                      not compared
    tokens                            [[request, time, tokens]] as they leave

Every step takes 1. Order of rows matters unless the recording has "any_order": true.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from dsim.benchmarks.oracles import disciplines
from dsim.engine.discipline import EMPTY_STEP
from dsim.engine.engine import Engine, Limits
from dsim.engine.journal import RequestTable
from dsim.engine.prefix import Prefixes
from dsim.engine.request import Request
from dsim.engine.spec import parse
from dsim.engine.state import MASKED
from dsim.engine.step import Phase, StepOutcome, StepPlan

MOST_STEPS = 20_000
OUTPUT = 10**9  # where answers' token ids begin: requests share none


def prefixes(scenario: dict[str, Any]) -> Prefixes:
    """Name each token of prompt and answer: equal tokens up to it give equal names."""
    seen: dict[tuple[int, int], int] = {}
    names = []
    for i, request in enumerate(scenario["requests"]):
        tokens = [*request["prompt"], *range(OUTPUT + 10**5 * i, OUTPUT + 10**5 * i + request["max_tokens"])]
        name, own = -1, []
        for token in tokens:
            name = seen.setdefault((name, token), len(seen))
            own.append(name)
        names.append(own)
    return Prefixes(1, names, list(map(len, names)))


class Device:
    """What each step of a plan commits, by the scenario's requests."""

    def __init__(self, engine: Engine, requests: Sequence[dict[str, Any]]) -> None:
        self.requests, self._caps = requests, engine.caps
        limits = [request.get("diffusion_max_steps", MOST_STEPS) for request in requests]
        self._draws: Any = SimpleNamespace(requests={"most": np.array(limits)})
        self.starts: list[list[int]] = [[] for _ in requests]  # of a request's blocks, in order

    def commits(self, plan: StepPlan) -> np.ndarray:
        """[rows, width] bool; the step begins."""
        self._caps.apply(self._draws)
        committed = np.zeros(plan.window.shape, np.bool_)
        for row, index in enumerate(plan.requests.tolist()):
            window = plan.window[row]
            if plan.phases[row] == Phase.IDLE or not window.any():
                continue
            request, start = self.requests[index], int(plan.block_start[row])
            if "accepted" in request or ("steps" not in request and "unmasked" not in request):
                drafts = request.get("accepted")
                told = start + 1 - int(plan.prompt[row])
                committed[row, : 1 + (min(int(window.sum()) - 1, drafts[told]) if drafts else 0)] = True
            elif "unmasked" in request:  # a prefill may be the first denoising step of its last block
                masks = np.flatnonzero(window & (plan.status[row] == MASKED))
                if len(masks):
                    committed[row, masks[: request["unmasked"][self.block(index, start)]]] = True
            elif plan.phases[row] == Phase.DENOISE:
                masks = np.flatnonzero(window & (plan.status[row] == MASKED))
                block = self.block(index, start)
                steps = min(request["steps"][block], self._draws.requests["most"][index])
                if int(plan.evaluations[row][masks[0]]) + 1 >= steps:
                    committed[row, masks] = True
        return committed

    def block(self, request: int, start: int) -> int:
        """From 0."""
        starts = self.starts[request]
        if start not in starts:
            starts.append(start)
        return starts.index(start)


def play(scenario: dict[str, Any]) -> dict[str, Any]:
    """On dsim's preset."""
    asked = scenario["requests"]
    table = RequestTable(len(asked))
    named = prefixes(scenario) if scenario["caching"] else None
    policy = parse(scenario["policy"])
    if "discipline" in scenario:
        policy = replace(policy, discipline=getattr(disciplines, scenario["discipline"]))
    engine = Engine(policy, Limits(**scenario["limits"]), table, eos=scenario["eos"], prefixes=named)
    device, now, submitted, steps, tokens = Device(engine, asked), 0.0, 0, [], []
    had = np.zeros(len(asked), np.int64)
    for _ in range(MOST_STEPS):
        while submitted < len(asked) and asked[submitted]["arrival"] <= now:
            request = asked[submitted]
            accepted = engine.submit(
                Request(
                    submitted, request["arrival"], len(request["prompt"]), request["output"],
                    max_tokens=request["max_tokens"], estimate=request.get("estimate", 0),
                )
            )  # fmt: skip
            if not accepted:
                return {"error": f"dsim rejects request {submitted}", "steps": steps, "tokens": tokens}
            submitted += 1
        plan = engine.schedule(now)
        if plan is None:
            if engine.withheld:
                now += EMPTY_STEP
                continue
            if submitted == len(asked):
                return {"steps": steps, "tokens": tokens}
            now = max(now, asked[submitted]["arrival"])
            continue
        firsts = plan.num_keys - plan.num_tokens
        columns = (plan.requests.tolist(), plan.num_tokens.tolist(), firsts.tolist())
        steps.append(
            {
                "start": now, "prefill": plan.prefill, "rows": [list(row) for row in zip(*columns, strict=True)],
                "held": plan.pages, "preempted": list(plan.preempted), "drafts": plan.features.draft_tokens > 0,
            }
        )  # fmt: skip
        engine.commit(StepOutcome(1.0, device.commits(plan)), now + 1)
        now += 1
        has = table["num_tokens"][: len(asked)].astype(np.int64)
        tokens += [[int(i), now, int(has[i] - had[i])] for i in np.flatnonzero(has != had)]
        had = has
    return {"error": f"dsim takes more than {MOST_STEPS} steps", "steps": steps, "tokens": tokens}


def difference(theirs: dict[str, Any], ours: dict[str, Any]) -> str | None:
    """None without one."""
    for name, recording in (("the engine", theirs), ("dsim", ours)):
        if "error" in recording:
            return f"{name}: {recording['error']}"
    for number, (a, b) in enumerate(zip(theirs["steps"], ours["steps"], strict=False)):
        for key in ("start", "prefill", "rows", "preempted", "held", "drafts"):
            if key not in a:
                continue
            x, y = a[key], b[key]
            if key == "rows":
                y = [row[: len(x[0])] for row in y]
                if theirs.get("any_order"):
                    x, y = sorted(x), sorted(y)
            if (abs(x - y) > 1e-6) if key == "start" else x != y:
                return f"step {number} at {a['start']:g}: {key} {x}, dsim {y}"
    if "ended" in theirs:
        return None
    if len(theirs["steps"]) != len(ours["steps"]):
        return f"{len(theirs['steps'])} steps, dsim {len(ours['steps'])}"
    a, b = (sorted((i, round(at, 6), n) for i, at, n in r["tokens"]) for r in (theirs, ours))
    if a != b:
        return f"tokens leave otherwise: {sorted(set(a) - set(b))[:3]}, dsim {sorted(set(b) - set(a))[:3]}"
    return None


def mean_latency(scenario: dict[str, Any], recording: dict[str, Any]) -> float:
    """End-to-end, in steps; NaN if the recording stops before."""
    if "ended" in recording or "error" in recording:
        return float("nan")
    last = {int(i): at for i, at, _ in recording.get("tokens", ())}
    requests = scenario["requests"]
    if len(last) < len(requests):
        return float("nan")
    return sum(last[i] - request["arrival"] for i, request in enumerate(requests)) / len(requests)


def table(scenarios: Iterable[dict[str, Any]], recordings: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per preset and variation.

    preset, variation, scenarios, steps (up to a difference), identical, error (mean of dsim's mean end-to-end latency
    over the engine's, less one), first: the first difference with its seed, or "".
    """
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for scenario, theirs in zip(scenarios, recordings, strict=True):
        preset, variation = scenario["policy"].split(",")[0].split(":")[0], scenario["variation"]
        new = {"preset": preset, "variation": variation, "scenarios": 0, "steps": 0, "identical": 0, "first": ""}
        row = rows.setdefault((preset, variation), {**new, "errors": []})
        ours = play(scenario)
        found = difference(theirs, ours)
        row["scenarios"] += 1
        row["identical"] += found is None
        row["steps"] += len(theirs.get("steps", ())) if found is None else same_steps(theirs, ours)
        ratio = mean_latency(scenario, ours) / mean_latency(scenario, theirs) - 1
        if ratio == ratio:
            row["errors"].append(ratio)
        if found and not row["first"]:
            row["first"] = f"seed {scenario['seed']}: {found}"
    made = [rows[key] for key in sorted(rows)]
    for row in made:
        errors = row.pop("errors")
        row["error"] = sum(errors) / len(errors) if errors else float("nan")
        row["worst"] = max(errors, key=abs, default=float("nan"))
    return made


def same_steps(theirs: dict[str, Any], ours: dict[str, Any]) -> int:
    """Before the first whose rows differ."""
    pairs = zip(theirs.get("steps", ()), ours.get("steps", ()), strict=False)
    for number, (a, b) in enumerate(pairs):
        if a["start"] != b["start"] or sorted(r[:2] for r in a["rows"]) != sorted(r[:2] for r in b["rows"]):
            return number
    return min(len(theirs.get("steps", ())), len(ours.get("steps", ())))
