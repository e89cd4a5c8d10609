"""Run a function over many cells on one core, all cores or a Ray cluster, with the same results."""

import importlib
import logging
import signal
import socket
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from .. import __version__
from ..engine.errors import DsimError, MachineError
from ..engine.outside import fault_in_code
from ..files.interrupt import uninterrupted
from ..files.read import cut

C = TypeVar("C")
R = TypeVar("R")

# A terminal signals all processes; only the parent handles these.
DEAF_TO = {getattr(signal, name) for name in ("SIGINT", "SIGHUP") if hasattr(signal, name)}
MAX_CRASHES = 3  # in a row without a finished cell
IDLE = 300  # s until a worker without cells ends
MAX_RETRIES = 5  # of a cell whose Ray worker was lost
CONNECT_TIMEOUT = 5.0  # s, for any answer
JOIN_TIMEOUT = 30.0  # s, for a Ray cluster's answer


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
        self._leave: Callable[[], None] = lambda: None  # leaves the cluster
        self._last: Generator[Any, None, None] | None = None

    def __enter__(self) -> "Pool":
        if self._ray is not None:
            self._leave = _join(self._ray)
        return self

    def __exit__(self, *_: object) -> None:
        if self._last is not None:
            self._last.close()
        self._leave()

    def run(self, function: Callable[[C], R], cells: Mapping[str, C]) -> Generator[Outcome[R], None, None]:
        """Yield outcomes as cells finish; a failed cell does not stop the others.

        `function` and cells are pickled. Cells of a lost worker run again. Close the generator to stop early.
        """
        from joblib import cpu_count

        jobs = min(self._jobs or cpu_count(), len(cells))
        if self._ray is not None:
            self._last = outcomes = _on_ray(function, cells, self._jobs)
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
        return Outcome(key, error=_line(error), refused=True)
    except (Exception, SystemExit) as error:
        if line := fault_in_code(error):
            return Outcome(key, error=line, refused=True)
        return Outcome(key, error=f"{type(error).__name__}: {_line(error)}", trace=traceback.format_exc())


@contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """Have processes started here, and their replacements, ignore Ctrl-C; the parent ends them."""
    from multiprocessing import resource_tracker

    from joblib.externals.loky.backend import resource_tracker as of_loky

    with uninterrupted():
        for tracker in (resource_tracker, of_loky):  # one started later would reset the mask
            tracker.ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, DEAF_TO)
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _on_cores(function: Callable[[C], R], cells: Mapping[str, C], jobs: int) -> Generator[Outcome[R], None, None]:
    from joblib.externals.loky import as_completed, get_reusable_executor
    from joblib.externals.loky.process_executor import TerminatedWorkerError

    waiting = dict(cells)
    crashes = 0
    while waiting:
        with _deaf_to_interrupts():  # exit may raise an interrupt
            executor = get_reusable_executor(jobs, timeout=IDLE, initializer=_silence)
            futures = [executor.submit(attempt, function, key, cell) for key, cell in waiting.items()]
        try:
            for future in as_completed(futures):
                outcome = future.result()
                del waiting[outcome.key]
                crashes = 0
                yield outcome
        except TerminatedWorkerError:
            crashes += 1
            if crashes == MAX_CRASHES:
                raise MachineError(
                    f"a worker was killed {crashes} times in a row, probably for want of memory; {len(waiting)} of "
                    f"{len(cells)} cells are left: fewer jobs than {jobs} need less"
                ) from None
        except BaseException:  # an interrupt, or the caller stops
            executor.shutdown(kill_workers=True)
            raise


def _silence() -> None:
    """For a worker: users can do nothing about its warnings."""
    if not sys.warnoptions:
        warnings.simplefilter("ignore")


def _join(address: str) -> Callable[[], None]:
    """Join a cluster; returns the function that leaves. A probe first: Ray waits minutes, or ends the process."""
    ray = _ray()
    if ray.is_initialized():  # by a notebook
        return lambda: None
    if address != "auto":
        host, colon, port = address.removeprefix("ray://").rpartition(":")
        if not colon or not host or not port.isdigit():
            raise DsimError(f"ray is {cut(address)}, expected HOST:PORT of a Ray cluster, or auto")
        if host in ("localhost", "127.0.0.1", "::1") and "ray://" not in address:
            host = ray.util.get_node_ip_address()  # as Ray reads it
        try:
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT).close()
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise DsimError(f"{address}: no Ray cluster answers there: {reason}") from None
    probe = "import ray, sys; ray.init(address=sys.argv[1], log_to_driver=False, logging_level=40)"
    try:
        answer = subprocess.run(
            [sys.executable, "-c", probe, address], capture_output=True, text=True, timeout=JOIN_TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired:
        raise DsimError(f"{address}: answers, but not as a Ray cluster within {JOIN_TIMEOUT:.0f} s") from None
    if answer.returncode:
        reasons = [line.strip() for line in answer.stderr.splitlines() if line.strip()]
        raise DsimError(f"{address}: cannot join the Ray cluster: {(reasons or ['no reason given'])[-1]}")
    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    leave: Callable[[], None] = ray.shutdown
    return leave


def _ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise DsimError("ray is given, and Ray is not installed: pip install '.[cluster]' in a clone of dsim") from None


def _on_ray(function: Callable[[C], R], cells: Mapping[str, C], jobs: int | None) -> Generator[Outcome[R], None, None]:
    """Files are read where they are named, as on a shared folder."""
    ray = _ray()
    from ray import cloudpickle

    # A cell's exception returns as a value: only lost workers or nodes are retried.
    task = ray.remote(num_cpus=1, max_retries=MAX_RETRIES, scheduling_strategy="SPREAD")(_attempt_pickled)
    work = ray.put(cloudpickle.dumps(function))
    waiting = list(cells.items())[::-1]
    running: dict[Any, str] = {}
    try:
        while waiting or running:
            cpus = max(1, int(ray.cluster_resources().get("CPU", 0)))
            while waiting and len(running) < (jobs or 2 * cpus):
                key, cell = waiting.pop()
                running[task.remote(work, cloudpickle.dumps(cell), key, __version__)] = key
            finished, _ = ray.wait(list(running), num_returns=1)
            for reference in finished:
                key = running.pop(reference)
                try:
                    outcome = ray.get(reference)
                except ray.exceptions.RayError as error:
                    outcome = Outcome(key, error=f"{type(error).__name__}: {_line(error)}")
                yield outcome
    finally:
        for reference in running:
            ray.cancel(reference, force=True)


def _attempt_pickled(work: bytes, cell: bytes, key: str, version: str) -> Outcome[Any]:
    """On a machine of the cluster, which Ray trusts too."""
    from ray import cloudpickle

    if version != __version__:  # its pickles may be unreadable
        return Outcome(key, error=f"the worker has dsim {__version__} and this machine {version}, expected the same")
    return attempt(cloudpickle.loads(work), key, cloudpickle.loads(cell))


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or "no reason given"
