"""How far cards miss a data sheet's assumed shares of bandwidth and peak: `python benchmarks/efficiencies.py SYSTEMS`.

SYSTEMS: `aiconfigurator_core/systems` of the unpacked wheel aiconfigurator-core 0.12 (NVIDIA's tables of measured
kernels). Each card and engine gives two errors, logarithms of the reached over the assumed share: of the bandwidth,
where reading weights takes over three times as long as multiplying, and of the peak, where multiplying takes over twice
as long; the medians over large bf16 products, and over layers of 64 or more experts. Printed: their root mean squares
and correlation, and the correlations between products and experts. Then steps of real models measured on an H100 and an
H200 (gpu.md, gpu-h200.md), over those of data sheets.
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from dsim.engine.latency import Features, terms_of
from dsim.profiler.hardware import MOE_SHARE, gpu
from dsim.profiler.models import model
from dsim.profiler.roofline import latency_model

CARDS = {
    "a100_sxm": "A100-80GB", "h100_sxm": "H100", "h200_sxm": "H200", "b200_sxm": "B200", "b300_sxm": "B300",
    "gb200": "B200", "gb300": "B300", "l40s": "L40S", "rtx_pro_6000_server": "RTX-PRO-6000",
}  # fmt: skip
# GPU, model, sequences, window, keys before it, and measured ms.
STEPS = (
    ("H100", "SDAR-8B", 1, 32, 512, 7.09), ("H100", "SDAR-8B", 16, 32, 512, 12.8),
    ("H100", "SDAR-8B", 64, 32, 512, 49.1), ("H100", "SDAR-8B", 256, 32, 512, 205),
    ("H200", "LLaDA2.0-mini", 1, 32, 512, 6.13), ("H200", "LLaDA2.0-mini", 64, 32, 512, 17),
    ("H200", "LLaDA2.0-mini", 128, 32, 512, 25.5), ("H200", "LLaDA2.0-mini", 256, 32, 512, 46.6),
    ("H200", "DiffusionGemma-26B-A4B", 1, 256, 1024, 17.9), ("H200", "DiffusionGemma-26B-A4B", 4, 256, 1024, 31.1),
    ("H200", "DiffusionGemma-26B-A4B", 8, 256, 1024, 49.5), ("H100", "DiffusionGemma-26B-A4B", 1, 256, 1024, 24.4),
    ("H100", "DiffusionGemma-26B-A4B", 8, 256, 1024, 56.3),
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("systems", type=Path)
    systems = parser.parse_args().systems
    tables = [pd.DataFrame(rows(systems), columns=["of", "card", "engine", "memory", "compute"])]
    errors = pd.concat(tables).groupby(["of", "card", "engine"]).mean()
    products, experts = errors.loc["products"], errors.loc["experts"]
    for name, table in ("products", products), ("experts", experts):
        squares = np.sqrt((table**2).mean())
        print(f"{name}, {len(table)} cards and engines: memory {squares['memory']:.2f}, compute ", end="")
        print(f"{squares['compute']:.2f} (RMS), correlation {table['memory'].corr(table['compute']):.2f}")
    for name in ("memory", "compute"):
        print(f"{name} of products and of experts: correlation {products[name].corr(experts[name]):.2f}")
    for card, name, batch, window, before, measured in STEPS:
        latency = latency_model(gpu(card), model(name), 1, True)
        tokens, keys = batch * window, batch * (before + window)
        step = Features(tokens, keys * window, keys, tokens, tokens, batch, 0, 1, keys * window, keys)
        sheet = 1e3 * replace(latency, **dict.fromkeys(terms_of("host"), 0.0)).step(step)  # type: ignore[arg-type]
        bound = "products" if tokens > latency.knots[-1][0] else "memory" if tokens < latency.knots[-2][0] else "both"
        print(f"{name}, {card}, {batch} x {window}, bound by {bound}: {100 * (measured / sheet - 1):+.0f} %")


def rows(systems: Path) -> Iterator[tuple[str, str, str, float, float]]:
    """An error of memory and one of compute by kind of kernel, card and engine."""
    for folder, name in CARDS.items():
        card = gpu(name)
        bandwidth, peak = card.bandwidth * card.bandwidth_efficiency, card.peak * card.matmul_efficiency
        for path in sorted((systems / "data" / folder / "gemm").glob("*/*/*.parquet")):
            table = pd.read_parquet(path)
            large = (table.n.between(2048, 32768)) & (table.k.between(2048, 32768)) & (table.n * table.k >= 1 << 25)
            table = table[(table.gemm_dtype == "bfloat16") & large]
            memory = 2 * (table.n * table.k + table.m * (table.n + table.k)) / bandwidth
            compute = 2 * table.m * table.n * table.k / peak
            yield "products", folder, path.parts[-3], *medians(table.latency / 1e3, memory, compute)
        for path in sorted((systems / "data" / folder / "moe").glob("*/*/*.parquet")):
            table = pd.read_parquet(path)
            whole = (table.moe_tp_size == 1) & (table.moe_ep_size == 1)
            kinds = (table.num_experts >= 64) & (table.inter_size <= 2048) & (table.moe_dtype == "bfloat16")
            table = table[whole & kinds & (table.distribution == "power_law_1.01")]
            if table.empty:
                continue
            reached = 1 - (1 - table.topk / table.num_experts) ** table.num_tokens
            layer = 3 * table.hidden_size * table.inter_size  # weights of an expert
            memory = 2 * layer * table.num_experts * reached / bandwidth
            compute = 2 * layer * table.topk * table.num_tokens / (peak * MOE_SHARE)
            yield "experts", folder, path.parts[-3], *medians(table.latency / 1e3, memory, compute)


def medians(taken: pd.Series, memory: pd.Series, compute: pd.Series) -> tuple[float, float]:
    """Logarithms of the median share, over the assumed one, of memory-bound and of compute-bound kernels."""
    bound_by_memory, bound_by_compute = compute < 0.3 * memory, compute > 2 * memory
    shares = (memory / taken)[bound_by_memory], (compute / taken)[bound_by_compute]
    first, second = (float(np.log(share.median())) for share in shares)
    return first, second


if __name__ == "__main__":
    main()
