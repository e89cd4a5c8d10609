"""dsim compare next to Dynamo's regression, on a load generator's files drawn from a known law."""

import json
from pathlib import Path

import numpy as np
import pytest

from .command import dsim, succeed

PER_BLOCK, PER_TOKEN, CONSTANT = 0.05, 2e-5, 0.3  # s, s a token in flight, s


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two loads: a trace of each, the client's file of it by the regression's own law, and the twin's run of it."""
    folder = tmp_path_factory.mktemp("drawn")
    for name, gap in (("light", 3.0), ("heavy", 0.4)):
        rng = np.random.default_rng(len(name))
        arrival = np.cumsum(np.round(rng.exponential(gap, 60), 3))
        prompt, answer = rng.integers(20, 900, 60), rng.integers(5, 300, 60)
        e2el = np.ones(60)
        for _ in range(200):  # how many are in flight follows from how long each takes
            e2el = (
                PER_BLOCK * -(-answer // 8) + PER_TOKEN * _in_flight(arrival, e2el) * (prompt + answer / 2) + CONSTANT
            )
        rows = zip((1000 * arrival).round().astype(int).tolist(), prompt.tolist(), answer.tolist(), strict=True)
        lines = [json.dumps({"timestamp": t, "input_length": i, "output_length": o}) for t, i, o in rows]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
        client = {
            "total_output_tokens": int(answer.sum()), "model_id": "toy", "input_lens": prompt.tolist(),
            "output_lens": answer.tolist(),
            "latencies": e2el.tolist(), "ttfts": (e2el / 2).tolist(), "itls": [[t / 2] for t in e2el.tolist()],
            "start_times": arrival.tolist(), "errors": [""] * 60, "duration": float((arrival + e2el).max()),
            "completed": 60, "failed": 0, "num_prompts": 60, "date": "20261125-000000",
        }  # fmt: skip
        (folder / f"{name}.json").write_text(json.dumps(client))
        trace = folder / f"{name}.jsonl"
        succeed("replay", trace, "--policy", "chunk:2,block_length=8", "-o", folder / name)
    return folder


def _in_flight(arrival: np.ndarray, e2el: np.ndarray) -> np.ndarray:
    """The mean number of requests in flight over each request's stay, pair by pair."""
    ends = arrival + e2el
    common = np.minimum(ends[:, None], ends) - np.maximum(arrival[:, None], arrival)
    return np.maximum(common, 0.0).sum(axis=1) / e2el


def test_on_one_run_the_regression_recovers_its_law_and_says_that_it_is_flattered(drawn: Path) -> None:
    heavy = drawn / "heavy"
    (cell,) = dsim("compare", heavy, drawn / "heavy.json", "--json").json["cells"]
    found = cell["baseline"]
    assert (found["block"], found["in_sample"], found["pairs"]) == (8, True, [0])
    assert [found[key] for key in ("per_block", "per_token", "constant")] == pytest.approx(
        [PER_BLOCK, PER_TOKEN, CONSTANT], rel=1e-6
    )
    assert found["requests"]["mape"] == pytest.approx(0, abs=1e-6)
    assert found["twin"] == cell["metrics"]["e2el"]["requests"]
    text = dsim("compare", heavy, drawn / "heavy.json").out
    assert "e2el = 50.0 ms x ceil(O / 8)" in text
    assert "which flatters it" in text


def test_with_two_runs_each_is_judged_by_the_fit_to_the_other(drawn: Path) -> None:
    sides = [side for name in ("light", "heavy") for side in (drawn / name, drawn / f"{name}.json")]
    ran = dsim("compare", *sides, "--json", "-o", "both")
    found = [cell["baseline"] for cell in ran.json["cells"]]
    assert [(f["in_sample"], f["pairs"]) for f in found] == [(False, [1]), (False, [0])]
    assert max(f["requests"]["mape"] for f in found) < 1e-6
    assert "fitted to the measured run of pair 2" in Path("both/report.html").read_text()


def test_a_run_of_the_twin_has_no_baseline(drawn: Path) -> None:
    heavy = drawn / "heavy"
    (cell,) = dsim("compare", heavy, heavy, "--json").json["cells"]
    assert cell["baseline"] is None
    assert "Regression" not in dsim("compare", heavy, heavy).out
