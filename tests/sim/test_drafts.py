"""Block drafters of vLLM 0.33: what they plan, accept, cost and hold, and how a plan names them.

The random scenarios of tests/engine/test_oracles.py, recorded in vLLM, hold their schedule.
"""

from dataclasses import replace

import numpy as np
import pytest

from dsim.engine.commits import TokenDraws
from dsim.engine.draw import accept_plan
from dsim.engine.jit import plain
from dsim.engine.latency import Features, LatencyModel
from dsim.engine.spec import parse, to_toml
from dsim.engine.state import Masks
from dsim.planner.candidate import plain_spec
from dsim.planner.deploy import deployment_of
from dsim.planner.settings import settings_to_try
from dsim.planner.space import searchable, space_of
from dsim.profiler.hardware import gpu
from dsim.profiler.models import model
from dsim.profiler.profile import load
from dsim.profiler.roofline import roofline
from dsim.results.world import World as Question
from dsim.sim.setting import Setting
from dsim.sim.unknown import warnings_of

from ..worlds import World, asked

DFLASH, DSPARK = "vllm-ar,drafter=dflash", "vllm-ar,drafter=dspark"
MARGINALS = "0.579/0.447/0.316/0.237/0.158"  # DSpark on DeepSeek-V4-Flash, published with a mean of 2.74
SHEET = roofline(gpu("H100"), model("Qwen3-8B"))


def test_a_drafter_drafts_its_published_block_unless_it_is_told_how_many() -> None:
    specs = (DFLASH, DSPARK, f"{DSPARK},acceptance={MARGINALS}", f"{DFLASH},num_speculative_tokens=0", "vllm-ar")
    assert [parse(spec).width - 1 for spec in specs] == [15, 7, 5, 0, 0]
    numbers = [parse(spec).granularity.numbers(parse(spec)) for spec in specs]
    assert [(n["look_ahead"], n["queries"], n["slots"]) for n in numbers] == [
        (16, 16, 0), (7, 7, 0), (5, 5, 0), (0, 0, 0), (0, 0, 0)
    ]  # fmt: skip


def test_a_step_has_room_for_the_draft_forward_behind_it_which_is_left_out_where_no_draft_is_verified() -> None:
    spec = f"{DFLASH},num_speculative_tokens=2,page_size=4,max_num_batched_tokens=8,async_scheduling=false"
    w = asked(World(spec), (10, 3))
    seen = []
    for text, tokens in {"prefill 0P8/8": [], "prefill 0P2/10": [0], "decode 0D3/13": [0]}.items():
        assert w.plan_tokens() == text
        seen.append((w.plan.pages, w.plan.features.draft_tokens))
        w.commit({0: tokens})
    assert seen == [(3, 0), (4, 3), (4, 3)]  # ceil((8, 10, 13) + 3, 4)
    assert w.plan_tokens() == "decode 0D3/14"
    assert w.plan.features.draft_tokens == 0  # the limit is reached though both drafts be rejected


@pytest.mark.parametrize(("rows", "drafts"), [(1, 2), (2, 1), (8, 0)])
def test_the_more_rows_the_fewer_drafts_are_verified_on_pages_for_all(rows: int, drafts: int) -> None:
    # Expected tokens of a row: 1, 1.5, 1.75; a step of n tokens takes 1 + 0.2 n.
    plans = []
    for is_adaptive in ("true", "false"):
        spec = f"{DSPARK},acceptance=0.5/0.25,async_scheduling=false,adaptive_verification={is_adaptive}"
        w = asked(World(spec, latency=LatencyModel(((0.0, 1.0),), 0.2)), *[(3, 20)] * rows)
        w.step_tokens()
        w.plan_tokens()
        plans.append(w.plan)
    trimmed, whole = plans
    assert (trimmed.num_tokens.tolist(), whole.num_tokens.tolist()) == ([1 + drafts] * rows, [3] * rows)
    assert trimmed.features[:5] == (rows * (1 + drafts), *trimmed.features[1:3], *[rows * (1 + drafts)] * 2)
    assert trimmed.pages == whole.pages


@pytest.mark.parametrize(
    ("acceptance", "given"), [("0.5", (0.5, 0.5, 0.5)), ("0.8/0.4/0.1", (0.8, 0.5, 0.25)), ("0.5/0/0", (0.5, 0, 0))]
)
def test_one_acceptance_is_conditional_and_several_are_marginal(acceptance: str, given: tuple[float, ...]) -> None:
    policy = parse(f"{DSPARK},num_speculative_tokens=3,acceptance={acceptance}")
    assert policy.granularity.acceptances == pytest.approx((1.0, *given))


def test_drawn_steps_accept_what_the_marginals_say() -> None:
    rows = np.arange(3000)
    masks = Masks(*[np.zeros((len(rows), 6))] * 2, np.ones((len(rows), 6), np.bool_), rows, rows, rows % 7)
    acceptances = parse(f"{DSPARK},acceptance={MARGINALS}").granularity.acceptances
    with np.errstate(over="ignore"):  # numbers wrap on purpose
        accepted = plain(accept_plan)(masks, TokenDraws(acceptances, 3).arrays).mean(axis=0)
    assert accepted == pytest.approx([1, 0.579, 0.447, 0.316, 0.237, 0.158], abs=0.027)  # three standard errors
    assert sum(accepted) == pytest.approx(2.74, abs=0.1)


def test_a_draft_forward_costs_its_positions_context_and_serial_head() -> None:
    base = LatencyModel(((0.0, 1.0),), 0.0)
    drafts = replace(
        base, draft_step=0.5, draft_token=0.01, draft_context=1e-3, draft_kv_read=1e-4, draft_serial=0.02
    )  # fmt: skip
    step = Features(40, 4000, 1000, 40, 40, 10, 0)
    assert drafts.step(step) == base.step(step)
    assert drafts.step(step._replace(draft_tokens=40)) == pytest.approx(1 + 0.5 + 0.1 + 0.04 + 0.02 * 4)
    assert drafts.step(step._replace(draft_tokens=80)) == pytest.approx(1 + 0.8 + 0.1 + 0.04 + 0.02 * 8)


def test_a_data_sheet_s_drafter_has_five_layers_of_its_model_and_the_model_s_head() -> None:
    shape, latency, memory = SHEET.model, SHEET.latency, SHEET.memory
    layer = 4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 12288 + 2 * 128 + 2 * 4096
    read = 2 * (5 * layer + 4096 + shape.vocab * 4096)
    assert latency.draft_step == pytest.approx(read / (gpu("H100").bandwidth * gpu("H100").bandwidth_efficiency), 1e-5)
    assert memory.draft_bytes_per_token == 5 * 2 * 2 * 1024
    assert memory.draft_weight_bytes == 2 * (5 * layer + 4096 + 5 * 4096**2)
    assert roofline(gpu("H100"), model("SDAR-8B")).latency.draft_step == 0


def test_a_drafter_s_forward_limits_rows_and_its_keys_take_pages() -> None:
    limits = Setting(parse(f"{DFLASH},max_num_batched_tokens=100"), SHEET).limits
    assert limits.max_batch == 100 // 16
    memory = replace(SHEET.memory, fixed_num_pages=1000, kv_bytes_per_token=300, draft_bytes_per_token=100)
    fixed = replace(SHEET, memory=memory)
    specs = (DFLASH, "vllm-ar", f"{DFLASH},num_speculative_tokens=0", "vllm-ar,drafter=eagle")
    assert [Setting(parse(spec), fixed).limits.num_pages for spec in specs] == [750, 1000, 1000, 1000]


def test_a_plan_tries_blocks_for_a_drafter_alone_and_ends_in_its_flags() -> None:
    check = searchable(SHEET, None)
    tried = settings_to_try(f"{DFLASH},max_num_seqs=64,async_scheduling=true", SHEET, check)
    assert {parse(spec).width - 1 for spec in tried} == {15, 0, 3, 5, 7}
    assert not any("speculative" in spec for spec in settings_to_try("vllm-ar", SHEET, check))
    assert plain_spec("vllm-ar,num_speculative_tokens=3") == "vllm-ar"
    flags = '--speculative-config \'{"method": "dspark", "model": "DRAFT_MODEL", "num_speculative_tokens": 7}\''
    deployed = deployment_of(DSPARK, SHEET)
    assert deployed is not None
    assert flags in deployed.shell
    assert deployed.unset == ("the drafter's checkpoint: replace DRAFT_MODEL by its name or path",)
    without = deployment_of(f"{DSPARK},num_speculative_tokens=0", SHEET)
    assert without is not None
    assert "speculative" not in without.shell


def test_a_space_of_drafters_and_blocks_is_a_grid_and_a_file_keeps_its_marginals() -> None:
    table = {"policy": ["vllm-ar"], "drafter": ["none", "dflash"], "num_speculative_tokens": [0, 3, 7]}
    space = space_of(Question("azure-conv", profile_object=SHEET), table)
    assert space.of("vllm-ar") == {"drafter": ("none", "dflash"), "num_speculative_tokens": (0, 3, 7)}
    assert to_toml(parse(f"{DSPARK},acceptance=0.5/0.25"), "vllm-ar").splitlines()[1:] == [
        'drafter = "dspark"', "acceptance = [0.5, 0.25]"
    ]  # fmt: skip


def test_a_profile_without_a_drafter_s_time_is_named() -> None:
    measured = load("h100-sdar-8b/sglang-drafts")
    assert "drafts are free" in warnings_of(Setting(parse(DFLASH), measured))[0]
    assert warnings_of(Setting(parse("vllm-ar,drafter=eagle"), measured)) == []
    gemma = load("h200x2-diffusiongemma/vllm")
    assert "decodes canvases: an autoregressive" in warnings_of(Setting(parse("vllm-ar"), gemma))[0]
    assert "answers less accurately" in warnings_of(Setting(parse("multi-block"), load("a100-sdar-8b")))[0]
