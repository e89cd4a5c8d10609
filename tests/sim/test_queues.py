"""The twin as a queue, against closed forms: M/D/1, M/M/1, D/D/1, Lindley's recursion, Little's law, routing.

`ar,max_batch=1` with one token to return makes a request one prefill step, so a replica is a single server, first
come first served, whose service time the test sets: a constant, or proportional to the prompt's length.
"""

import dataclasses

import numpy as np
import numpy.typing as npt
import pytest

from dsim.engine.latency import LatencyModel
from dsim.engine.spec import parse
from dsim.profiler.profile import Profile, load
from dsim.results.metrics import summarize
from dsim.sim.setting import Setting
from dsim.sim.twin import RunRecords, simulate
from dsim.traces import Trace, synth

from ..worlds import BLOCK_PRESETS, SECOND, Collector, toy_profile, toy_trace

Floats = npt.NDArray[np.float64]

# Prompts of 10,000 tokens on average are so fine that ceil() to whole tokens adds 0.005 % to the mean service.
TOKENS = 10_000
SERVER = "ar,max_batch=1,num_pages=1000000,max_prefill_tokens=1000000000"


def server(latency: LatencyModel) -> Profile:
    """A profile of that latency alone, with no limit on prompts."""
    profile = load("a100-sdar-8b")
    return dataclasses.replace(
        profile, latency=latency, model=dataclasses.replace(profile.model, context_limit=100_000_000)
    )


PER_TOKEN = server(LatencyModel(((0.0, 0.0),), 1.0 / TOKENS))  # a prompt of TOKENS takes 1 s
CONSTANT = server(SECOND)


def poisson(rate: float, n: int, seed: int, prompts: npt.NDArray[np.int64] | None = None, outputs: int = 1) -> Trace:
    """Poisson arrivals of requests for `outputs` tokens."""
    trace = synth("poisson", rate, lengths="fixed:1,1", num_requests=n, seed=seed)
    given = trace.input_length if prompts is None else prompts
    return dataclasses.replace(trace, input_length=given, output_length=np.full(n, outputs))


def waits(result: RunRecords) -> Floats:
    """Seconds from arrival to the start of service."""
    wait: Floats = result.table["scheduled"] - result.table["arrival"]
    return wait


def lindley(arrival: Floats, service: Floats) -> Floats:
    """Waits of a single server, first come first served: W' = max(0, W + S - gap)."""
    wait = np.zeros(len(arrival))
    for i, gap in enumerate(np.diff(arrival)):
        wait[i + 1] = max(0.0, wait[i] + service[i] - gap)
    return wait


def tolerance(load: float, n: int) -> float:
    """Four relative standard errors of the mean of n waits in M/M/1 (Whitt 1989, "Planning queueing simulations").

    Constant service varies less: from M/M/1 to M/D/1 the error falls at least as much as the mean does.
    """
    asymptotic = load * (2 + 5 * load - 4 * load**2 + load**3) / (1 - load) ** 4
    return 4 * float(np.sqrt(asymptotic / n)) / (load / (1 - load))


SEEDS = [1, 2, 3]
NUM = 4000  # requests, from each seed: the tolerance is 20 % at load 0.5 and 29 % at 0.7, and M/D/1 is half of M/M/1


@pytest.mark.parametrize("load", [0.5, 0.7])
@pytest.mark.parametrize("law", ["constant", "exponential"])
def test_constant_service_waits_as_m_d_1_and_exponential_as_m_m_1(load: float, law: str) -> None:
    exponential, waited = law == "exponential", []
    for seed in SEEDS:
        prompts = np.full(NUM, TOKENS)
        if exponential:
            prompts = np.ceil(np.random.default_rng(100 + seed).exponential(TOKENS, NUM)).astype(np.int64)
        trace = poisson(load, NUM, seed, prompts)
        waited.append(waits(simulate(trace, Setting(parse(SERVER), PER_TOKEN))))
        # A clock of thousands of seconds is exact to 1e-12 s, and a wait sums up to hundreds of its errors.
        assert np.allclose(waited[-1], lindley(trace.arrival, prompts / TOKENS), rtol=0, atol=1e-8)
    wait = np.concatenate(waited)
    expected = load / (1 - load) / (1 if exponential else 2)
    assert wait.mean() == pytest.approx(expected, rel=tolerance(load, len(wait)))
    # P(wait > t) = load * exp(-(1 - load) t): a share `load` waits at all, to 4 standard errors of 0.9 %.
    assert not exponential or (wait > 1e-9).mean() == pytest.approx(load, abs=0.036)


@pytest.mark.parametrize("spec", BLOCK_PRESETS)
def test_the_number_in_the_system_is_rate_times_stay(spec: str) -> None:
    # Little's law holds on any path: L T = sum of stays. The left side is what each step saw, the right the requests'
    # own clocks; both are exact when requests come, and steps of 1 s begin, at whole seconds.
    rng = np.random.default_rng(5)
    n = 60
    arrival = np.cumsum(rng.integers(0, 9, n))
    trace = toy_trace(arrival - arrival[0], rng.integers(1, 60, n), rng.integers(1, 60, n))
    journal = Collector()
    small = ",max_batch=4,num_pages=24,page_size=8" + ("" if spec == "ar" else ",block_length=4")
    result = simulate(trace, Setting(parse(spec + small), toy_profile(latency=SECOND)), append=journal)
    steps, table = journal.steps, result.table
    assert (steps["latency"] == 1.0).all()
    stays = (table["finish"] - table["arrival"]).sum()
    # A frozen group may run on past its last request's end; those steps see no one.
    assert (steps["waiting"] + steps["running"]).sum() == stays
    assert steps["waiting"].max() > 3
    assert result.totals.max_waiting == steps["waiting"].max()


@pytest.mark.parametrize(("load", "stable"), [(0.5, True), (0.9, True), (1.2, False), (1.5, False)])
def test_a_run_above_capacity_is_unstable_and_one_below_is_not(load: float, stable: bool) -> None:
    # One prefill step and four decode steps of 1 s: the server's capacity is 0.2 req/s.
    for seed in SEEDS:
        trace = poisson(load / 5, 600, seed, outputs=5)
        result = simulate(trace, Setting(parse("ar,max_batch=1"), CONSTANT))
        summary = summarize("ar", result.table.columns, result.totals)
        assert summary.stable is stable
        assert summary.completed == 600
        # Above capacity what comes out is the capacity, below it what goes in.
        assert summary.request_throughput == pytest.approx(0.2 if load > 1 else load / 5, rel=4 / 600**0.5)
