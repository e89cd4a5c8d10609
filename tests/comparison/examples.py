"""A comparison and a validation of made-up numbers."""

from dsim.comparison.bounds import DISTRIBUTIONS, Judged
from dsim.comparison.comparison import Comparison, MetricErrors, PolicyErrors, Total
from dsim.comparison.deviation import Errors
from dsim.comparison.error_parts import MetricParts, Parts
from dsim.comparison.pairs import Pair, Side
from dsim.comparison.steps import Steps
from dsim.planner.validation import Cell, Validated
from dsim.results.metrics import STATS

ERRORS = Errors(num=40, num_missing=0, num_zero=0, mape=0.03, median=0.02, p95=0.08, bias=-0.01)


def side(driver: str) -> Side:
    return Side(
        folder=f"runs/{driver}", driver=driver, device="toy", model="toy", profile="toy", estimated=driver == "twin",
        doubts=(), commits="twin", interrupted=False,
    )  # fmt: skip


def metric(requests: Errors | None) -> MetricErrors:
    return MetricErrors(
        unit="ms", predicted=dict.fromkeys(STATS, 98.0), measured=dict.fromkeys(STATS, 100.0),
        error=dict.fromkeys(STATS, -0.02), requests=requests,
    )  # fmt: skip


def cell(policy: str, unpaired: str = "") -> PolicyErrors:
    part = MetricParts(num=40, measured=0.1, error=-0.002, latency=-0.001, commits=-0.001, scheduling=0.0, frontend=0.0)
    counted = {"latency_steps": 9, "latency_nearest": 1, "commit_rows": 9, "commit_forced": 0, "commit_masks": 36}
    return PolicyErrors(
        pair=0, policy=policy, unpaired=unpaired, num_both=40,
        left_out={"not completed in both": 0, "not arrived in both": 0},
        metrics={name: metric(None if unpaired else ERRORS) for name in DISTRIBUTIONS},
        totals={"completed": Total("requests", 40, 40, 0.0)},
        steps=Steps(num_same=5, num_measured=18, same=False, decode=ERRORS, prefill=ERRORS),
        parts=Parts(metrics={"e2el": part}, **counted, commit_unknown=2), no_parts="",
    )  # fmt: skip


def comparison() -> Comparison:
    return Comparison(
        pairs=(Pair(side("twin"), side("live")),),
        cells=(cell("chunk:8"), cell("ar", unpaired="the weights decided the commits of runs/live")),
        overall={"e2el": ERRORS},
        bounds=(Judged(bound="e2el=1%", cell="chunk:8", value=0.03, limit=0.01, met=False),),
        notes=("a note",),
    )


def validated() -> Validated:
    measured = Cell("chunk:8", load="0.5", concurrency=None, rate=1.5, num_requests=30, again=True)
    return Validated(
        capacities={"chunk:8": 3.0}, cells=(measured,), unmeasured=(), comparison=comparison(), noise=comparison()
    )
