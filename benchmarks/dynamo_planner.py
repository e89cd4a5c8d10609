"""Compare dsim's Dynamo scalers with Dynamo's planner code, given the same observations.

    pip install msgspec filterpy scikit-learn; pip download --no-deps ai-dynamo==1.6.1; unzip ai_dynamo-*.whl -d DIR
    python -m dsim.benchmarks.dynamo_planner DIR

The files with the formulas run unchanged: engine_query.py and agg.py of planner/core/perf_model, budget.py and
load/predictors.py of planner/core. Empty modules replace imports that no formula uses, and a linear model the step
times of the compiled AISimulate core.
"""

import importlib.util
import logging
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np

from dsim.sim.scalers.dynamo_capacity import Work, capacity, within_budget
from dsim.sim.scalers.perf_model import PerfModel
from dsim.sim.scalers.predictors import Kalman
from dsim.sim.scalers.scaler import PoolView

EMPTY = (
    "dynamo.runtime", "dynamo.runtime.logging", "dynamo.planner.config", "dynamo.planner.config.planner_config",
    "dynamo.planner.errors", "pmdarima", "prophet", "aisimulate_core", "aisimulate_core.sdk",
)  # fmt: skip


class Anything(types.ModuleType):
    """Has a class of every name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": lambda self, *args, **more: None, "__call__": lambda *args: None})


def load(folder: Path, name: str) -> Any:
    """A file of Dynamo as a module, without its packages."""
    path = folder / (name.replace(".", "/") + ".py")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def planner(folder: Path) -> dict[str, Any]:
    """The modules with formulas."""
    logging.disable(logging.WARNING)
    for name in ("dynamo", "dynamo.common", "dynamo.planner", "dynamo.planner.core", "dynamo.planner.core.perf_model",
                 "dynamo.planner.core.load"):  # fmt: skip
        sys.modules[name] = types.ModuleType(name)
    for name in EMPTY:
        sys.modules[name] = Anything(name)
    sys.modules["dynamo.runtime.logging"].__dict__["configure_dynamo_logging"] = lambda: None
    core = "dynamo.planner.core."
    load(folder, "dynamo.common.forward_pass_metrics")
    load(folder, core + "perf_model.base")
    names = ("perf_model.engine_query", "perf_model.agg", "budget", "load.predictors")
    return {name: load(folder, core + name) for name in names}


def compare(folder: Path, seed: int = 0, cases: int = 300) -> dict[str, tuple[int, float]]:
    """By formula: cases, and the largest relative difference."""
    dynamo, random = planner(folder), np.random.default_rng(seed)
    found: dict[str, list[float]] = {"capacity": [], "step time": [], "ttft": [], "kalman": [], "budget": []}

    def differ(name: str, ours: float, theirs: float) -> None:
        both_unknown = ours != ours and theirs != theirs
        found[name].append(0.0 if both_unknown else abs(ours - theirs) / max(abs(theirs), 1e-12))

    for _ in range(cases):
        a, b, c = random.uniform(0.002, 0.05), random.uniform(1e-6, 1e-4), random.uniform(1e-8, 1e-6)
        work = Work(int(random.integers(8, 6000)), int(random.integers(8, 2000)), float(random.uniform(0, 1)))
        most, rows, pages = (int(random.integers(*ends)) for ends in ((512, 16384), (4, 400), (500, 9000)))
        ttft, itl, accepted = random.uniform(0.05, 2), random.uniform(0.005, 0.2), float(random.uniform(0.5, 6))
        role = str(random.choice(["both", "prefill", "decode"]))
        differ("capacity", *_capacities(dynamo, (a, b, c), work, (most, rows, pages), (ttft, itl, accepted), role))
        for name, pair in _step_times(dynamo, random, (a, b, c), most, work.hit_rate).items():
            differ(name, *pair)
        differ("kalman", *_kalman(dynamo, random))
        targets, gpus = random.integers(1, 40, 2), random.integers(1, 5, 2)
        budget = int(random.integers(int(gpus.sum()), 60))
        pools = [PoolView(str(i), 1, *[0] * 6, 1, 0, 0, gpus=int(count)) for i, count in enumerate(gpus)]
        ours = within_budget(targets.tolist(), pools, budget, 1)
        theirs = dynamo["budget"].proportional_clamp_pair(*targets.tolist(), *gpus.tolist(), -1, budget, 1)
        differ("budget", float(ours != list(theirs)) + 1, 1.0)
    return {name: (len(values), max(values)) for name, values in found.items()}


def _capacities(
    dynamo: dict[str, Any], times: tuple[float, float, float], work: Work, limits: tuple[int, int, int],
    slas: tuple[float, float, float], role: str,
) -> tuple[float, float]:  # fmt: skip
    query = dynamo["perf_model.engine_query"]
    a, b, c = times
    most, rows, pages = limits
    ttft, itl, accepted = slas

    class Linear:
        def estimate_forward_pass_time_ms(self, ranks: list[dict[str, Any]]) -> float:
            sched = ranks[0]["scheduled_requests"]
            return 1e3 * (a + b * sched["sum_prefill_tokens"] + c * sched["sum_decode_kv_tokens"])

    model = object.__new__(query.AISCoreEnginePerfModel)
    model._model, model._attention_dp_size = Linear(), 1
    model._worker_type = "aggregated" if role == "both" else role
    model._limits = query.EnginePerfLimits(most, rows, pages * 16)
    model._load_averages = None
    asked = query.EngineCapacityRequest(
        isl=work.prompt, osl=work.answer, kv_hit_rate=work.hit_rate, accept_length=accepted,
        ttft_sla_s=None if role == "decode" else ttft, itl_sla_s=None if role == "prefill" else itl,
        optimization_target=query.OptimizationTarget.THROUGHPUT,
    )  # fmt: skip
    theirs = model.find_engine_capacity_rps(asked)
    ours = PerfModel()
    ours._fit = times
    pool = PoolView(
        "pool", 1, *[0] * 6, pages, 0, 0, page_size=16, max_batch=rows, max_prefill=most, role=role,
        tokens_per_forward=accepted,
    )  # fmt: skip
    return capacity(ours, pool, work, ttft, itl), float("nan") if theirs is None else theirs.rps


def _step_times(
    dynamo: dict[str, Any], random: Any, times: tuple[float, float, float], most: int, hits: float
) -> dict[str, tuple[float, float]]:  # fmt: skip
    """A regression on noisy samples, and its time to a first token."""
    metrics = sys.modules["dynamo.common.forward_pass_metrics"]
    theirs = dynamo["perf_model.agg"].AggRegressionModel(64)
    ours = PerfModel()
    for _ in range(60):
        prompts, kv = int(random.integers(1, 4000)), int(random.integers(1, 200_000))
        took = float((times[0] + times[1] * prompts + times[2] * kv) * random.uniform(0.9, 1.1))
        ours.add((prompts, kv, took))
        ours._prompts.append(prompts / 2)
        scheduled = metrics.ScheduledRequestMetrics(
            num_prefill_requests=2, sum_prefill_tokens=prompts, num_decode_requests=1, sum_decode_kv_tokens=kv
        )
        theirs.add_observation(metrics.ForwardPassMetrics(wall_time=took, scheduled_requests=scheduled))
    asked = (int(random.integers(0, 9000)), most, int(random.integers(1, 90_000)))
    queued, _, kv = asked
    known = theirs.estimate_next_ttft(queued, most, kv, hits)
    nan = float("nan")
    return {
        "ttft": (ours.ttft(queued, kv, most, hits), nan if known is None else known),
        "step time": (ours.time(500, 5e4), theirs._predict_2d(500, 5e4) if known is not None else nan),
    }


def _kalman(dynamo: dict[str, Any], random: Any) -> tuple[float, float]:
    config = types.SimpleNamespace(
        load_predictor_log1p=False, kalman_q_level=1.0, kalman_q_trend=0.1, kalman_r=10.0, kalman_min_points=5
    )
    theirs, ours = dynamo["load.predictors"].KalmanPredictor(config), Kalman()
    forecasts = (0.0, 0.0)
    for value in [0.0, 0.0, *random.uniform(0, 500, int(random.integers(1, 40)))]:
        theirs.add_data_point(float(value))
        ours.add(float(value))
        forecasts = ours.next(), theirs.predict_next()
    return forecasts


if __name__ == "__main__":
    for formula, (count, worst) in compare(Path(sys.argv[1])).items():
        print(f"{formula:10} {count} cases, largest relative difference {worst:.2g}")
