"""When a prefill pool pays at equal GPUs: `python benchmarks/split_gain.py [NAME ...]`.

The tables of research/evidence/split.md, predicted on profiles that are estimated: nothing here was measured.
"""

from collections.abc import Callable, Iterable
from functools import cache

from dsim.benchmarks.tables import print_named, table
from dsim.results.metrics import Summary
from dsim.results.world import World

GPUS, OUTPUT, REQUESTS = 4, 256, 600
LINK = "450GB/s,10us"
ENGINES = {  # policy, profile
    "SGLang": ("sglang-fdfo,block_length={}", "h100-sdar-8b"),
    "LMDeploy": ("lmdeploy-0.18,block_length={}", "h100-sdar-8b"),
    "vLLM, next tokens": ("vllm-ar", "h100-qwen3-8b-ar"),
}
LAYOUTS = (0, 1, 2)  # GPUs of the prefill pool


def world(engine: str, prompt: int, block: int, prefill: int, rate: float, link: str = LINK) -> World:
    """Requests of one length on GPUS replicas, `prefill` of them in a prefill pool."""
    policy, profile = ENGINES[engine]
    policy = policy.format(block)
    counts = {"prefill": prefill, "decode": GPUS - prefill}
    pools = tuple(f"{name}:{count}@{profile},{policy}" for name, count in counts.items() if count)
    return World(
        "azure-conv", pools=pools, links=(link,) if prefill else (), router="least-tokens", arrival="poisson",
        rate=rate, lengths=f"fixed:{prompt},{OUTPUT}", num_requests=REQUESTS,
    )  # fmt: skip


@cache
def capacity(engine: str, prompt: int, block: int) -> float:
    """req/s of GPUS replicas without a prefill pool, if all arrive at once."""
    throughput = world(engine, prompt, block, 0, 1000.0).run().request_throughput
    assert throughput is not None
    return throughput


def served(engine: str, prompt: int, block: int, load: float) -> list[Summary]:
    rate = load * capacity(engine, prompt, block)
    return [world(engine, prompt, block, prefill, rate).run() for prefill in LAYOUTS]


def cells(runs: list[Summary]) -> Iterable[str]:
    """ttft and ms a token by layout, the least in bold."""
    for values, digits in (([run.ttft_ms.p90 / 1e3 for run in runs], 2), ([run.tpot_ms.p90 for run in runs], 1)):
        texts = [f"{value:.{digits}f}" for value in values]
        least = min(values)
        yield from (f"**{text}**" if float(text) <= float(f"{least:.{digits}f}") else text for text in texts)


HEAD = ("ttft p90 (s): 4", "1 + 3", "2 + 2", "tpot p90 (ms): 4", "1 + 3", "2 + 2")


def lengths() -> None:
    """Prompts of several lengths, in blocks of 32, at 50 % and 80 % of the capacity without a prefill pool."""
    table(
        ("engine", "prompt", "req/s", *HEAD),
        (
            [
                engine,
                str(prompt),
                f"{load * capacity(engine, prompt, 32):.1f}",
                *cells(served(engine, prompt, 32, load)),
            ]
            for engine in ENGINES
            if "round" not in engine
            for prompt in (512, 2048, 8192)
            for load in (0.5, 0.8)
        ),
    )


def blocks() -> None:
    """Blocks of several lengths, prompts of 2,048 tokens, at 80 % of the capacity without a prefill pool."""
    table(
        ("engine", "block", "req/s", *HEAD),
        (
            [engine, str(block), f"{0.8 * capacity(engine, 2048, block):.1f}", *cells(served(engine, 2048, block, 0.8))]
            for engine in ("SGLang", "LMDeploy")
            for block in (4, 16, 32)
        ),
    )


def rounds() -> None:
    """SGLang with 16 blocks of a prompt a round (proposed: PR 31586), at 80 % of the capacity."""
    engine = "SGLang, 16 blocks a round"
    table(
        ("prompt", "req/s", *HEAD),
        (
            [str(prompt), f"{0.8 * capacity(engine, prompt, 32):.1f}", *cells(served(engine, prompt, 32, 0.8))]
            for prompt in (512, 2048, 8192)
        ),
    )


def links() -> None:
    """Links of several bandwidths, prompts of 8,192 tokens on LMDeploy at 50 % of the capacity, 2 + 2 GPUs."""
    rows, rate = [], 0.5 * capacity("LMDeploy", 8192, 32)
    for link in ("inf", LINK, "50GB/s,10us", "12.5GB/s,50us", "12.5GB/s,50us,overlap=true"):
        run = world("LMDeploy", 8192, 32, 2, rate, link).run()
        rows.append(
            [f"`{link}`", f"{run.ttft_ms.p50:.0f} ms", f"{run.ttft_ms.p90:.0f} ms", f"{run.tpot_ms.p90:.1f} ms"]
        )
    table(("link", "ttft p50", "ttft p90", "tpot p90"), rows)


ANSWERS: dict[str, Callable[[], None]] = {
    "lengths": lengths, "blocks": blocks, "rounds": rounds, "links": links,
}  # fmt: skip


if __name__ == "__main__":
    print_named(ANSWERS, __doc__)
