"""Draw scenarios: small random worlds for an engine's scheduler and dsim's preset (fields: differences.py).

    python benchmarks/oracles/scenarios.py FAMILY COUNT [SEED] > scenarios.jsonl

Each scenario mixes all axes: short memory, preemption, prefix caching, EOS, (a)synchronous scheduling, long prompts,
and its model's (canvas widths, drafts, windowed layers, watermark). Most faults show only where pages are short.
"""

import json
import sys
from bisect import bisect_left
from collections.abc import Callable
from random import Random
from typing import Any

from dsim.engine.engine import Engine, Limits
from dsim.engine.journal import RequestTable
from dsim.engine.request import Request
from dsim.engine.spec import parse

Scenario = dict[str, Any]
# From this seed on memory is nearly full and the longest request fills the context; half of vLLM's budgets hold one
# canvas, or less than a row of drafts, which then come with prefix caching; LMDeploy's prefill_interval is 1; SGLang
# prefills few blocks.
AT_LIMITS = 10_000


def prompts(r: Random, count: int, usual: int, longest: int) -> list[list[int]]:
    """Some share a beginning, some are long."""
    shared = [[r.randrange(10**6) for _ in range(longest)] for _ in range(3)]
    drawn = []
    for i in range(count):
        length = r.randint(usual, longest) if r.random() < 0.15 else r.randint(1, usual)
        common = r.choice(shared)[: r.choice([0, 0, length // 3, 2 * length // 3, length])]
        drawn.append((common + [10**7 + i * 10**4 + j for j in range(length)])[:length])
    return drawn


def arrivals(r: Random, count: int) -> list[float]:
    """Poisson, in steps."""
    rate, now, times = r.choice([0.05, 0.2, 1.0, 5.0]), 0.0, []
    for _ in range(count):
        now += r.expovariate(rate)
        times.append(round(now, 3))
    return times


def pages_for(scenario: Scenario, r: Random) -> int:
    """Plenty, or in 6 of 10 scenarios so few that requests are preempted; at limits up to two more than needed."""
    least = least_pages(scenario)
    if scenario["seed"] >= AT_LIMITS:
        return least + r.randint(0, 2)
    return least + r.randint(0, least) if r.random() < 0.6 else 10 * least


def context_of(requests: list[dict[str, Any]], seed: int) -> int:
    """Plenty, or at limits the longest request's length."""
    if seed < AT_LIMITS:
        return 4096
    return max(64, *(len(request["prompt"]) + request["max_tokens"] for request in requests))


def least_pages(scenario: Scenario) -> int:
    """With which each request fits alone."""
    asked, policy = scenario["requests"], parse(scenario["policy"])

    def all_fit(num_pages: int) -> bool:
        limits = Limits(**{**scenario["limits"], "num_pages": num_pages})
        engine = Engine(policy, limits, RequestTable(len(asked)))
        return all(
            engine.fits(
                Request(i, 0.0, len(q["prompt"]), q["output"], max_tokens=q["max_tokens"])
            )
            for i, q in enumerate(asked)
        )  # fmt: skip

    return bisect_left(range(1 << 16), True, key=all_fit)


# ---- vLLM ----------------------------------------------------------------------------------------------------------


# Of families of `vllm-ar` with drafts: the words of their variations, numbers of drafts, and drafters.
DRAFTS = {
    "vllm-ar-drafts": ("drafts, ", (1, 2, 3, 5), ("ngram", "eagle", "draft_model")),
    "vllm-ar-blocks": ("block drafts, ", (1, 3, 7, 15), ("dflash", "dspark")),
}


def vllm(family: str, seed: int) -> Scenario:
    """For `vllm-ar`, alone or with a family of DRAFTS, or `vllm-diffusion`; drafts follow 0.33 (`vllm_033`)."""
    r = Random(f"{family}-{seed}")
    page, count = 16, r.choice([3, 6, 12, 20])
    canvas = r.choice([16, 32, 48]) if family == "vllm-diffusion" else 0
    label, numbers, drafters = DRAFTS.get(family, ("", (0,), ("none",)))
    preset = "vllm-ar" if family in DRAFTS else family
    drafts = r.choice(numbers)
    seqs = r.choice([1, 2, 3, 4, 8])
    budget = canvas * seqs + r.choice([0, 0, 16, 64, 200]) if canvas else r.choice([8, 16, 32, 64, 128, 300])
    if canvas and r.random() < 0.3:  # the budget cuts canvases
        budget = r.randint(canvas, canvas * seqs)
    budget = max(budget, seqs)
    chunked = r.random() < 0.9
    threshold = r.choice([0, 0, 0, 16, 48]) if chunked else 0
    if threshold < canvas:
        threshold = 0
    asynchronous, eos, caching = r.random() < 0.75, r.random() < 0.5, r.random() < 0.4
    limits = Random(f"limits-{family}-{seed}")
    if seed >= AT_LIMITS and limits.random() < 0.5:
        seqs = limits.choice([1, 2, 3])
        budget = max(canvas, seqs) + limits.randint(0, 3)
        caching = caching or drafts > 0
    usual, longest = 90, 500
    windows = {}
    if not caching and r.random() < 0.25:
        windows = {"window": r.choice([8, 40, 100]), "window_bytes": r.choice([1, 3]), "kv_bytes": 1}
    requests = []
    for arrival, prompt in zip(arrivals(r, count), prompts(r, count, usual, longest), strict=True):
        output = r.randint(3, 4 * canvas) if canvas else r.randint(1, 70)
        limit = output + r.choice([0, r.randint(1, 40)]) if eos else output
        if not chunked:  # a preempted request computes all its tokens in one step
            prompt = prompt[: max(1, budget - limit)]
            limit = min(limit, max(1, budget - len(prompt)))
            output = min(output, limit)
        request = {"arrival": arrival, "prompt": prompt, "output": output, "max_tokens": limit}
        if canvas:
            request["steps"] = [r.randint(1, 6) for _ in range(limit + 2)]
        if drafts:
            request["accepted"] = [
                next((j for j in range(drafts) if r.random() > 0.6), drafts) for _ in range(limit + 2)
            ]
        requests.append(request)
    context = context_of(requests, seed)
    settings: dict[str, Any] = {
        "max_num_seqs": seqs, "max_num_batched_tokens": budget, "long_prefill_token_threshold": threshold,
        "enable_chunked_prefill": chunked, "async_scheduling": asynchronous,
    }  # fmt: skip
    own: dict[str, Any] = {"canvas_length": canvas} if canvas else {}
    if drafts:
        own = {"num_speculative_tokens": drafts, "drafter": r.choice(drafters)}
        # 0.33 refuses a budget without room beside each row, or for the positions of one row's draft forward; with one
        # too small for a token, its drafts and the row's slot it waits forever.
        if seed >= AT_LIMITS and own["drafter"] == "draft_model":
            settings["max_num_batched_tokens"] = max(budget, seqs + 1, drafts + 2)
        if own["drafter"] in ("dflash", "dspark"):
            settings["max_num_batched_tokens"] = max(budget, drafts + 2)
    fields = {**settings, **own, "page_size": page, "prefix_caching": caching}
    settings |= {"scheduler_reserve_full_isl": True, "watermark": 0.0, "prefill_schedule_interval": 1}
    scenario: Scenario = {
        "engine": "vllm", "family": family, "seed": seed,
        "variation": f"{label}{'asynchronous' if asynchronous else 'synchronous'}, "
        f"{'caching' if caching else 'no caching'}",
        "policy": ",".join([preset, *(f"{name}={str(value).lower()}" for name, value in fields.items())]),
        "settings": {**settings, **own, "max_model_len": context, "prefix_cache_retention_interval": 0},
        "limits": {"num_pages": 0, "context_limit": context, "max_batch": seqs, **windows},
        "eos": eos, "page_size": page, "caching": caching, "requests": requests,
    }  # fmt: skip
    policy = parse(scenario["policy"])
    scenario["limits"]["max_batch"] = min(seqs, policy.granularity.most_rows(policy))
    scenario["limits"]["num_pages"] = pages_for(scenario, r)
    return scenario


def vllm_033(family: str, seed: int) -> Scenario:
    """The scenario of the family's 0.32."""
    return vllm(family.removesuffix("-0.33"), seed) | {"family": family}


DISCIPLINES = ("SHORTEST", "FITTING", "SINGLY", "PROMPTS", "REST", "ALL")
CAPS = ("ADMISSION", "RUNNING", "STEPS", "ALL_STEPS")  # disciplines that cap canvases


def vllm_disciplines(family: str, seed: int) -> Scenario:
    """The scenario of the family without `disciplines`, under one, with expected lengths; `caps` has those of CAPS."""
    r, world = Random(f"{family}-{seed}"), family.removesuffix("-disciplines-0.33")
    preset = world.removesuffix("-caps")
    scenario, name = vllm(preset, seed), r.choice(DISCIPLINES if world == preset else CAPS)
    how = scenario["variation"].rsplit(",", 1)[0]
    scenario |= {"family": family, "discipline": name, "variation": f"{how}, {name}"}
    for request in scenario["requests"]:
        request["estimate"] = max(1, round(request["output"] * r.uniform(0.5, 2)))
        if world != preset and r.random() < 0.5:
            request["diffusion_max_steps"] = r.randint(1, 6)
    scenario["limits"]["num_pages"] = pages_for(scenario, r)
    return scenario


# ---- LMDeploy ------------------------------------------------------------------------------------------------------


def lmdeploy(family: str, seed: int) -> Scenario:
    """For `lmdeploy-0.18`."""
    r = Random(f"{family}-{seed}")
    block, page = r.choice([4, 16, 32]), r.choice([32, 64])
    most, interval = r.choice([1, 2, 4, 8, 16]), r.choice([2, 4, 16])
    interval = interval if seed < AT_LIMITS else 1
    max_prefill = block * r.choice([64 // block, 128 // block, 256 // block, 2048 // block])
    caching, eos = r.random() < 0.5, r.random() < 0.5
    order, aging, short_turns = r.choice(["size", "size", "fifo"]), r.choice([2.0, 10.0, 60.0]), r.choice([1, 3, 3])
    count = r.choice([3, 6, 12, 20])
    requests = blocks(r, count, block, eos)
    fields = {
        "block_length": block, "page_size": page, "max_batch": most, "max_prefill_tokens": max_prefill,
        "prefill_interval": interval, "opt_ttft_short_turns": short_turns, "opt_ttft_policy": order,
        "opt_ttft_aging_sec": aging, "prefix_caching": caching,
    }  # fmt: skip
    scenario: Scenario = {
        "engine": "lmdeploy", "family": family, "seed": seed, "variation": "caching" if caching else "no caching",
        "policy": ",".join([family, *(f"{name}={str(value).lower()}" for name, value in fields.items())]),
        "settings": {
            "block": block, "page": page, "num_pages": 0, "max_batch": most, "max_prefill": max_prefill,
            "prefill_interval": interval, "short_turns": short_turns, "order": order, "aging": aging,
        },
        "limits": {"num_pages": 0, "context_limit": context_of(requests, seed), "max_batch": most},
        "eos": eos, "page_size": page, "caching": caching, "requests": requests,
    }  # fmt: skip
    scenario["limits"]["num_pages"] = scenario["settings"]["num_pages"] = pages_for(scenario, r)
    return scenario


def blocks(r: Random, count: int, block: int, eos: bool) -> list[dict[str, Any]]:
    """With the masks that each step of a block unmasks."""
    requests = []
    for arrival, prompt in zip(arrivals(r, count), prompts(r, count, 150, 700), strict=True):
        output = r.randint(1, 120)
        limit = output + r.choice([0, r.randint(1, 60)]) if eos else output
        unmasked = [1 + r.choice([0, 0, 1, 2, 4, 40]) for _ in range(limit // block + 3)]
        requests.append(
            {"arrival": arrival, "prompt": prompt, "output": output, "max_tokens": limit, "unmasked": unmasked}
        )
    return requests


# ---- SGLang --------------------------------------------------------------------------------------------------------


def sglang(family: str, seed: int) -> Scenario:
    """For `sglang-fdfo`, `-sync`, `-joint` or `-gemma`."""
    r = Random(f"{family}-{seed}")
    kind = {"sglang-joint": "joint", "sglang-gemma": "gemma"}.get(family, "low")
    fdfo = family == "sglang-fdfo" or (kind != "low" and r.random() < 0.5)
    block, most = r.choice([4, 16, 32]), r.choice([1, 2, 4, 8, 16])
    caching, eos = kind != "gemma" and r.random() < 0.5, r.random() < 0.5
    max_prefill = r.choice([block * 4, 200, 16384]) if seed < AT_LIMITS else block * r.choice([1, 2, 4])
    requests = blocks(r, r.choice([3, 6, 12, 20]), block, eos)
    if kind != "low":
        for request in requests:
            request["steps"] = [r.choice([1, 2, 3, 5, 9]) for _ in request.pop("unmasked")]
    length = "canvas_length" if kind == "gemma" else "block_length"
    fields = {
        "max_running_requests": most, "page_size": block, length: block, "dllm_fdfo": fdfo,
        "max_prefill_tokens": max_prefill, **({} if kind == "gemma" else {"prefix_caching": caching}),
    }  # fmt: skip
    scenario: Scenario = {
        "engine": "sglang", "family": family, "seed": seed,
        "variation": f"{'FDFO' if fdfo else 'sync'}, {'caching' if caching else 'no caching'}",
        "policy": ",".join([family, *(f"{name}={str(value).lower()}" for name, value in fields.items())]),
        "settings": {
            "kind": kind, "fdfo": fdfo, "block": block, "page": block, "num_pages": 0, "most": most,
            "max_prefill": max_prefill,
        },
        "limits": {"num_pages": 0, "context_limit": context_of(requests, seed), "max_batch": most},
        "eos": eos, "page_size": block, "caching": caching, "requests": requests,
    }  # fmt: skip
    scenario["limits"]["num_pages"] = scenario["settings"]["num_pages"] = pages_for(scenario, r)
    apart = Random(f"windows-{family}-{seed}")
    if kind == "gemma" and apart.random() < 0.4:
        with_windows(scenario, apart)
        if not eos and Random(f"ignore-{family}-{seed}").random() < 0.5:
            scenario["policy"] += ",ignore_eos=true"
            scenario["variation"] += ", ignore_eos"
            for request in requests:
                request["ignore_eos"] = True
    return scenario


def with_windows(scenario: Scenario, r: Random) -> None:
    """Windowed layers with a share of the pages, as HybridSWAPoolConfigurator."""
    window, ratio, page = r.choice([8, 40, 100]), r.choice([0.3, 0.8, 0.8, 1.0]), scenario["page_size"]
    scenario["policy"] += f",swa_full_tokens_ratio={ratio}"
    scenario["limits"].update(window=window, window_bytes=1, kv_bytes=1)
    pages, least = pages_for(scenario, r), least_pages(scenario)
    full = int(pages / (1 + ratio))
    scenario["limits"]["num_pages"] = pages
    scenario["settings"].update(window=window, num_pages=full, window_pages=int(full * page * ratio) // page)
    scenario["variation"] += f", windows, {'few' if pages < 10 * least else 'many'} pages"


# SGLang's benchmark of DiffusionGemma (benchmark/dllm/bench_diffusion_gemma.py, PR 34061).
ARRIVALS: dict[str, Callable[[int, int], float]] = {
    "together": lambda i, count: 0.0,
    "one by one": lambda i, count: 0.1 * i,  # in the first one's prefill
    "one late": lambda i, count: 2.5 if i == count - 1 else 0.1 * i,  # in the others' first denoising step
}
PUBLISHED = [
    (arrive, fdfo, count, tokens)
    for arrive in ARRIVALS
    for fdfo in (True, False)
    for count in (1, 4, 8)
    for tokens in (128, 2048)
    if count > 1 or arrive == "together"
]


def sglang_published(family: str, seed: int) -> Scenario:
    """The seed-th published run: 1, 4 or 8 prompts of 128 or 2,048 tokens, a canvas of 48 steps each.

    As launched: 16 running requests, a context of 4,096, plenty of pages.
    """
    arrive, fdfo, count, tokens = PUBLISHED[seed]
    requests = [
        {
            "arrival": ARRIVALS[arrive](i, count), "prompt": [10**7 + i * 10**4 + j for j in range(tokens)],
            "output": 256, "max_tokens": 256, "ignore_eos": True, "steps": [48] * 3,
        }
        for i in range(count)
    ]  # fmt: skip
    full, page, ratio = 2400, 256, 0.8  # pages of tokens in layers that see all keys: 615,000 tokens
    return {
        "engine": "sglang", "family": family, "seed": seed,
        "variation": f"{'FDFO' if fdfo else 'sync'}, {count} x {tokens:,}, {arrive}",
        "policy": f"sglang-gemma,max_running_requests=16,page_size={page},canvas_length=256,max_prefill_tokens=16384,"
        f"dllm_fdfo={str(fdfo).lower()},swa_full_tokens_ratio={ratio},ignore_eos=true",
        "settings": {
            "kind": "gemma", "fdfo": fdfo, "block": 256, "page": page, "num_pages": full, "most": 16,
            "max_prefill": 16384, "window": 1024, "window_pages": int(full * ratio),
        },
        "limits": {
            "num_pages": int(full * (1 + 10 * ratio)), "context_limit": 4096, "max_batch": 16, "window": 1024,
            "window_bytes": 10, "kv_bytes": 1,
        },
        "eos": False, "page_size": page, "caching": False, "requests": requests,
    }  # fmt: skip


FAMILIES: dict[str, Callable[[str, int], Scenario]] = {
    "vllm-ar": vllm, "vllm-diffusion": vllm, "vllm-ar-0.33": vllm_033,
    "vllm-ar-disciplines-0.33": vllm_disciplines, "vllm-diffusion-disciplines-0.33": vllm_disciplines,
    "vllm-diffusion-caps-disciplines-0.33": vllm_disciplines,
    "vllm-ar-drafts-disciplines-0.33": vllm_disciplines, "vllm-ar-blocks-disciplines-0.33": vllm_disciplines,
    "vllm-ar-drafts-0.33": vllm_033, "vllm-ar-blocks-0.33": vllm_033, "vllm-diffusion-0.33": vllm_033,
    "lmdeploy-0.18": lmdeploy,
    "sglang-fdfo": sglang, "sglang-sync": sglang, "sglang-joint": sglang, "sglang-gemma": sglang,
    "sglang-published": sglang_published,
}  # fmt: skip


def draw(family: str, count: int, seed: int = 0) -> list[Scenario]:
    """Seeds from `seed` on; published runs: all."""
    if family == "sglang-published":
        count, seed = len(PUBLISHED), 0
    return [FAMILIES[family](family, seed + i) for i in range(count)]


if __name__ == "__main__":
    for drawn in draw(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 0):
        print(json.dumps(drawn))
