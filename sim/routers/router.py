"""A router chooses the replica that takes a request as it arrives."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

from ...engine.prefix import Prefixes
from ...traces.trace import Ints


class ReplicaView(Protocol):
    """A replica as a router sees it; the engine has these attributes."""

    @property
    def replica(self) -> int: ...  # Its number, unique in the run.
    @property
    def num_waiting(self) -> int: ...  # Requests in its queue.
    @property
    def num_running(self) -> int: ...  # Requests admitted and not finished.
    @property
    def expected_tokens(self) -> int: ...  # Tokens to prefill or expected to be returned, by estimated lengths.
    @property
    def queued_prompt_tokens(self) -> int: ...  # Prompt tokens of queued requests.
    @property
    def pages_held(self) -> int: ...  # KV pages that sequences hold.
    @property
    def num_pages(self) -> int: ...  # KV pages of its pool.
    @property
    def page_size(self) -> int: ...  # Tokens of a KV page.


FIGURES = tuple(name for name, value in vars(ReplicaView).items() if isinstance(value, property))


class RequestView(Protocol):
    """A request as a router sees it, without its answer's true length."""

    @property
    def index(self) -> int: ...  # Its place in the trace.
    @property
    def arrival(self) -> float: ...  # When it was sent (s).
    @property
    def input_length(self) -> int: ...  # Prompt tokens.
    @property
    def expected(self) -> int: ...  # Estimated tokens of its answer: its limit, if set.
    @property
    def priority(self) -> int: ...  # Lower is sooner.
    @property
    def deadline(self) -> float: ...  # For its whole answer, s after arrival; infinity: never.
    @property
    def slo_class(self) -> str: ...  # Empty: none.


REQUEST_FIGURES = tuple(name for name, value in vars(RequestView).items() if isinstance(value, property))


class Restricted:
    """A replica or request with its view's attributes alone, for code from outside."""

    def __init__(self, subject: Any, role: str, names: Sequence[str]) -> None:
        self.__subject, self.__role, self.__names = subject, role, names

    def __getattr__(self, name: str) -> Any:
        if name not in self.__names:
            raise AttributeError(
                f"there is no {name} of a {self.__role} to see, expected one of {', '.join(self.__names)}"
            )
        return getattr(self.__subject, name)


def restricted(request: RequestView) -> Any:
    return Restricted(request, "request", REQUEST_FIGURES)


class Router:
    """Chooses each request's replica; every run makes a new one, so it may keep state.

    prefixes: names of prompts' first blocks; None unless `goes_by_prefix`.
    """

    least: ClassVar[tuple[str, ...]] = ()  # figures, of state.Counters too, whose least sum is chosen
    takes_turns: ClassVar[bool] = False  # request i goes to replica i modulo their number
    goes_by_prefix: ClassVar[bool] = False  # asks for the names of prompts' beginnings
    settings: ClassVar[Mapping[str, type]] = {}  # its SPEC's fields, which `__init__` takes by name

    seed = 0  # of the run; set after `__init__`, as the next one
    prefills = False  # chooses where to prefill in a fleet with links

    def __init__(self, prefixes: Prefixes | None = None) -> None:
        self.prefixes = prefixes

    def in_advance(self, num_requests: int, num_replicas: int) -> Ints | None:
        """[requests] the replica of each, if it depends on no replica's state; None: it does."""
        return None

    def compiled(self, num_replicas: int, input_length: Ints, scales: bool) -> tuple[str, ...] | None:
        """Counters whose least sum chooses in compiled code, in place of `route`; None: it does not.

        input_length [requests]: of the run. scales: the number of replicas changes.
        """
        if type(self).route is not Router.route:
            return None
        return self.least

    def route(self, replicas: Sequence[ReplicaView], request: RequestView) -> int:
        """The index in `replicas`, which take requests now, by number."""
        if not self.least:
            raise NotImplementedError("it has no method route")
        loads = [sum(getattr(replica, name) for name in self.least) for replica in replicas]
        return loads.index(min(loads))  # the first of equals
