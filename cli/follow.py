"""dsim follow: follow a running server with a twin."""

import time
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar
from typing import Annotated as A

from ..engine.errors import DsimError
from . import choices
from . import questions as q
from .answer import INTERRUPTED, Answer
from .declared import Opt, Question, Watch

if TYPE_CHECKING:
    from ..following.watch import Following, Watcher
    from .objects import PolicyLike, ProfileLike


@dataclass(frozen=True)
class FollowQuestion(q.Coded, q.Seen, Question["Following"]):
    """Follow a running server with a twin, and report drift and how much more traffic it can take.

    dsim follow http://localhost:8000 --policy vllm-diffusion --profile mine.json --slo ttft=2s --port 9100
    dsim follow http://10.0.0.1:8000 http://10.0.0.2:8000 --policy sglang-fdfo --once
    """

    COMMON: ClassVar = ("policy", "profile", "slos", "interval", "window", "token_file", "port", "once", "out")

    urls: A[str | Sequence[str], Opt("URLs of the server's metrics, one a replica.", "URL...")]
    policy: A["PolicyLike", q.ONE_POLICY]
    _: KW_ONLY
    profile: A["ProfileLike", q.PROFILE] = choices.PROFILE
    workload: A[str | None, q.WORKLOAD] = None
    frontend: A[float | None, q.FRONTEND] = None
    yields: A[str | None, q.YIELD] = None
    router: A[str, q.ROUTER] = "round-robin"
    eos: A[bool | None, q.EOS] = None
    slos: A[Sequence[str], q.SLO] = ()
    interval: A[float, Opt("Time between two readings.", "S", "Following")] = 5.0
    window: A[float, Opt("Shortest window to judge.", "S", "Following")] = 300.0
    min_requests: A[int, Opt("Fewest requests in a window.", "N", "Following")] = 200
    attainment: A[float, q.ATTAINMENT] = 0.99
    token_file: A[str | Path | None, Opt("A file with a bearer token.", "F", "Following")] = None
    host: A[str, Opt("The address of --port.", "H", "Server", needs=("port",))] = "127.0.0.1"
    port: A[int | None, Opt("Serve metrics to Prometheus; 0 takes a free port.", "N", "Server")] = None
    once: A[bool, Opt("Read once and exit, for cron; exit 1 if an alarm is open.", "", "Following")] = False
    check_rules: A[bool, q.CHECK_RULES] = False
    seed: A[int, q.SEED] = 0
    seconds: float | None = None  # how long; None: until Ctrl-C
    out: A[str | Path, q.out("Folder of the page, windows and profiles; a restart continues.")] = "followed"

    def answer(self, watch: Watch) -> "Answer[Following]":
        from ..files.lock import Lock
        from ..following.follower import Followed, Follower
        from ..following.pages import page_of
        from ..following.sources.scrape import Target
        from ..following.watch import FILES, Following, Watcher, open_folder, state_of
        from ..results.slo import Slo
        from ..results.world import World
        from .objects import profile_name, spec_of

        urls = list(self.urls)
        self._check(urls)
        targets = [Target(url, q.path_of(self.token_file)) for url in urls]
        policy = spec_of(self.policy)
        values = q.world_fields(self, [policy])
        world = World(trace="azure-conv", policy=policy, profile=profile_name(self.profile), **values)
        for text in self.slos:
            Slo.parse(text).check_class(())
        followed = Followed(
            world=world,
            urls=tuple(target.url for target in targets),
            interval=self.interval,
            seconds=self.window,
            requests=self.min_requests,
            attainment=self.attainment,
        )
        world.setting().check()
        folder = open_folder(self.out, followed)
        with closing(Lock(folder)):
            follower = Follower(followed, folder, watch.say)
            watcher = Watcher(follower, targets, folder, watch.say, command=watch.command())
            self._follow(watcher, watch)
            watcher.publish()
        state = state_of(follower)
        page = page_of(follower, watch.command())
        return Answer(
            value=Following(state, list(follower.windows), folder, page), json=state, page=lambda: page, out=folder,
            files=FILES, code=int(bool(state["alarms"])) if self.once else INTERRUPTED,
        )  # fmt: skip

    def _follow(self, watcher: "Watcher", watch: Watch) -> None:
        if self.once:
            watcher.once()
        elif self.seconds is not None:
            end = time.monotonic() + self.seconds
            watcher.run(lambda: time.monotonic() >= end)
        else:
            with suppress(KeyboardInterrupt):
                if self.port is not None:
                    self._serve(watcher, self.port, watch)
                watcher.run()

    def _serve(self, watcher: "Watcher", port: int, watch: Watch) -> None:
        from ..following.exported import serve

        try:
            watch.say(f"Metrics are on {serve(watcher.follower, self.host, port)}")
        except OSError:
            raise DsimError(f"--port is {port}, expected one that is free on {self.host}") from None

    def _check(self, urls: Sequence[str]) -> None:
        if self.once and self.port is not None:
            raise DsimError(f"--once is given and --port is {self.port}, expected one of them")
        q.check_range("--port", self.port or 0, 0, 65535)
        if not urls or len(set(urls)) != len(urls):
            raise DsimError(f"{len(urls)} URLs are given, {len(set(urls))} of them different, expected each once")
        for name, value, least in (("interval", self.interval, 0.1), ("window", self.window, 1.0)):
            if not least <= value <= 86400:
                raise DsimError(f"{name} is {value:g} s, expected {least:g} to 86400")
        q.check_range("min requests", self.min_requests, 1, 1_000_000)
        if not 0 < self.attainment <= 1:
            raise DsimError(f"attainment is {100 * self.attainment:g}%, expected above 0% and up to 100%")
