"""`dsim.follow`: follow a running server."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from ..engine.errors import DsimError
from ..files.lock import Lock
from ..following.background import Background
from ..following.follower import Followed, Follower
from ..following.sources.growing import AccessLog, GrowingLogs, StepLogTail
from ..following.sources.scrape import Target
from ..following.watch import Watcher, open_folder, state_of
from ..planner.given import PolicyLike, ProfileLike, TraceLike, spec_of
from ..report.page import Page
from ..results.scenario import Scenario
from ..results.slo import Slo
from ..traces import Trace
from ..traces import load as load_trace
from .scenarios import named_scenario
from .signature import Traffic, real_signature

LIMIT = 900.0  # s, in the background


@dataclass(frozen=True)
class Following:
    """What following a server found: state, windows, page."""

    state: dict[str, Any]
    windows: list[dict[str, Any]]
    folder: Path
    page: Page

    def to_json(self) -> dict[str, Any]:
        return self.state


@real_signature
def follow(
    urls: str | Sequence[str],
    policy: PolicyLike,
    *,
    profile: ProfileLike = Scenario.profile,
    slos: Sequence[str] = (),
    out: str | Path = "followed",
    trace: TraceLike | None = None,
    rate: float | None = None,
    interval: float = 5.0,
    window: float = 300.0,
    min_requests: int = 200,
    attainment: float = 0.99,
    access_log: str | Path | None = None,
    steps: str | Path | None = None,
    token_file: str | Path | None = None,
    ca_file: str | Path | None = None,
    seconds: float | None = None,
    _command: str = "",
    _tell: Callable[[str], None] = lambda line: None,
    _serve: Callable[[Watcher], None] | None = None,
    **traffic: Unpack[Traffic],
) -> Following:
    """Follow a running server with a twin, and report drift between the two.

    urls: the server's metrics, one a replica. policy, profile: what it runs. out: the folder of results, from which a
    later call continues. trace, rate: the traffic that the fleet was planned for. seconds: how long to follow; None
    reads once. Raises DsimError.
    """
    wanted = [urls] if isinstance(urls, str) else list(urls)
    if not wanted or len(set(wanted)) != len(wanted):
        raise DsimError(f"{len(wanted)} URLs are given, {len(set(wanted))} of them different, expected each once")
    for name, value, least in (("interval", interval, 0.1), ("window", window, 1.0)):
        if not least <= value <= 86400:
            raise DsimError(f"{name} is {value:g} s, expected {least:g} to 86400")
    if not 1 <= min_requests <= 1_000_000:
        raise DsimError(f"min requests is {min_requests}, expected 1 to 1000000")
    if not 0 < attainment <= 1:
        raise DsimError(f"attainment is {100 * attainment:g}%, expected above 0% and up to 100%")
    columns, only, unit = (traffic.pop(name, None) for name in ("columns", "only", "time_unit"))  # type: ignore[misc]
    plan = None if trace is None else trace if isinstance(trace, Trace) else load_trace(trace)
    targets = [
        Target(url, token_file and Path(token_file), ca_file and Path(ca_file))  # type: ignore[arg-type]
        for url in wanted
    ]
    scenario = named_scenario("azure-conv", slos, spec_of(policy), profile, [], traffic, rate=rate)
    for text in slos:
        Slo.parse(text).check_class(())
    followed = Followed(
        scenario, tuple(target.url for target in targets), interval, window, min_requests, plan, attainment
    )  # fmt: skip
    scenario.setting().check()
    logs = GrowingLogs(
        None if access_log is None else AccessLog(Path(access_log), columns, only, unit),
        None if steps is None else StepLogTail(Path(steps)),
        _tell,
    )
    logs.read(strict=not any(Path(out).glob("samples/*")))  # a mistake shows before the first reading
    folder = open_folder(out, followed)
    lock = Lock(folder)
    try:
        follower = Follower(followed, folder, logs, _tell, partial(Background, LIMIT))
        watcher = Watcher(follower, targets, folder, _tell, command=_command)
        try:
            if _serve is not None:
                _serve(watcher)
            elif seconds is None:
                watcher.once()
                watcher.settle()
            else:
                end = time.monotonic() + seconds
                watcher.run(lambda: time.monotonic() >= end)
        finally:
            watcher.close()
        watcher.publish()
    finally:
        lock.close()
    from ..following.pages import page_of

    return Following(state_of(follower), list(follower.windows), folder, page_of(follower, _command))
