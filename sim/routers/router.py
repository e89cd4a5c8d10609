"""A router: it chooses the replica that takes a request as it arrives."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from ...engine.prefix import Prefixes
from ...engine.route import Sent, nothing_sent


class ReplicaView(Protocol):
    """A replica as a router sees it. The engine has these attributes."""

    @property
    def replica(self) -> int:
        """Its number in the fleet, unique in the run."""

    @property
    def num_waiting(self) -> int:
        """Requests in its queue."""

    @property
    def num_running(self) -> int:
        """Requests admitted and not finished."""

    @property
    def expected_tokens(self) -> int:
        """Tokens to prefill or expected to be returned: answers count with their estimated length."""

    @property
    def queued_prompt_tokens(self) -> int:
        """Prompt tokens of the requests in its queue."""

    @property
    def pages_held(self) -> int:
        """KV pages that sequences hold."""

    @property
    def num_pages(self) -> int:
        """KV pages of its pool."""

    @property
    def page_size(self) -> int:
        """Tokens of a KV page."""


FIGURES = tuple(name for name, value in vars(ReplicaView).items() if isinstance(value, property))


class RequestView(Protocol):
    """A request as a router sees it, without the true length of its answer."""

    @property
    def index(self) -> int:
        """Its place in the trace."""

    @property
    def arrival(self) -> float:
        """When it was sent (s)."""

    @property
    def input_length(self) -> int:
        """Tokens of its prompt."""

    @property
    def expected(self) -> int:
        """Tokens of its answer, estimated: its limit, where it sets one."""

    @property
    def priority(self) -> int:
        """The lower, the sooner."""

    @property
    def deadline(self) -> float:
        """When its answer is wanted whole, in s after its arrival; infinity: never."""

    @property
    def slo_class(self) -> str:
        """Its class; empty where it has none."""


def figures(replicas: Sequence[ReplicaView], name: str) -> Sequence[int] | npt.NDArray[np.int64]:
    """A figure of each replica, read as one array where replicas share one."""
    column = getattr(replicas, "column", None)
    if column is not None:
        found: Sequence[int] | npt.NDArray[np.int64] = column(name)
        return found
    return [getattr(replica, name) for replica in replicas]


# Pages of a request's prompt that a replica has, by place: "gpu", and the names of its tiers. None: it has no tiers.
Pages = Callable[[int, int], "Mapping[str, int] | None"]


class Router:
    """Chooses the replica of each request as it arrives. Every run makes a new router, so it may keep state.

    prefixes: names of the blocks that prompts begin with; None unless the class sets `goes_by_prefix`.
    """

    least: ClassVar[tuple[str, ...]] = ()  # figures of ReplicaView: the replica with the least sum is chosen
    takes_turns: ClassVar[bool] = False  # request i goes to replica i modulo their number, in any state
    goes_by_length: ClassVar[bool] = False  # compares the lengths of answers, which are estimates
    goes_by_prefix: ClassVar[bool] = False  # asks for the names of prompts' beginnings
    settings: ClassVar[Mapping[str, type]] = {}  # fields of its SPEC, which `__init__` takes by name
    pages: Pages | None = None  # of replicas with KV tiers, as their events say

    def __init__(self, prefixes: Prefixes | None = None) -> None:
        self.prefixes = prefixes

    def where_prefilled(self) -> "Router":
        """The router that chooses the replica that prefills, in a fleet with links: by default this one."""
        return self

    def compiled(
        self, num_replicas: int, input_length: npt.NDArray[np.int64], scales: bool
    ) -> tuple[tuple[str, ...], Sent] | None:
        """The figures and the memory with which `route.choose` replaces `route`; None: there is no compiled form.

        input_length [requests]: of the run's requests. scales: the number of replicas changes.
        """
        return (self.least, nothing_sent()) if self.least else None

    def route(self, replicas: Sequence[ReplicaView], request: RequestView) -> int:
        """Return the index in `replicas` of the one that takes the request.

        replicas: the replicas that take requests now, in the order of their numbers.
        """
        if not self.least:
            raise NotImplementedError
        loads: Any = figures(replicas, self.least[0])
        for name in self.least[1:]:
            loads = np.add(loads, figures(replicas, name))
        return int(np.argmin(loads))  # the first of equals
