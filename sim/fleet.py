"""A fleet: pools of replicas, the router in front of them, and the scaler that changes their number."""

import re
from dataclasses import dataclass
from typing import Self

from ..engine.errors import PolicyError, quoted
from .routers import ROUTERS, Routing
from .scalers import Scaling
from .setting import Setting
from .startup import AT_ONCE, Startup

MAX_REPLICAS = 4096  # of a pool, and in one setting
IN_TURN = Routing("round-robin", ROUTERS["round-robin"])


@dataclass(frozen=True)
class PoolSpec:
    """A pool in words: `[NAME:]COUNT@PROFILE,POLICY`."""

    name: str
    count: int
    profile: str
    policy: str

    @classmethod
    def parse(cls, text: str, index: int) -> "PoolSpec":
        """Read a pool; PolicyError where the text is none. index: of the pool, which names one that has no name."""
        found = re.fullmatch(r"(?:([\w-]+):)?(\d{1,9})@([^,]+),(.+)", text)
        if found is None:
            example = "2@a100-sdar-8b,ar"
            raise PolicyError(f"pool is {quoted(text)}, expected [NAME:]COUNT@PROFILE,POLICY, such as {example}")
        return cls(found[1] or f"pool{index}", int(found[2]), found[3], found[4])


@dataclass(frozen=True)
class Pool:
    """Replicas of one setting: a policy on a profile, and so on one kind of hardware."""

    setting: Setting
    count: int = 1  # replicas when the run begins, all of them ready
    name: str = "pool"
    startup: Startup = AT_ONCE  # from the decision to start one more replica until it takes requests


@dataclass(frozen=True)
class Fleet:
    """Pools of replicas behind one router. One pool of a fixed count is the plain case."""

    pools: tuple[Pool, ...]
    routing: Routing = IN_TURN
    scaling: Scaling | None = None  # None: the number of replicas stays

    def check(self) -> Self:
        """Itself; PolicyError or ProfileError where it cannot run."""
        for pool in self.pools:
            if not 1 <= pool.count <= MAX_REPLICAS:
                limit = "at least 1" if pool.count < 1 else f"at most {MAX_REPLICAS}"
                raise PolicyError(f"replicas is {pool.count}, expected {limit}")
            pool.setting.check()
        names = [pool.name for pool in self.pools]
        for name in names:
            if names.count(name) > 1:
                raise PolicyError(f"pool {name} is given {names.count(name)} times, expected once")
        return self

    @property
    def num_replicas(self) -> int:
        """The replicas when the run begins."""
        return sum(pool.count for pool in self.pools)
