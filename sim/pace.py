"""Whether threads that share replicas are faster at the moment, by the clock: other programs may need the cores."""

from time import perf_counter

AGAIN = 16  # measured calls, of which one tries the slower way


class Pace:
    """Measures calls alone and shared, which have the same result."""

    def __init__(self) -> None:
        self._took: dict[bool, float] = {}  # s a request, by whether threads shared the call
        self._calls = 0
        self._began = 0.0

    def begin(self) -> None:
        self._began = perf_counter()

    def note(self, shared: bool, requests: int) -> None:
        """Note a call that began at `begin` and served `requests`."""
        self._took[shared] = (perf_counter() - self._began) / requests
        self._calls += 1

    @property
    def shared(self) -> bool:
        """Whether threads should share the next call."""
        if len(self._took) < 2:
            return False in self._took
        faster = self._took[True] < self._took[False]
        return faster != (self._calls % AGAIN == 0)
