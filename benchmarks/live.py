"""The live driver's host time a step. `python benchmarks/live.py`.

Everything runs but the forward. On a GPU the device waits meanwhile, unless a forward takes longer to launch than to
run.
"""

import numpy as np
import torch

from dsim.live.cache import PagedCache
from dsim.live.forward import Batch, Forward, Sampled
from dsim.live.measure import Shape, measure
from dsim.live.weights import load

STEPS = 200
SHAPES = [Shape(b, w, 256) for b in (1, 32, 128) for w in (1, 8, 32)]


class NoForward(Forward):
    """Lays out the batch only."""

    def run(self, batch: Batch) -> Sampled:
        self._upload(batch)
        n = len(batch.sampled)
        return Sampled(np.full(n, 65), np.full(n, 0.5, np.float32), 0.0)


def main() -> None:
    model = load("tiny", "cpu", torch.float32)
    forward = NoForward(model, PagedCache(model.config, 4096, 64, "cpu", torch.float32))
    print(f"{'batch':>6} {'window':>7} {'median':>9} {'p90':>9}   (ms a step, of {STEPS})")
    for shape in SHAPES:
        latency = measure(forward, shape, model.config.block_length, STEPS).latency
        median, p90 = (1e3 * float(np.quantile(latency, q)) for q in (0.5, 0.9))
        print(f"{shape.batch:>6} {shape.window:>7} {median:>9.2f} {p90:>9.2f}")


if __name__ == "__main__":
    main()
