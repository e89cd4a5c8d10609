"""Published runs of production engines and the twin's, and users' questions.

`python benchmarks/published_engines.py [NAME ...]` prints the tables of research/evidence/engine-answers.md, all or
the named ones, in two minutes on one core. Nothing was measured here. *calibrated*: the profile was fitted to the
published figure next to it; *estimated*: by a data sheet alone; *predicted*: nobody published it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from dsim.benchmarks.tables import print_named, table
from dsim.engine.errors import ProfileError
from dsim.engine.spec import parse
from dsim.profiler.calibrate import same_mean
from dsim.profiler.canvas_law import mean_forwards, with_mean
from dsim.profiler.hardware import gpu
from dsim.profiler.known import drafted
from dsim.profiler.models import model
from dsim.profiler.profile import Profile, gb, load
from dsim.profiler.roofline import weight_read
from dsim.research.calibration.engine_profiles import Published, engine_profile
from dsim.sim.setting import Setting
from dsim.sim.twin import RunRecords, simulate
from dsim.traces import Trace, synth

VLLM, SGLANG = "h200x2-diffusiongemma/vllm", "h200x2-diffusiongemma/sglang"
FP8, QWEN, DRAFTS = "h100-diffusiongemma-fp8", "h100-qwen3-8b-ar", "h100-sdar-8b/sglang-drafts"
EDITS = "h20-llada2.1-mini-sglang"
LAW = "evaluation"  # DiffusionGemma's counted law
SDAR = "h100-sdar-8b"  # from data sheets alone
HOST = (1.0, 5.5)  # ms a forward: assumed with captured graphs; SGLang's with LLaDA2.1-mini on an H20 (6.2)


# ---- one run -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loop:
    """A closed loop: a client sends again when it is served."""

    result: RunRecords
    clients: int

    @property
    def seconds(self) -> float:
        """To the last token."""
        return self.result.end

    @property
    def throughput(self) -> float:
        """Output tok/s, with the loop's fill and drain."""
        return float(self.result.table["num_tokens"].sum()) / self.result.end

    def ttft(self) -> float:
        """Median, s, without the requests that begin at once."""
        columns = self.result.table.columns
        waited = columns["first_emission"] - columns["arrival"]
        return float(np.median(waited[self.clients :]))


def loop(profile: str | Profile, policy: str, clients: int, requests: Trace, workload: str | None = None) -> Loop:
    held = load(profile) if isinstance(profile, str) else profile
    return Loop(simulate(requests, Setting(parse(policy), held, workload), concurrency=clients), clients)


def alike(num: int, prompt: int, output: int) -> Trace:
    """Of one length."""
    return Trace("alike", np.zeros(num), np.full(num, prompt), np.full(num, output))


def chats(clients: int, prompt: int | None = None) -> Trace:
    """ShareGPT's lengths, or its outputs with prompts of one length: six a client, at least 24."""
    drawn = synth("poisson", 1.0, lengths="sharegpt", num_requests=max(24, 6 * clients))
    if prompt is not None:
        drawn = replace(drawn, input_length=np.full(len(drawn), prompt))
    return drawn


def change(new: float, old: float) -> str:
    """In percent."""
    return f"{new / old - 1:+.0%}"


# ---- the published runs --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A published run that a profile was fitted to, and the twin's."""

    run: str
    twin: float
    published: float
    unit: str

    @property
    def error(self) -> float:
        return self.twin / self.published - 1

    def cells(self) -> list[str]:
        digits = {"s": ",.3f", "times": ".2f"}.get(self.unit, ",.0f")
        values = [f"{value:{digits}} {self.unit}" for value in (self.twin, self.published)]
        return [self.run, *values, f"{round(self.error, 3) + 0.0:+.1%}"]


# s of a batch of 256 tokens after prompts of 128, 48 fixed steps, by requests at once (6.1).
BATCHES = {
    "vllm-diffusion": (VLLM, {1: 0.569, 4: 1.281, 8: 2.226}),
    "sglang-gemma": (SGLANG, {1: 0.810, 4: 1.521, 8: 2.561}),
    "sglang-gemma,dllm_fdfo=false": (SGLANG, {1: 0.741, 4: 1.409, 8: 2.455}),
}
# tok/s by clients (6.4).
STREAMS = {
    "ar": (QWEN, {1: 149.0, 64: 5794.0}),
    "vllm-ar,drafter=eagle,acceptance=0.5": (DRAFTS, {1: 272.0, 64: 6414.0}),
}
# tok/s by clients: gsm8k, prompts of 64 tokens, never cached (6.2).
EDITED = {1: 592.0, 16: 2451.0, 128: 3412.0}
FDFO = 1.89  # times sync's tok/s; at the most clients, assumed
BLOG = 1008.0  # tok/s, one client (6.1)


def calibrated() -> list[Row]:
    rows = []
    for policy, (profile, runs) in BATCHES.items():
        for n, published in runs.items():
            twin = loop(profile, policy, n, alike(n, 128, 256), "fixed-48").seconds
            rows.append(Row(f"`{policy}` on `{profile}`, {n} x 128/256", twin, published, "s"))
    twin = loop(FP8, "vllm-diffusion", 1, alike(1, 1024, 1024), "fixed-16").throughput
    rows.append(Row(f"`vllm-diffusion` on `{FP8}`, 1 x 1024/1024", twin, BLOG, "tok/s"))
    for policy, (profile, streams) in STREAMS.items():
        for n, published in streams.items():
            twin = loop(profile, policy, n, alike(2 * n, 128, 1750)).throughput
            rows.append(Row(f"`{policy}` on `{profile}`, {n} x 128/1750", twin, published, "tok/s"))
    for n, published in EDITED.items():
        twin = loop(EDITS, f"sglang-joint:{n}", n, alike(max(16, 4 * n), 64, 256), "gsm8k").throughput
        rows.append(Row(f"`sglang-joint` on `{EDITS}`, {n} x 64/256", twin, published, "tok/s"))
    sync = loop(EDITS, f"sglang-joint:{n},dllm_fdfo=false", n, alike(4 * n, 64, 256), "gsm8k").throughput
    rows.append(Row(f"the same over sync, {n} x 64/256", twin / sync, FDFO, "times"))
    return rows


def calibration() -> None:
    table(("run (requests x prompt/output)", "twin", "published", "error"), (row.cells() for row in calibrated()))


# ---- SGLang's rounds -----------------------------------------------------------------------------------------------


def with_host(profile: str, ms: float) -> Profile:
    """With another host time a forward."""
    held = load(profile)
    return replace(held, latency=replace(held.latency, host_step=ms / 1e3))


def spread_out(profile: Profile, factor: float) -> Profile:
    """With a multiple of the steps' spread: between requests, blocks (or canvases) and steps.

    The default workload's, and each law's, mean yield stays.
    """
    commits = tuple(
        same_mean(m, replace(
            m, request_spread=factor * m.request_spread, block_spread=factor * m.block_spread,
            step_spread=factor * m.step_spread,
        ))
        for m in profile.commits[:1]
    )  # fmt: skip
    laws = tuple(
        with_mean(
            replace(law, request_spread=factor * law.request_spread, canvas_spread=factor * law.canvas_spread),
            mean_forwards(law),
        )
        for law in profile.canvas_laws
    )
    return replace(profile, commits=commits, canvas_laws=laws)


def fdfo() -> None:
    """Does FDFO beat blocks in step, and when?"""
    print(f"SDAR-8B on an H100 (`{SDAR}`, estimated), ShareGPT's lengths: output tok/s and ttft p50, predicted\n")
    rows = []
    for host in HOST:
        profile = with_host(SDAR, host)
        for n in (1, 4, 16, 64):
            requests = chats(n)
            ours, theirs = (loop(profile, f"sglang-{mode}:{n}", n, requests) for mode in ("fdfo", "sync"))
            even = spread_out(profile, 0.0)
            steady = [loop(even, f"sglang-{mode}:{n}", n, requests).throughput for mode in ("fdfo", "sync")]
            rows.append([
                f"{host:g} ms", str(n), f"{ours.throughput:,.0f}", f"{theirs.throughput:,.0f}",
                change(ours.throughput, theirs.throughput), f"{1e3 * ours.ttft():,.0f} ms",
                f"{1e3 * theirs.ttft():,.0f} ms", change(steady[0], steady[1]),
            ])  # fmt: skip
    table(("host a forward", "clients", "FDFO", "sync", "FDFO is", "ttft FDFO", "ttft sync", "without spread"), rows)
    print(f"\nDiffusionGemma on two H200s (`{SGLANG}`, calibrated), 256/1024 tokens, law `{LAW}`: tok/s, predicted\n")
    rows = []
    for n in (1, 4, 8):
        cells = [str(n)]
        for factor in (0.0, 0.5, 1.0, 2.0):
            profile, requests = spread_out(load(SGLANG), factor), alike(6 * n, 256, 1024)
            fast, slow = (
                loop(profile, f"sglang-gemma:{n},dllm_fdfo={mode}", n, requests, LAW).throughput
                for mode in ("true", "false")
            )
            cells.append(f"{fast:,.0f} / {slow:,.0f} ({change(fast, slow)})")
        rows.append(cells)
    table(("clients", "spread 0", "half of it", "the law's", "twice"), rows)


def cell(run: Loop) -> str:
    """Throughput and time to first token."""
    return f"{run.throughput:,.0f} ({run.ttft():,.2f} s)"


# ---- DiffusionGemma on one card ------------------------------------------------------------------------------------

CANVAS = 256  # tokens


def bf16_on_80gb() -> Profile:
    """The FP8 profile's card with two-byte weights; not for step times."""
    held = load(FP8)
    return replace(held, memory=replace(held.memory, weight_bytes=held.model.weight_bytes))


def tiled(profile: Profile) -> Profile:
    """A sampler that keeps one tensor of logits and computes the rest in tiles."""
    return replace(profile, memory=replace(profile.memory, workspace_bytes=0))


def rows_that_fit(profile: Profile, tokens: int) -> int:
    """Rows of `tokens` tokens that memory holds."""
    n = 0
    while True:
        n += 1
        policy = parse(f"vllm-diffusion:{n},max_num_batched_tokens={max(8192, CANVAS * n)}")
        try:
            limits = Setting(policy, profile).limits
        except ProfileError:
            return n - 1
        held = profile.memory.kv_bytes_per_token * limits.num_pages * policy.memory.page_size
        if held < n * sum(kv_of_row(profile, tokens)):
            return n - 1


def kv_of_row(profile: Profile, tokens: int) -> tuple[int, int]:
    """Bytes of a row with this much text, in windowed layers and in the others.

    Its canvas and, decided ahead, the next one follow.
    """
    m, windowed = profile.memory, profile.model.windowed
    window = windowed.window if windowed else 0
    in_sight = min(tokens, window - 1) + 2 * CANVAS
    return in_sight * m.window_bytes_per_token, (tokens + 2 * CANVAS) * m.kv_bytes_per_token


def parts_of_row(profile: Profile, tokens: int) -> dict[str, float]:
    m = profile.memory
    windowed, full = kv_of_row(profile, tokens)
    return {
        "windowed layers": windowed / m.utilisation,
        "sampler": m.workspace_bytes + CANVAS * m.vocab * 4,
        "KV pages": full / m.utilisation,
    }


def memory() -> None:
    """How many rows of DiffusionGemma an 80 GB card holds."""
    print(f"`vllm-diffusion` on an H100 (memory of `{FP8}`, estimated); the largest part of a row is what binds\n")
    rows = []
    for name, profile in (("bf16", bf16_on_80gb()), ("FP8", load(FP8))):
        for sampler, held in (("whole", profile), ("tiled", tiled(profile))):
            for tokens in (256, 2048, 32768):
                parts = parts_of_row(held, tokens)
                rows.append([
                    name, gb(held.memory.weight_bytes), sampler, f"{tokens:,}", str(rows_that_fit(held, tokens)),
                    *(gb(int(size)) for size in parts.values()), max(parts, key=lambda part: parts[part]),
                ])  # fmt: skip
    head = ("weights in", "weights", "sampler", "tokens a row", "rows", "windowed layers a row", "sampler a row",
            "KV pages a row", "binds")  # fmt: skip
    table(head, rows)
    print(f"\nWhat rows give in FP8 (`{FP8}`: one row calibrated, more estimated), 1024/1024, law `{LAW}`: predicted\n")
    rows = []
    for n in (1, 2, 4, 8, 16, 30):
        run = loop(FP8, f"vllm-diffusion:{n}", n, alike(4 * n, 1024, 1024), LAW)
        rows.append([str(n), f"{run.throughput:,.0f}", f"{run.throughput / n:,.0f}", f"{run.ttft():.2f} s"])
    table(("rows", "tok/s", "tok/s a client", "ttft p50"), rows)


def thrash() -> None:
    """Throughput and repeated work with few KV pages."""
    told = f"1024/1024, law `{LAW}`: tok/s (preemptions a request), predicted"
    print(f"`vllm-diffusion` on `{FP8}`, eight clients, {told}\n")
    # A text of 2,048 tokens, 97 pages of it visible to windowed layers, and two canvases.
    most, rows = 8 * (160 + 10 * 97), []
    for share in (1.0, 0.75, 0.5, 0.25):
        cells = [f"{share * most:,.0f}"]
        for field in ("async_scheduling=true", "async_scheduling=false"):
            policy = f"vllm-diffusion:8,num_pages={share * most:.0f},{field}"
            run = loop(FP8, policy, 8, alike(32, 1024, 1024), LAW)
            cells.append(f"{run.throughput:,.0f} ({run.result.totals.preemptions / 32:.1f})")
        rows.append(cells)
    table(("pages", "as it is", "not looking ahead"), rows)


AR_ALONE = 1 / 197  # s a token: AR Gemma 4 26B-A4B in FP8 on an H100, no drafts (6.1)


def autoregressive_gemma() -> Profile:
    """Gemma 4 26B-A4B in FP8 on an H100: one row as published; more rows read more experts, by the data sheet."""
    card, shape = gpu("H100"), model("Gemma4-26B-A4B")
    # FP8: half of what `weight_read` counts.
    more = [
        (weight_read(card, shape, 1, n) - weight_read(card, shape, 1, 1)) / 2
        for n in (1, 2, 4, 8, 16, 32, 64, 128, 256)
    ]
    points = tuple((float(2**k), AR_ALONE + extra) for k, extra in enumerate(more))
    slope = 9.0e-6  # s a further token, as assumed for the diffusion model of this shape
    runs = Published(
        (*points, (512.0, points[-1][1] + 256 * slope)), 1, 1536,
        "vLLM's blog of 2026-06-10: 197 tok/s, one client; reads of experts by the data sheet", drafted((1.0,)), 1.0,
        weight_bytes=1,
    )  # fmt: skip
    return engine_profile(
        "H100", "Gemma4-26B-A4B", runs, name="h100-gemma4-fp8-ar", date="2026-11-22",
        description="Gemma 4 26B-A4B in FP8 on an H100, autoregressive, one row calibrated", implementation="vLLM",
    )  # fmt: skip


def overtake() -> None:
    """Where an autoregressive Gemma 4 overtakes DiffusionGemma."""
    print(
        f"H100, FP8, 1024/1024: `vllm-diffusion` on `{FP8}`, `vllm-ar` on a line through 197 tok/s: tok/s, predicted\n"
    )
    ar, rows = autoregressive_gemma(), []
    for n in (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128):
        requests = alike(4 * n, 1024, 1024)
        cells = [str(n), f"{loop(ar, f'vllm-ar:{n}', n, requests).throughput:,.0f}"]
        for workload in (LAW, "prose"):
            cells += [
                f"{loop(FP8, f'vllm-diffusion:{most}', n, requests, workload).throughput:,.0f}" for most in (8, 30)
            ]
        rows.append(cells)
    table(("clients", "AR", f"{LAW}, 8 rows", f"{LAW}, 30 rows", "prose, 8 rows", "prose, 30 rows"), rows)


# ---- settings ------------------------------------------------------------------------------------------------------


def settings() -> None:
    loads = (1, 16, 64, 256)
    print(f"SDAR-8B on an H100 (`{SDAR}`, estimated), ShareGPT's lengths: output tok/s by clients, predicted\n")
    asked = [
        *((f"lmdeploy-0.18:{b}", "sharegpt") for b in (4, 8, 16, 32)),
        *((f"chunk:{c}", "sharegpt") for c in (4, 8, 16, 32)),
        ("optimus", "sharegpt"),
        *((f"lmdeploy-0.18,temperature=0.8,threshold={t}", "sharegpt-focus") for t in (0.9, 0.8)),
    ]
    found = {(s, w): [loop(SDAR, s, n, chats(n), w).throughput for n in loads] for s, w in asked}
    best = [max(runs[i] for (_, w), runs in found.items() if w == "sharegpt") for i in range(len(loads))]
    table(("policy", "yields", *(f"{n} client{'s' * (n > 1)}" for n in loads)), (
        [f"`{s}`", f"`{w}`", *(f"**{v:,.0f}**" if v in best else f"{v:,.0f}" for v in runs)]
        for (s, w), runs in found.items()
    ))  # fmt: skip
    of = "yields `sharegpt-focus` (temperature 0.8)"
    print(f"\nBlock, chunk and threshold together, {of}: the best by load, predicted\n")
    table(("clients", "threshold", "best block", "tok/s", "best chunk of 32", "tok/s", "`optimus`"),
          (best_of(n, threshold) for n in loads for threshold in (0.9, 0.8)))  # fmt: skip


def best_of(clients: int, threshold: float) -> list[str]:
    """The best block, and the best chunk of a block of 32, at a load."""
    given = f",temperature=0.8,threshold={threshold}"
    cells = [str(clients), f"{threshold:g}"]
    for preset, sizes in (("lmdeploy-0.18", (4, 8, 16, 32)), ("chunk", (4, 8, 16, 32))):
        runs = {
            size: loop(SDAR, f"{preset}:{size}{given}", clients, chats(clients), "sharegpt-focus").throughput
            for size in sizes
        }
        size = max(runs, key=lambda s: runs[s])
        cells += [str(size), f"{runs[size]:,.0f}"]
    return [*cells, f"{loop(SDAR, 'optimus' + given, clients, chats(clients), 'sharegpt-focus').throughput:,.0f}"]


ANSWERS: dict[str, Callable[[], None]] = {
    "calibration": calibration, "fdfo": fdfo, "memory": memory,
    "thrash": thrash, "overtake": overtake, "settings": settings,
}  # fmt: skip


if __name__ == "__main__":
    print_named(ANSWERS, __doc__)
