"""A fleet: pools of replicas, their router, and the scaler that changes their number."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from ..engine.errors import PolicyError, cut, quoted
from ..engine.prefix import caches_prefixes
from .link import Link
from .routers import ROUTERS, Routing
from .scalers import Scaling
from .setting import Setting

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
        """Read a pool, or raise PolicyError; index: for a default name."""
        shape = re.fullmatch(r"(?:([\w-]+):)?(\d{1,9})@([^,]+),(.+)", text)
        if shape is None:
            example = "2@a100-sdar-8b,ar"
            raise PolicyError(f"pool is {quoted(text)}, expected [NAME:]COUNT@PROFILE,POLICY, such as {example}")
        return cls(name=shape[1] or f"pool{index}", count=int(shape[2]), profile=shape[3], policy=shape[4])

    @classmethod
    def parse_all(cls, texts: Iterable[str]) -> "list[PoolSpec]":
        return [cls.parse(text, i) for i, text in enumerate(texts)]

    def __str__(self) -> str:
        return f"{self.name}:{self.count}@{self.profile},{self.policy}"


@dataclass(frozen=True)
class Pool:
    """Replicas of one setting and hardware."""

    setting: Setting
    count: int = 1  # ready when the run begins
    name: str = "pool"
    startup: float = 0.0  # s, from decision to serving


@dataclass(frozen=True)
class Fleet:
    """Pools of replicas behind a router."""

    pools: tuple[Pool, ...]
    routing: Routing = IN_TURN
    scaling: Scaling | None = None  # None: fixed number
    links: tuple[Link, ...] = ()  # a link's first pool only prefills
    least_uncached: float = 0.0  # tokens of a prompt in no decoder's prefix cache, from which on it prefills

    def check(self) -> Self:
        """Self; PolicyError or ProfileError if it cannot run."""
        for pool in self.pools:
            if not 1 <= pool.count <= MAX_REPLICAS:
                raise PolicyError(f"replicas is {pool.count}, expected 1 to {MAX_REPLICAS}")
            if not 0 <= pool.startup < math.inf:
                raise PolicyError(f"startup is {pool.startup:g} s, expected at least 0 and finite")
            pool.setting.check()
        pools = {pool.name: pool for pool in self.pools}
        if len(pools) < len(self.pools):
            name, count = Counter(pool.name for pool in self.pools).most_common(1)[0]
            raise PolicyError(f"pool {name} is given {count} times, expected once")
        for link in self.links:
            for name in (link.source, link.to):
                if name not in pools:
                    raise PolicyError(f"link names the pool {quoted(name)}, expected one of {', '.join(pools)}")
            if any(end.to == link.source for end in self.links):
                raise PolicyError(f"pool {link.source} is at both ends of links, expected to prefill or to decode")
            _check_pair(pools[link.source], pools[link.to])
        for (source, target), count in Counter((link.source, link.to) for link in self.links).items():
            if count > 1:
                raise PolicyError(f"{count} links join {source} and {target}, expected one")
        return self

    def prefills(self, pool: Pool) -> bool:
        return any(link.source == pool.name for link in self.links)

    @property
    def shares_where_decoded(self) -> bool:
        """Whether KV travels to a pool with a prefix cache."""
        decoding = (pool for pool in self.pools if not self.prefills(pool))
        return bool(self.links) and any(caches_prefixes(pool.setting.policy) for pool in decoding)

    def with_ends(self) -> Self:
        """The fleet with each link's pools named."""
        names = [pool.name for pool in self.pools]
        return replace(self, links=tuple(with_ends(link, names) for link in self.links))

    @property
    def num_replicas(self) -> int:
        return sum(pool.count for pool in self.pools)


def with_ends(link: Link, names: Sequence[str]) -> Link:
    """Name a link's pools; PolicyError without exactly two to choose from."""
    if link.source and link.to:
        return link
    if len(names) != 2:
        raise PolicyError(f"a link is given without pools and the fleet has {len(names)}, expected from=POOL,to=POOL")
    source = link.source or next(name for name in names if name != link.to)
    return replace(link, source=source, to=link.to or next(name for name in names if name != source))


def _check_pair(source: Pool, target: Pool) -> None:
    """PolicyError unless `target` can decode what `source` prefilled."""
    traits: dict[str, list[Any]] = {"block_length": [], "family": [], "bytes of KV a token": []}
    for pool in (source, target):
        policy, memory = pool.setting.policy, pool.setting.profile.memory
        if policy.family == "full-sequence":
            raise PolicyError(
                f"pool {pool.name} has {cut(policy.name)}, whose passes over whole sequences run where it decodes: "
                "expected a policy that decodes against a prompt's keys and values"
            )
        total = memory.kv_bytes_per_token + memory.window_bytes_per_token
        for column, value in zip(traits.values(), (policy.block_length, policy.family, total), strict=True):
            column.append(value)
    for trait, (x, y) in traits.items():
        if x != y:
            raise PolicyError(f"pool {source.name} has {trait} {x} and pool {target.name} {y}: expected the same")
