"""A profile survives its file byte for byte, and a bad file is refused in one line that says both values."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsim.engine.commits import ImportanceDeltas
from dsim.engine.errors import DsimError, ProfileError
from dsim.profiler.profile import DEFAULT, SHIPPED, CommitFit, MemoryModel, Prediction, load, save, shipped, to_json
from dsim.research.calibration import profiles as shipped_profiles

from ..worlds import refusal


@pytest.fixture(scope="module")
def good() -> dict[str, Any]:
    data = to_json(load(DEFAULT))
    assert isinstance(data, dict)
    return data


def refused(tmp_path: Path, data: object) -> str:
    path = tmp_path / "p.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return refusal(ProfileError, load, path).replace(str(path), "p.json")


def test_a_profile_survives_its_file_and_a_measured_one_keeps_how_it_was_judged(tmp_path: Path) -> None:
    known = load(DEFAULT)
    model = known.commits[0]
    judged = CommitFit(
        model.workload, 32, 0.9, model.temperature, 90, 4000, 30, {"step_spread": 0.1},
        (Prediction("tokens per step", 4.0, 4.1),), ("too few requests",),
    )  # fmt: skip
    measured = replace(
        known,
        origin="measured",
        fit=replace(
            known.fit, num_points=120, standard_errors={"slope": 1e-7}, held_out=load("h100-sdar-8b/dsim").fit.held_out,
            unidentified=("launch",), doubts=("noise",),
        ),
        provenance=replace(
            known.provenance, clocks="1980 MHz", prompts="p.txt", settings={"dtype": "bf16", "graphs": True, "page": 64}
        ),
        commit_fits=(judged,),
        focus=ImportanceDeltas(1.5, 0.5, -0.5, 0.4),
    )  # fmt: skip
    for profile in (load("a100-llada2-mini"), load("h200-sdar-8b"), measured):
        save(profile, tmp_path / "a.json", force=True)
        again = load(tmp_path / "a.json")
        save(again, tmp_path / "b.json", force=True)
        assert again == profile
        assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.json", "b.json"]
    assert (measured.is_estimate, measured.verdict) == (False, "measured")
    assert again.commit_fit(model) == judged
    assert again.commit_fit(model.for_block(16)) == judged
    assert again.commit_fit(known.commits[1]) is None
    assert judged.predictions[0].error == pytest.approx(0.025)


def test_the_shipped_files_are_what_the_script_writes(tmp_path: Path) -> None:
    shipped_profiles.main(tmp_path)
    derived = {p.name: p.read_bytes() for p in SHIPPED.iterdir() if load(p).origin != "measured"}
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == derived


def test_shipped_profiles_say_whether_they_are_estimates() -> None:
    held = shipped()
    first, *others = held
    assert (first, others) == (DEFAULT, sorted(others))
    for name, line in held.items():
        said = "(measured)" if load(name).origin == "measured" else "(estimated, not measured)"
        assert "\n" not in line
        assert line.endswith(said)
    assert {load(name).name for name in held} == set(held)


def test_an_existing_file_is_kept_unless_forced(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text("mine")
    assert "exists: choose another name, or pass --force" in refusal(DsimError, lambda: save(load(DEFAULT), path))
    assert path.read_text() == "mine"
    with pytest.raises(DsimError, match="cannot be written: No such file or directory"):
        save(load(DEFAULT), tmp_path / "none" / "p.json")


def test_what_could_not_be_loaded_is_not_saved(tmp_path: Path) -> None:
    profile = load(DEFAULT)
    broken = replace(profile, latency=replace(profile.latency, slope=-1.0))
    assert "latency.slope is -1.0, expected at least 0" in refusal(ProfileError, save, broken, tmp_path / "p.json")
    assert not list(tmp_path.iterdir())


def test_an_unknown_name_lists_the_shipped_ones(tmp_path: Path) -> None:
    assert refusal(ProfileError, load, "a100-sdar-9b").startswith(
        "no profile file or shipped profile is named a100-sdar-9b (did you mean a100-sdar-8b?); shipped: a100-sdar-8b, "
    )


def overhead(*phases: str, cache: str = "MaskKV") -> list[dict[str, Any]]:
    return [{"cache": cache, "phase": phase, "row": 0, "token": 0} for phase in phases]


KNOTS, CACHES = ("latency", "knots"), ("latency", "cache_overhead")
BAD = [
    (("schema",), "x", "schema is 'x', expected 'dsim-profile'"),
    (("version",), "1", 'version is "1", expected 1'),
    (("version",), 2, "version is 2, expected 1"),
    (CACHES, overhead("full", cache="Ours"), 'cache_overhead[0] is "Ours full", expected a cache of NoCache'),
    (CACHES, overhead("fill"), 'cache_overhead[0] is "MaskKV fill", expected a cache of'),
    (("device", "count"), 0, "device.count is 0, expected at least 1"),
    (("model", "experts"), {}, "model.experts.num is missing, expected keys num, top_k, shared, ffn, dense_layers"),
    (
        ("model", "experts"),
        {"num": 8, "top_k": 2, "shared": 0, "ffn": 4, "dense_layers": 0, "by_block": {"experts": 1, "block_length": 4}},
        "model.experts.by_block.experts is 1, expected from top_k, 2, to num, 8",
    ),
    (("model", "layers"), 10**400, "model.layers is 1" + "0" * 76 + "..., expected at most 9223372036854775807"),
    (KNOTS, [], "latency.knots is a list of 0, expected at least one knot"),
    ((*KNOTS, 1), [1, 1.0], "latency.knots[1][0] is 1.0, expected above the knot before, 1 tokens"),
    ((*KNOTS, 1), [9, 0.001], "latency.knots[1][1] is 0.001, expected at least the knot before, 0.00927956 s"),
    (("fit", "domain"), [5, 1], "fit.domain[1] is 1.0, expected at least domain[0], 5"),
    (("latency", "layers"), 36, "latency.layers is unknown"),
    (("commits", 0, "pass_probability"), [0.5], "commits[0].pass_probability is a list of 1, expected 32 values"),
    (("provenance", "settings"), {"p": []}, "provenance.settings.p is a list of 0, expected a text, a whole number"),
]


@pytest.mark.parametrize(
    ("where", "value", "message"), BAD, ids=[".".join(map(str, w)) + f"-{i}" for i, (w, _, _) in enumerate(BAD)]
)
def test_a_bad_value_is_named_with_its_key(
    tmp_path: Path, good: dict[str, Any], where: tuple[Any, ...], value: object, message: str
) -> None:
    data = copy.deepcopy(good)
    at: Any = data
    for key in where[:-1]:
        at = at[key]
    at[where[-1]] = value
    assert message in refused(tmp_path, data)


def test_what_is_not_json_is_refused(tmp_path: Path) -> None:
    assert refused(tmp_path, '{"a": ').startswith("p.json: cannot be read as JSON: ")


def test_pages_are_what_is_left_after_weights_and_runtime() -> None:
    memory = MemoryModel(1_000_000, 200_000, 100, vocab=10)
    # (1,000,000 - 200,000 - (1000 + 2 * 5) * 10 * 2) * 0.8 / (16 * 100) = 389.9, one of them for dummies
    assert memory.fit(16, 5, 1000) == (388, 1000)
    assert replace(memory, fixed_num_pages=7).num_pages(16, 5, 1000) == 7


def test_the_prefill_budget_is_halved_until_16_pages_fit() -> None:
    memory = MemoryModel(1_000_000, 200_000, 100, vocab=10)
    # 64,000 and 40,000 tokens of runtime leave less than nothing and 0 pages, 32,000 leave 79.
    assert memory.fit(16, 5, 64_000) == (78, 32_000)
    with pytest.raises(ProfileError, match=r"the weights take 0.000999 GB, .*, which leaves no room"):
        replace(memory, weight_bytes=999_000).num_pages(16, 5, 64_000)


def test_a_run_asks_for_a_workload_that_the_profile_holds() -> None:
    profile = load(DEFAULT)
    assert profile.workloads[0] == "sharegpt-focus"
    assert profile.commit_model(None, 32, 0.9).workload == "sharegpt-focus"
    assert profile.commit_model("gsm8k", 16, 0.9).extrapolated_from == 32
    with pytest.raises(ProfileError, match=r"commit models of threshold 0\.9; this run asks for 0\.7"):
        profile.commit_model("sharegpt", 32, 0.7)
    assert (profile.default_max_batch, load("h200-sdar-8b").default_max_batch) == (384, 1024)


def test_a_profile_without_canvases_names_the_shipped_ones_that_have_them() -> None:
    with pytest.raises(
        ProfileError, match=r"\(canvas_laws is empty\).* or shipped: h100-diffusiongemma-fp8, .*h200x2-diffusiongemma$"
    ):
        load("a100-sdar-8b").canvas_law(None, 256)
