"""Quality is what papers or users measured: looked up, interpolated between settings, never extrapolated or guessed."""

from pathlib import Path

import pytest

from dsim.engine.allowed_code import allowed
from dsim.engine.spec import parse
from dsim.planner.quality import load_table, parse_share, published, quality_of

from ..checks import cases, refused

MODEL = "SDAR-8B"
# Mean over GSM8K, Math500, HumanEval, MBPP, IFEval; the printed rows of FOCUS.
BASE = (89.20 + 64.70 + 69.82 + 56.81 + 57.45) / 5
CONF_8 = (87.57 + 59.30 + 65.85 + 50.78 + 58.69) / 5
CONF_7 = (84.65 + 54.60 + 59.76 + 50.58 + 58.47) / 5
DELAYED = (84.92 + 59.20 + 64.33 + 49.81 + 57.94) / 5
NEIGHBOUR = (88.02 + 63.70 + 69.21 + 52.14 + 55.15) / 5


def table(text: str) -> Path:
    path = Path("mine.csv")
    path.write_text(text)
    return path


@cases(
    "spec model expected",
    ("lmdeploy-bd32,threshold=0.8", MODEL, CONF_8 / BASE), ("lmdeploy-bd32,threshold=0.7", MODEL, CONF_7 / BASE),
    ("delayed-cache", MODEL, DELAYED / BASE), ("delayed-cache-plus", MODEL, NEIGHBOUR / BASE),
    # 90.15, 64.30, 69.51, 61.09 and 60.87.
    ("focus", MODEL, 345.92 / 5 / BASE), ("focus:1.5", MODEL, 345.92 / 5 / BASE),
    # The full cache is its own reference on any model; of full sequences, what computes everything every step.
    ("lmdeploy-bd32", MODEL, 1.0), ("lmdeploy-bd32", "LLaDA2.0-mini", 1.0),
    ("vanilla", "LLaDA-8B", 1.0), ("vanilla,logits=block", "LLaDA-8B", 1.0), ("vanilla:4", "LLaDA-8B", 1.0),
    ("sparse-dllm:0.5", "LLaDA-8B", 77.56 / 78.39), ("maskkv:256", "Dream-7B", 30.88 / 32.70),
    # Batching and memory do not change tokens.
    ("lmdeploy-bd32,max_batch=4", MODEL, 1.0), ("lmdeploy-bd32,max_prefill_tokens=512", MODEL, 1.0),
    ("lmdeploy-bd32,num_loops=7", MODEL, 1.0), ("lmdeploy-bd32,max_batch=2", MODEL, 1.0),
    ("lmdeploy-bd32,decide_ahead=false", MODEL, 1.0), ("lmdeploy-bd32,page_size=128,num_pages=999", MODEL, 1.0),
    # Between published thresholds on a line.
    ("lmdeploy-bd32,threshold=0.85", MODEL, (CONF_8 + BASE) / 2 / BASE),
    ("lmdeploy-bd32,threshold=0.72", MODEL, (0.8 * CONF_7 + 0.2 * CONF_8) / BASE),
)  # fmt: skip
def test_published_scores_are_looked_up_or_read_on_a_line(spec: str, model: str, expected: float) -> None:
    assert quality_of(parse(spec), model).relative == pytest.approx(expected, rel=1e-12)


def test_a_quality_says_its_source() -> None:
    found = quality_of(parse("delayed-cache"), MODEL)
    assert found.source.startswith("FOCUS")
    assert str(found) == "93.6 %"
    assert quality_of(parse("fast-dllm"), "LLaDA-8B").relative is None


@cases(
    "spec model reason",
    ("delayed-cache,threshold=0.8", MODEL, "threshold is 0.8"),
    ("focus:3", MODEL, "alpha is 3, and scores are published at 1.2, 1.5, 1.8: none is extrapolated"),
    ("lmdeploy-bd32:16", MODEL, "block_length is 16"),
    ("chunk:8", MODEL, "no score is published for chunk on SDAR-8B"),
    ("optimus,num_blocks=2", MODEL, "no score is published for optimus on SDAR-8B"),
    ("ar", MODEL, "another checkpoint"),
    ("lmdeploy-bd32,threshold=0.8", "LLaDA2.0-mini", "on LLaDA2.0-mini"),
)
def test_what_nobody_measured_is_unknown_and_says_why(spec: str, model: str, reason: str) -> None:
    found = quality_of(parse(spec), model)
    assert found.relative is None
    assert reason in found.notes[0]


@cases("file relative", ("examples/policies/dws.py", 1.0), ("benchmarks/policy_in_vllm/policies.py", None))
def test_an_order_of_the_queue_changes_no_answer_and_a_cap_of_steps_may(file: str, relative: float | None) -> None:
    code, name = Path(__file__).parents[2] / file, "STEPS" if relative is None else "POLICY"
    policy = parse(f"vllm-diffusion,discipline={code}:{name}", allowed([code]))
    assert quality_of(policy, "DiffusionGemma-26B-A4B").relative == relative


def test_every_published_table_is_shipped() -> None:
    scores = published().scores
    by_system = {s.system: [t for t in scores if t.system == s.system] for s in scores}
    sizes = {name: len(rows) for name, rows in by_system.items()}
    assert sizes == {
        "SDAR": 15, "FOCUS": 35, "Delayed cache": 5, "Delayed cache, neighbour-aware": 5,
        "Sparse-dLLM": 27, "MaskKV": 12,
    }  # fmt: skip
    [row] = [s for s in by_system["Sparse-dLLM"] if s.parameters == {"retention": "0.1", "pool_width": "5"}]
    assert (row.score, row.baseline) == (52.77, 78.39)
    [row] = [s for s in by_system["MaskKV"] if s.model == "Dream-7B" and s.parameters == {"budget": "64"}]
    assert (row.score, row.baseline) == (28.85, 32.70)
    assert all(s.source for s in scores)


def test_a_users_table_replaces_the_published_ones() -> None:
    mine = load_table(table("policy,threshold,score,baseline\nlmdeploy-bd32,0.9,80,80\nlmdeploy-bd32,0.5,60,80\n"))
    assert quality_of(parse("lmdeploy-bd32,threshold=0.5"), MODEL, mine).relative == 0.75
    assert quality_of(parse("lmdeploy-bd32,threshold=0.7"), MODEL, mine).relative == pytest.approx(70 / 80)
    assert quality_of(parse("delayed-cache"), MODEL, mine).relative is None


def test_a_users_table_tells_the_quality_of_any_field() -> None:
    text = "policy,chunk,max_chunk,num_blocks,score,baseline\nchunk,4,,,99,100\nchunk,8,,,97,100\noptimus,,,1,98,100\n"
    mine = load_table(table(text))
    assert quality_of(parse("chunk:8,max_batch=3"), MODEL, mine).relative == 0.97
    assert quality_of(parse("chunk:6"), MODEL, mine).relative == pytest.approx(0.98)
    # A blank cell is any value: num_blocks of a chunk, max_chunk of an elastic one.
    assert quality_of(parse("chunk:8,num_blocks=2"), MODEL, mine).relative == 0.97
    assert quality_of(parse("optimus:16"), MODEL, mine).relative == 0.98
    refused = quality_of(parse("optimus,num_blocks=2"), MODEL, mine)
    assert refused.notes == (f"num_blocks is 2, and no score is in {mine.name} for that on SDAR-8B",)


@cases(
    "text message",
    ("threshold\n0.9\n", "has columns threshold, expected policy, score, baseline"),
    ("policy,treshold,score,baseline\nchunk,0.9,1,1\n", "treshold"),
    ("policy,score,baseline\nchunk,much,1\n", "score is 'much', expected a number above zero"),
    ("policy,score,baseline\noptimos,1,1\n", "no preset is named 'optimos' (did you mean optimus?)"),
)
def test_a_bad_table_is_one_line(text: str, message: str) -> None:
    with refused(says=message):
        load_table(table(text))


def test_a_share_is_a_percentage_or_a_fraction() -> None:
    assert parse_share("98%") == parse_share("0.98") == pytest.approx(0.98)
    for text in ("98", "-1%", "much"):
        with refused(r"expected such as 98% or 0\.98"):
            parse_share(text)
