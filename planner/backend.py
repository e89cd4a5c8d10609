"""Run a function over many cells on one core, all cores or a Ray cluster, with the same results."""

import importlib
import logging
import signal
import socket
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from ..engine.errors import DsimError, MachineError
from ..engine.outside import fault_in_code
from ..files.read import cut

C = TypeVar("C")
R = TypeVar("R")

IDLE = 300  # s until a worker without cells ends
MAX_RETRIES = 5  # of a cell whose Ray worker was lost
CONNECT_TIMEOUT = 5.0  # s
NO_RAY = "ray is given, and Ray is not installed: pip install '.[cluster]' in a clone of dsim"


@dataclass(frozen=True)
class Outcome(Generic[R]):
    """A cell's value, or a one-line error."""

    key: str
    value: R | None = None
    error: str | None = None
    refused: bool = False  # a DsimError: a retry would fail too
    is_stored: bool = False  # not run
    trace: str | None = None  # of other exceptions

    def result(self) -> R:
        """The value. DsimError for a cell that dsim refuses or a worker lost for good; RuntimeError for a bug."""
        if self.trace is not None:
            raise RuntimeError(f"in a worker:\n{self.trace}")
        if self.error is not None:
            raise DsimError(self.error)
        return cast(R, self.value)


class Pool:
    """Where cells run: this process, all cores or a Ray cluster, which a `with` block joins and leaves.

    `jobs`: cells at once, by default all cores or the cluster's CPUs. `ray`: HOST:PORT of a cluster, or auto. DsimError
    for a wrong setting, and on entering for an unreachable cluster.
    """

    def __init__(self, jobs: int | None = None, ray: str | None = None) -> None:
        if jobs is not None and jobs < 1:
            raise DsimError(f"jobs is {jobs}, expected at least 1")
        self._jobs, self._ray = jobs, ray
        self._workers = 1  # local processes; never reduced, as a change costs seconds
        self._cluster: Any = None
        self._leave: Callable[[], object] = lambda: None  # the cluster
        self._last: Generator[Any, None, None] | None = None

    def __enter__(self) -> "Pool":
        if self._ray is not None:
            self._cluster, self._leave = _join(self._ray)
        return self

    def __exit__(self, *_: object) -> None:
        if self._last is not None:
            self._last.close()
        self._leave()

    def run(self, function: Callable[[C], R], cells: Mapping[str, C]) -> Generator[Outcome[R], None, None]:
        """Yield outcomes as cells finish; a failed cell does not stop the others.

        `function` and cells are pickled. Close the generator to stop early.
        """
        from joblib import cpu_count

        jobs = min(self._jobs or cpu_count(), len(cells))
        if self._cluster is not None:
            self._last = outcomes = _on_ray(self._cluster, function, cells, self._jobs)
        elif jobs < 2:
            self._last = outcomes = (attempt(function, key, cell) for key, cell in cells.items())
        else:
            self._workers = max(self._workers, jobs)
            self._last = outcomes = _on_cores(function, cells, self._workers)
        return outcomes


def in_order(outcomes: Generator[Outcome[R], None, None]) -> Generator[R, None, None]:
    """Yield the values of cells 0, 1, 2 ... until the first failure (see `Outcome.result`)."""
    early: dict[str, Outcome[R]] = {}
    num_yielded = 0
    with closing(outcomes):
        for outcome in outcomes:
            early[outcome.key] = outcome
            while str(num_yielded) in early:
                yield early.pop(str(num_yielded)).result()
                num_yielded += 1


def attempt(function: Callable[[C], R], key: str, cell: C) -> Outcome[R]:
    try:
        return Outcome(key, function(cell))
    except DsimError as error:
        return Outcome(key, error=_line(error), refused=not isinstance(error, MachineError))
    except (Exception, SystemExit) as error:
        if line := fault_in_code(error):
            return Outcome(key, error=line, refused=True)
        return Outcome(key, error=f"{type(error).__name__}: {_line(error)}", trace=traceback.format_exc())


def _on_cores(function: Callable[[C], R], cells: Mapping[str, C], jobs: int) -> Generator[Outcome[R], None, None]:
    from joblib.externals.loky import as_completed, get_reusable_executor
    from joblib.externals.loky.process_executor import TerminatedWorkerError

    executor = get_reusable_executor(jobs, timeout=IDLE, initializer=_in_worker)
    try:
        futures = [executor.submit(attempt, function, key, cell) for key, cell in cells.items()]
        for future in as_completed(futures):
            yield future.result()
    except TerminatedWorkerError:
        raise MachineError(
            f"a worker was killed, probably for want of memory: fewer jobs than {jobs} need less"
        ) from None
    except BaseException:  # an interrupt, or the caller stops
        threading.excepthook = lambda failure: None  # loky's thread may look for a worker that is killed
        executor.shutdown(kill_workers=True)
        threading.excepthook = threading.__excepthook__
        raise


def _in_worker() -> None:
    """Leave Ctrl-C, which a terminal sends to all processes, to the parent, and be quiet."""
    for name in ("SIGINT", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    if not sys.warnoptions:
        warnings.simplefilter("ignore")


def _join(address: str) -> tuple[Any, Callable[[], object]]:
    """Join a cluster; returns Ray, and the function that leaves."""
    try:
        ray = importlib.import_module("ray")
    except ImportError:
        raise DsimError(NO_RAY) from None
    if ray.is_initialized():  # by a notebook
        return ray, lambda: None
    try:
        if address != "auto":  # without an answer Ray waits minutes, or ends the process
            host, _, port = address.removeprefix("ray://").rpartition(":")
            socket.create_connection((host, int(port)), CONNECT_TIMEOUT).close()
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, OverflowError, RuntimeError, ValueError) as error:
        raise DsimError(
            f"ray is {cut(address)}, expected HOST:PORT of a running Ray cluster, or auto: {cut(_line(error))}"
        ) from None
    return ray, ray.shutdown


def _on_ray(
    ray: Any, function: Callable[[C], R], cells: Mapping[str, C], jobs: int | None
) -> Generator[Outcome[R], None, None]:
    """Files are read where they are named, as on a shared folder."""
    # A cell's exception returns as a value: only lost workers or nodes are retried.
    task = ray.remote(num_cpus=1, max_retries=MAX_RETRIES, scheduling_strategy="SPREAD")(attempt)
    work, waiting = ray.put(function), list(cells.items())[::-1]
    running: dict[Any, str] = {}
    limit = jobs or 2 * max(1, int(ray.cluster_resources().get("CPU", 0)))
    try:
        while waiting or running:
            while waiting and len(running) < limit:
                key, cell = waiting.pop()
                running[task.remote(work, key, cell)] = key
            [reference], _ = ray.wait(list(running), num_returns=1)
            key = running.pop(reference)
            try:
                yield ray.get(reference)
            except ray.exceptions.RayError as error:
                yield Outcome(key, error=f"{type(error).__name__}: {_line(error)}")
    finally:
        for reference in running:
            ray.cancel(reference, force=True)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or "no reason given"
