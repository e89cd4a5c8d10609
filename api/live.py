"""`dsim.run_live`: serve a trace on this machine's device."""

from collections.abc import Sequence
from pathlib import Path
from typing import Unpack

from ..device.live_run import live_run
from ..planner.given import PolicyLike, ProfileLike, TraceLike
from ..planner.recorded import Recorded
from ..results.run import read_run
from ..results.scenario import Scenario
from .scenarios import folder_of, scenarios_of
from .signature import Traffic, real_signature


@real_signature
def run_live(
    trace: TraceLike,
    policy: PolicyLike | Sequence[PolicyLike] = "lmdeploy-bd32",
    *,
    model: str | None = None,
    random_weights: str | None = None,
    commits: str | None = None,
    profile: ProfileLike | None = None,
    prompts: str | None = None,
    device: str | None = None,
    graphs: bool | None = None,
    mask_token_id: int | None = None,
    block_length: int | None = None,
    tokenizer: str | None = None,
    temperature: float = 0.0,
    slos: Sequence[str] = (),
    rate: float | None = None,
    num_requests: int | None = None,
    out: str | Path | None = None,
    force: bool = False,
    **traffic: Unpack[Traffic],
) -> Recorded:
    """Serve a trace on this machine's device, in real time, under the twin's policies: `dsim live`.

    model: a shipped model (default tiny) or a directory. random_weights: instead, a config.json or a shipped name.
    commits: what decides which tokens commit, `model` or `twin`. Needs the `live` extra. Raises DsimError.
    """
    named = Scenario.profile if profile is None else profile
    scenarios = scenarios_of(trace, policy, named, slos, traffic, rate=rate, num_requests=num_requests, replicas=1)
    run = live_run(
        scenarios, model=model, random_weights=random_weights, profiled=profile is not None,
        commits=commits, prompts=prompts, device=device,
        graphs=graphs, mask_token_id=mask_token_id, block_length=block_length, tokenizer=tokenizer,
        temperature=temperature,
    )  # fmt: skip
    kept, folder = folder_of(out)
    done = run.serve(folder, force=force)
    if done.failure is not None:
        raise done.failure
    return Recorded(read_run(folder, scenarios[0].allow_code), kept)
