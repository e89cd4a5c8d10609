"""The twin decides as vLLM 0.32's own engine did under the same disciplines, in step logs recorded on a CPU.

recorded/policy-ENGINE-POLICY-RATE.jsonl.xz is what benchmarks/policy_in_vllm/record_policies.py recorded on 2026-11-30:
`ar` a tiny Qwen3, `dg` a tiny DiffusionGemma with canvases of 64 tokens, both with asynchronous scheduling.
`dg-admission-8` caps canvases as it admits requests, down to one step, and vLLM preempts in it. The requests of
`dg-steps-8` are called deadline-8: while the engine ran, that name stood for the caps of running rows.
"""

from pathlib import Path

import pytest

from dsim.benchmarks.policy_in_vllm.policies_table import replayed
from dsim.benchmarks.policy_in_vllm.record_policies import spec_of
from dsim.benchmarks.vllm_diffusion.plans import Log

from .test_oracles import unpacked

RECORDED = sorted((Path(__file__).parent / "recorded").glob("policy-*.xz"))


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_each_step_under_a_discipline_is_planned_as_it_was(path: Path, tmp_path: Path) -> None:
    log = Log(unpacked(path, tmp_path))
    run = replayed(log, spec_of(path.name.split("-")[-2], log.spec.partition(",")[0]))
    assert run.num_steps > 40
    assert (run.first_other, run.num_alike) == ("", run.num_steps)
    assert run.latency.mean() == pytest.approx(run.measured.mean(), rel=0.01)


def test_another_discipline_plans_otherwise(tmp_path: Path) -> None:
    log = Log(unpacked(RECORDED[0], tmp_path))
    policy = "deadline" if "shortest" in RECORDED[0].name else "shortest"
    assert ": rows [" in replayed(log, spec_of(policy, log.spec.partition(",")[0])).first_other
