"""Machines whose latency model is known: step shapes to run on them, and their noisy clocks."""

from dataclasses import replace

import numpy as np

from dsim.engine.latency import Features, LatencyModel
from dsim.profiler.fit import predict
from dsim.profiler.samples import Samples, samples

THREE = LatencyModel(
    ((1.0, 0.005), (120.0, 0.005), (1000.0, 0.02)), 3e-5, attention=3e-9, kv_read=2e-8, head=4e-6, sample=2e-6,
    host_step=1e-3, host_request=2e-5, dense=0.5,
)  # fmt: skip
TWO = replace(THREE, knots=((1.0, 0.005), (200.0, 0.005)))
EAGER = replace(THREE, launch=0.03)


def shapes(num: int, seed: int) -> list[Features]:
    """Step shapes of all kinds: a quarter prefills, the others windows of every size, batch and context."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(num):
        if rng.random() < 0.25:
            batch, length = int(rng.integers(1, 9)), int(2 ** rng.uniform(5, 11))
            tokens = batch * length
            found.append(Features(tokens, tokens * length // 2, tokens, batch * 32, batch * 32, batch, tokens))
        else:
            batch, window = int(2 ** rng.uniform(0, 8)), int(rng.choice([1, 2, 4, 8, 16, 32]))
            tokens, context = batch * window, int(2 ** rng.uniform(5, 12.5))
            sampled = batch * 32 if rng.random() < 0.5 else tokens
            found.append(Features(tokens, tokens * context, batch * context, tokens, sampled, batch, 0))
    return found


def run(machine: LatencyModel, features: list[Features], seed: int, noise: float = 0.02, timed: bool = True) -> Samples:
    """What a noisy clock says of those steps, in that order; `timed`: of the device's share of them, too."""
    table = np.array(features, np.float64).reshape(-1, len(Features._fields))
    rng = np.random.default_rng([seed, 1])
    device = predict(replace(machine, host_step=0.0, host_request=0.0), table)
    host = predict(machine, table) - device
    device = device * np.exp(noise * rng.standard_normal(len(table)))
    latency = device + host * np.exp(noise * rng.standard_normal(len(table)))
    return samples(table, latency, device if timed else None)
