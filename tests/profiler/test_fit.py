"""A fit gives back the machine that was measured, within the errors it states, and refuses bad measurements."""

from dataclasses import replace

import numpy as np
import pytest

from dsim.engine.errors import ProfileError
from dsim.engine.latency import Features, LatencyModel
from dsim.profiler.fit import fit_latency, predict, split
from dsim.profiler.profile import Fit
from dsim.profiler.samples import Floats, Samples, points, samples

from ..worlds import refusal

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


GRAPHS = replace(TWO, launch=0.03, graph_tokens=1024)  # a machine whose decode steps are captured graphs


def chance_shapes(num: int, seed: int) -> list[Features]:
    """Any steps: of each kind, of as many forwards, fewer rows of the head than tokens, every bucket's edges."""
    rng = np.random.default_rng(seed)
    edges = [1, 2, 3, 4, 5, 127, 128, 129, 255, 256, 257, 300, 512, 513, 768, 769, 1024, 1025, 8192, 8193]
    found = []
    for i in range(num):
        tokens = edges[i] if i < len(edges) else int(2 ** rng.uniform(0, 14))
        head, batch, forwards = (int(rng.integers(1, 1 + most)) for most in (tokens, min(tokens, 256), 4))
        sampled, keys = int(rng.integers(1, 1 + head)), int(rng.integers(0, 4096))
        prefill = int(rng.integers(1, 1 + tokens)) if i >= len(edges) and rng.random() < 0.4 else 0
        seen = min(keys, 1024)
        windows = tokens * seen, batch * seen
        found.append(Features(tokens, tokens * keys, batch * keys, head, sampled, batch, prefill, forwards, *windows))
    return found


@pytest.mark.parametrize("graph_tokens", [0, 1, 100, 256, 300, 8192])
def test_many_steps_are_priced_as_one_is(graph_tokens: int) -> None:
    some = chance_shapes(500, graph_tokens)
    table = np.array(some, np.float64)
    windowed = replace(THREE, window_attention=5e-9, window_kv_read=3e-8)
    for machine in (THREE, EAGER, windowed, replace(EAGER, launch=1.0)):
        graphs = replace(machine, graph_tokens=graph_tokens)
        assert predict(graphs, table) == pytest.approx([graphs.step(f) for f in some], rel=1e-14)


TERMS = ("attention", "kv_read", "head", "sample", "host_step", "host_request")


@pytest.mark.parametrize("machine", [THREE, TWO, replace(THREE, knots=((1.0, 0.004),))], ids=["three", "two", "one"])
def test_a_machine_without_noise_is_given_back(machine: LatencyModel) -> None:
    model, fit = fit_latency(run(machine, shapes(300, 2), 2, noise=0.0))
    for name in TERMS:
        assert getattr(model, name) == pytest.approx(getattr(machine, name), rel=0.03), name
    assert model.dense == pytest.approx(machine.dense, rel=0.05)
    tokens = np.geomspace(2, 4000, 40)
    assert [model.base(n) for n in tokens] == pytest.approx([machine.base(n) for n in tokens], rel=0.03)
    assert fit.held_out is not None
    assert fit.held_out.p95 < 0.01
    assert (fit.doubts, fit.unidentified) == ((), ("launch",))


@pytest.mark.slow
def test_coefficients_lie_within_their_standard_errors() -> None:
    found: list[float] = []
    for machine, num in ((TWO, 200), (GRAPHS, 200)):
        for seed in range(10):
            model, fit = fit_latency(run(machine, shapes(num, seed), seed), graph_tokens=machine.graph_tokens)
            errors = fit.standard_errors or {}
            found += [(getattr(model, name) - getattr(machine, name)) / errors[name] for name in TERMS]
    every = np.abs(found)
    # 95 % of normal scores lie within 1.96, 68 % within 1. A table of many knots states its terms' errors too large.
    assert np.mean(every < 1.96) >= 0.95
    assert 0.68 <= np.mean(every < 1.0) <= 0.95
    assert every.max() < 5.0


def test_a_launch_floor_is_told_from_the_device() -> None:
    model, fit = fit_latency(run(EAGER, shapes(200, 3), 3))
    errors = fit.standard_errors or {}
    assert abs(model.launch - EAGER.launch) < 4 * errors["launch"] < 0.01 * EAGER.launch
    assert model.slope == pytest.approx(EAGER.slope, rel=0.05)
    assert fit.doubts == ()
    assert fit.held_out is not None
    assert fit.held_out.median < 0.025


def test_captured_steps_say_nothing_of_a_launch() -> None:
    decode = [f for f in shapes(200, 11) if f.prefill_tokens == 0]
    # Of an eager machine, whose small steps all wait for their launch: taken for captured, they are memory-bound.
    taken = run(EAGER, decode, 11)
    model, fit = fit_latency(taken, graph_tokens=8192)
    assert "launch" in fit.unidentified
    assert model.launch == 0.0
    assert model.knots[0][1] == pytest.approx(EAGER.launch, rel=0.1)
    eager, _ = fit_latency(taken)
    assert eager.launch == pytest.approx(EAGER.launch, rel=0.02)


def test_the_domain_is_of_what_was_computed() -> None:
    decode = [Features(t, 100 * t, 100, t, t, 1, 0) for t in range(3, 301, 9)]
    captured, fit = fit_latency(run(THREE, decode, 12), graph_tokens=512)
    assert (captured.graph_tokens, fit.domain) == (512, (4.0, 512.0))


def test_what_only_the_floor_hid_is_not_invented() -> None:
    # Fewer rows are sampled than computed only in steps that wait for their launch.
    slow = [Features(t, t * c, c * t // 32, t, t, t // 32, 0) for t in range(1024, 8192, 256) for c in (100, 3000)]
    hidden = [
        Features(32 * b, 32 * b * c, b * c, 32 * b, s * b, b, 0)
        for b in (1, 2, 3)
        for c in (100, 3000)
        for s in (8, 16, 32)
    ]
    model, fit = fit_latency(run(EAGER, slow + hidden, 4))
    assert model.launch == pytest.approx(EAGER.launch, rel=0.02)
    assert "sample" in fit.unidentified
    assert model.sample == 0.0
    assert "sample" not in (fit.standard_errors or {})


def test_a_feature_that_did_not_vary_is_said() -> None:
    # Whole blocks of 32 at one context: tokens say all there is to say.
    same = [Features(32 * b, 32 * b * 500, 500 * b, 32 * b, 32 * b, b, 0) for b in range(1, 101)]
    model, fit = fit_latency(run(THREE, same, 5, noise=0.01, timed=False))
    assert fit.unidentified == ("attention", "kv_read", "head", "sample", "host_request", "host_step", "launch")
    assert (model.attention, model.head, model.host_request, model.host_step) == (0.0, 0.0, 0.0, 0.0)
    assert fit.doubts == ()
    # With the device's time known the host's terms are told apart after all: the batch grows, the forwards do not.
    model, fit = fit_latency(run(THREE, same, 5, noise=0.01))
    assert fit.unidentified == ("attention", "kv_read", "head", "sample", "sequence", "launch")
    assert model.host_step == pytest.approx(THREE.host_step, rel=0.02)
    assert model.host_request == pytest.approx(THREE.host_request, rel=0.02)


def test_latency_never_falls_with_tokens() -> None:
    falling = [Features(t, 0, 0, t, t, 8, 0) for t in range(8, 808, 8)]
    model, _ = fit_latency(samples(falling, [0.02 - 1e-5 * f.tokens for f in falling]))
    heights = [y for _, y in model.knots]
    assert heights == sorted(heights)
    assert model.slope == pytest.approx(0.0, abs=1e-12)


def test_a_point_is_the_median_of_its_repeats() -> None:
    one, other = Features(32, 0, 32, 32, 32, 1, 0), Features(16, 0, 32, 32, 32, 1, 0)
    found = points(samples([one, other, one, one], [0.1, 0.2, 0.9, 0.12], [0.1, 0.1, 0.3, 0.2]))
    assert found.column("tokens").tolist() == [16.0, 32.0]
    assert (found.latency.tolist(), found.device.tolist()) == ([0.2, 0.12], [0.1, 0.2])


def test_held_out_points_take_no_part_in_the_fit() -> None:
    taken = run(TWO, shapes(100, 6), 6)
    judge = split(points(taken))
    assert judge.sum() == 20
    clean, factor = points(taken), np.where(judge, 1.5, 1.0)
    model, fit = fit_latency(samples(clean.features, clean.latency * factor, clean.device * factor))
    assert model == fit_latency(samples(clean.features, clean.latency, clean.device))[0]
    assert fit.held_out is not None
    assert fit.held_out.median == pytest.approx(1 / 3, abs=0.02)  # 1 / 1.5 is a third too little
    assert fit.doubts == (
        f"held-out error: steps of every kind are off, by {fit.held_out.median:.1%} in the median and "
        f"{fit.held_out.p95:.1%} at the 95th percentile, expected at most 5% and 20%",
    )


def test_a_kind_of_steps_that_is_off_is_doubted_and_the_others_are_not() -> None:
    taken = run(TWO, shapes(200, 6), 6, noise=0.0)
    decode = taken.column("prefill_tokens") == 0
    judge = split(points(taken))[taken.group]  # no point has repeats
    slower = 1.0 + 0.1 * (judge & decode & (taken.column("tokens") > 256))
    fit = slowed(taken, slower)
    off = {error.kind: error for error in fit.judged_by}
    above = off.pop("decode steps above 256 tokens (more than 8 sequences)")
    assert (fit.doubts, above.doubted, {error.doubted for error in off.values()}) == ((), True, {False})
    assert (above.median, above.by_time) == pytest.approx((-1 / 11, -1 / 11), abs=1e-3)
    assert above.off == "9 % too fast"


def slowed(taken: Samples, factor: Floats) -> Fit:
    """The fit to these steps, each of which took `factor` times as long."""
    return fit_latency(samples(taken.features, taken.latency * factor, taken.device * factor))[1]


def test_too_few_points_are_refused() -> None:
    assert fit_latency(run(TWO, shapes(14, 9), 9))[1].doubts[0].startswith("too few points:")
    with pytest.raises(ProfileError, match="3 step shapes were measured to fit to, expected at least 4"):
        fit_latency(run(TWO, shapes(3, 9), 9))


def test_a_step_that_took_no_time_is_refused() -> None:
    with pytest.raises(ProfileError, match=r"step 1: latency is 0 s, expected more than 0"):
        samples(shapes(2, 1), [0.1, 0.0])
    assert "2 steps have 1 latencies and 1 device times" in refusal(ProfileError, lambda: samples(shapes(2, 1), [0.1]))


KNOWN = LatencyModel(((32.0, 0.005), (512.0, 0.012)), 3e-5, attention=1e-9, host_step=1e-3, host_request=4e-4)
STEPS = [
    Features(width * rows, width * rows * keys, rows * keys, 0, 0, rows, 0)
    for width in (4, 16, 32) for rows in (1, 2, 4, 8, 16, 32) for keys in (100, 400, 1600, 3000)
]  # fmt: skip


def test_only_a_log_with_the_device_s_times_tells_a_row_s_host_time_from_its_device_time() -> None:
    latency = [KNOWN.step(step) for step in STEPS]
    device = [replace(KNOWN, host_step=0.0, host_request=0.0).step(step) for step in STEPS]
    model, _ = fit_latency(samples(STEPS, latency))
    assert model.host_request == pytest.approx(4e-4, rel=0.05)
    model, _ = fit_latency(samples(STEPS, latency, device))
    assert (model.host_step, model.host_request) == pytest.approx((1e-3, 4e-4), rel=1e-3)
