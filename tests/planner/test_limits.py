"""Where the time in steps goes, on every shipped profile and implementation."""

import pytest

from dsim.engine.policies import BASELINES
from dsim.engine.policy import parse
from dsim.planner.limits import Shares, limited_by
from dsim.profiler.profile import load, shipped
from dsim.sim.setting import Setting
from dsim.sim.twin import simulate
from dsim.traces import synth


@pytest.mark.parametrize("name", shipped())
def test_every_shipped_profile_says_where_its_steps_time_goes(name: str) -> None:
    profile = load(name)
    setting = Setting(parse(BASELINES[profile.family]), profile)
    shares = Shares(setting)
    trace = synth("poisson", 1.0, lengths="lognormal:90,70,80,60", num_requests=12, seed=4)
    totals = simulate(trace, setting, append=shares.append).totals
    assert shares.busy == pytest.approx(totals.prefill_time + totals.decode_time)
    found = shares.shares()
    assert found["decode"] + found["prefill"] + found["host"] == pytest.approx(1.0)
    assert found["decode"] > 0
    assert limited_by(found, 0.0, setting).name in ("compute", "host overhead", "activation budget", "KV memory")
