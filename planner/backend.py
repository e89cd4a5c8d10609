"""Run a function over many cells on one core, all cores or a Ray cluster, with the same results."""

import atexit
import importlib
import logging
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from .. import __version__
from ..engine.errors import DsimError
from ..engine.outside import fault_in_code
from ..files.interrupt import LostError, uninterrupted
from ..files.read import cut

C = TypeVar("C")
R = TypeVar("R")

# A terminal signals all processes; only the parent handles these.
DEAF_TO = {getattr(signal, name) for name in ("SIGINT", "SIGHUP") if hasattr(signal, name)}
MAX_CRASHES = 3  # in a row without a finished cell
MAX_RETRIES = 5  # of a cell whose Ray worker was lost
CONNECT_TIMEOUT = 5.0  # s, for any answer
JOIN_TIMEOUT = 30.0  # s, for a Ray cluster's answer
STARVED = 60.0  # s without a CPU in the cluster
LOOKS = 2.0  # s between cluster checks
HEAD_LOST = 15.0  # s without its answer; after 60 s Ray ends the process
BATCH_SECONDS, MOST_IN_BATCH = 0.25, 256  # s, and number, of cells sent together


@dataclass(frozen=True)
class Outcome(Generic[R]):
    """A cell's value, or a one-line error."""

    key: str
    value: R | None = None
    error: str | None = None
    refused: bool = False  # a DsimError: a retry would fail too
    trace: str | None = None  # of other exceptions


class Pool:
    """Where cells run: this process, all cores or a Ray cluster. A `with` block leaves the cluster.

    `jobs`: cells at once, by default all cores or the cluster's CPUs. `ray`: HOST:PORT of a cluster, or auto. DsimError
    at once for a wrong setting, and before the first cell for an unreachable cluster.
    """

    def __init__(self, jobs: int | None = None, ray: str | None = None) -> None:
        if jobs is not None and jobs < 1:
            raise DsimError(f"jobs is {jobs}, expected at least 1")
        self._jobs, self._ray = jobs, ray
        self._workers = 1  # local processes; never reduced, as a change costs seconds
        self._leave: Callable[[], None] | None = None  # leaves the cluster
        self._last: Generator[Any, None, None] | None = None

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if self._last is not None:
            self._last.close()
        if not isinstance(error, LostError):
            self.leave()
        self._leave = None

    def join(self) -> None:
        """Join the cluster before the first cells do."""
        if self._ray is not None and self._leave is None:
            self._leave = _join(self._ray)

    def leave(self) -> None:
        """Leave the cluster; the next cells join it again."""
        if self._leave is not None:
            self._leave()
        self._leave = None

    def run(self, function: Callable[[C], R], cells: Mapping[str, C]) -> Generator[Outcome[R], None, None]:
        """Yield outcomes as cells finish; a failed cell does not stop the others.

        `function` and cells are pickled. Cells of a lost worker run again. Close the generator to stop early.
        """
        self._last = outcomes = self._begin(function, cells)
        return outcomes

    def map(self, function: Callable[[C], R], cells: Iterable[C]) -> Generator[R, None, None]:
        """Yield values in the cells' order, until the first failure.

        DsimError for a cell that dsim refuses or a worker lost for good; RuntimeError with the traceback for a bug.
        """
        return in_order(self.run(function, {str(i): cell for i, cell in enumerate(cells)}))

    @property
    def is_distant(self) -> bool:
        """Whether cells run on other machines."""
        return self._ray is not None

    def _begin(self, function: Callable[[C], R], cells: Mapping[str, C]) -> Generator[Outcome[R], None, None]:
        if not cells:
            return _in_process(function, cells)
        if self.is_distant:
            self.join()
            return _on_ray(function, cells, self._jobs)
        from joblib import cpu_count  # most commands run no cells in parallel

        wanted = min(self._jobs or cpu_count(), len(cells))
        if wanted == 1:
            return _in_process(function, cells)
        self._workers = max(self._workers, wanted)
        return _on_loky(function, cells, self._workers)


def in_order(outcomes: Generator[Outcome[R], None, None]) -> Generator[R, None, None]:
    """Yield the values of cells 0, 1, 2 ... until the first failure."""
    early: dict[str, Outcome[R]] = {}
    given = 0
    with closing(outcomes):
        for outcome in outcomes:
            early[outcome.key] = outcome
            while str(given) in early:
                yield _value(early.pop(str(given)))
                given += 1


def _value(outcome: Outcome[R]) -> R:
    if outcome.error is None:
        return cast(R, outcome.value)
    if outcome.trace is not None:
        raise RuntimeError(f"in a worker:\n{outcome.trace}")
    raise DsimError(outcome.error)


def attempt(function: Callable[[C], R], version: str, key: str, cell: C) -> Outcome[R]:
    try:
        if version != __version__:
            raise DsimError(f"the worker has dsim {__version__} and this machine {version}, expected the same")
        return Outcome(key, function(cell))
    except DsimError as error:
        return Outcome(key, error=_line(error), refused=version == __version__)
    except (Exception, SystemExit) as error:
        if line := fault_in_code(error):
            return Outcome(key, error=line, refused=True)
        return Outcome(key, error=f"{type(error).__name__}: {_line(error)}", trace=traceback.format_exc())


def _deaf_attempt(function: Callable[[C], R], version: str, key: str, cell: C) -> Outcome[R]:
    """For a local process, which ignores Ctrl-C."""
    for number in DEAF_TO:
        signal.signal(number, signal.SIG_IGN)
    if not sys.warnoptions:
        warnings.simplefilter("ignore")  # users can do nothing about them
    return attempt(function, version, key, cell)


def _in_process(function: Callable[[C], R], cells: Mapping[str, C]) -> Generator[Outcome[R], None, None]:
    for key, cell in cells.items():
        yield attempt(function, __version__, key, cell)


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


@contextmanager
def _quiet_as_work_is_thrown_away() -> Iterator[None]:
    """Hide the traceback of joblib's thread when an interrupt drops its work."""
    before = threading.excepthook

    def say(args: threading.ExceptHookArgs) -> None:
        name = "" if args.thread is None else args.thread.name
        if not (name == "ExecutorManagerThread" and args.exc_type is KeyError):
            before(args)

    threading.excepthook = say
    try:
        yield
    finally:
        threading.excepthook = before


def _on_loky(function: Callable[[C], R], cells: Mapping[str, C], jobs: int) -> Generator[Outcome[R], None, None]:
    from joblib import Parallel, delayed
    from joblib.externals.loky.process_executor import TerminatedWorkerError

    left = dict(cells)
    crashes = 0
    with _quiet_as_work_is_thrown_away():
        while left:
            # A batch would delay finished cells, and lose them with the worker.
            parallel = Parallel(jobs, backend="loky", return_as="generator_unordered", batch_size=1)
            outcomes = None
            try:
                with _deaf_to_interrupts():  # exit may raise an interrupt
                    outcomes = parallel(
                        delayed(_deaf_attempt)(function, __version__, key, cell) for key, cell in left.copy().items()
                    )
                for outcome in outcomes:
                    del left[outcome.key]
                    crashes = 0
                    yield outcome
            except TerminatedWorkerError:
                crashes += 1
                if crashes == MAX_CRASHES:
                    raise DsimError(
                        f"a worker was killed {crashes} times in a row, probably for want of memory; {len(left)} of "
                        f"{len(cells)} cells are left: fewer jobs than {jobs} need less"
                    ) from None
            finally:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # closing early drops work
                    if outcomes is not None:
                        outcomes.close()


def _join(address: str) -> Callable[[], None]:
    """Join a cluster; returns the function that leaves. A probe first: Ray waits minutes, or ends the process."""
    ray = _ray()
    if ray.is_initialized():  # by a notebook
        _check_cpus(ray)
        return lambda: None
    if address != "auto":
        _check_answers(address, ray.util.get_node_ip_address())
    probe = "import ray, sys; ray.init(address=sys.argv[1], log_to_driver=False, logging_level=40)"
    try:
        asked = subprocess.run(
            [sys.executable, "-c", probe, address], capture_output=True, text=True, timeout=JOIN_TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired:
        raise DsimError(f"{address}: answers, but not as a Ray cluster within {JOIN_TIMEOUT:.0f} s") from None
    if asked.returncode:
        said = [line for line in asked.stderr.splitlines() if line.strip()] or ["no reason given"]
        raise DsimError(f"{address}: cannot join the Ray cluster: {said[-1].strip()}")
    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    _check_cpus(ray)
    leave: Callable[[], None] = ray.shutdown
    return leave


def _ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise DsimError("ray is given, and Ray is not installed: pip install '.[cluster]' in a clone of dsim") from None


def _check_answers(address: str, own_address: str) -> None:
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not host or not port.isdigit():
        raise DsimError(f"ray is {cut(address)}, expected HOST:PORT of a Ray cluster, or auto")
    # Ray reads localhost as this machine's address.
    target = own_address if host in ("localhost", "127.0.0.1", "::1") and "ray://" not in address else host
    try:
        socket.create_connection((target.strip("[]"), int(port)), CONNECT_TIMEOUT).close()
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise DsimError(f"{address}: no Ray cluster answers there: {reason}") from None


def _check_cpus(ray: Any) -> None:
    if ray.cluster_resources().get("CPU", 0) < 1:
        ray.shutdown()
        raise DsimError("the Ray cluster has no CPU for tasks, expected at least 1")


def _on_ray(function: Callable[[C], R], cells: Mapping[str, C], jobs: int | None) -> Generator[Outcome[R], None, None]:
    """Send short cells in batches; files are read where they are named, as on a shared folder."""
    ray = _ray()
    # A cell's exception returns as a value: only lost workers or nodes are retried.
    task = ray.remote(num_cpus=1, max_retries=MAX_RETRIES, scheduling_strategy="SPREAD")(_attempt_all)
    waiting = list(cells.items())[::-1]
    flying: dict[Any, list[tuple[str, C]]] = {}
    alone: set[str] = set()  # cells of a lost batch
    seconds: list[float] = []
    watch = _Cluster(ray)
    try:
        work = ray.put(cloudpickled(function))
        while waiting or flying:
            while waiting and len(flying) < (jobs or 2 * watch.cpus):
                mean = sum(seconds) / len(seconds) if seconds else BATCH_SECONDS
                share = -(-len(waiting) // (2 * max(1, watch.cpus)))  # so that the last batches end together
                size = max(1, min(int(BATCH_SECONDS / max(mean, 1e-9)), share, MOST_IN_BATCH))
                batch = [waiting.pop()]
                while len(batch) < size and waiting and not alone & {batch[0][0], waiting[-1][0]}:
                    batch.append(waiting.pop())
                flying[task.remote(work, cloudpickled(batch), [key for key, _ in batch], __version__)] = batch
            ready, _ = ray.wait(list(flying), num_returns=1, timeout=1.0)
            watch.look(len(waiting) + sum(map(len, flying.values())), len(cells))
            for ref in ready:
                batch = flying.pop(ref)
                try:
                    outcomes, took = ray.get(ref)
                except ray.exceptions.RayError as error:
                    if len(batch) > 1:  # any of them may have killed the worker
                        waiting += batch
                        alone.update(key for key, _ in batch)
                        continue
                    yield Outcome(batch[0][0], error=f"{type(error).__name__}: {_line(error)}")
                    continue
                seconds.append(took / len(batch))
                yield from outcomes
    finally:
        for ref in () if watch.is_lost else flying:
            ray.cancel(ref, force=True)


def cloudpickled(value: Any) -> bytes:
    """For another machine of the cluster, which Ray trusts too."""
    from ray import cloudpickle

    data: bytes = cloudpickle.dumps(value)
    return data


def _attempt_all(work: bytes, batch: bytes, keys: list[str], version: str) -> tuple[list[Outcome[Any]], float]:
    """On a cluster machine: outcomes, and the seconds they took."""
    from ray import cloudpickle

    if version != __version__:  # its pickles may be unreadable
        return [attempt(str, version, key, "") for key in keys], 0.0
    function = cloudpickle.loads(work)
    began = time.perf_counter()
    outcomes = [attempt(function, version, key, cell) for key, cell in cloudpickle.loads(batch)]
    return outcomes, time.perf_counter() - began


class _Cluster:
    """Checks the cluster's head and CPUs while cells run."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._head = ray.get_runtime_context().gcs_address
        self._looked = self._fed = time.monotonic()
        self._silent_since: float | None = None
        self.cpus = max(1, int(ray.cluster_resources().get("CPU", 0)))
        self.is_lost = False

    def look(self, left: int, all_cells: int) -> None:
        """Every LOOKS seconds: DsimError if the head is silent or no CPU is left, before Ray ends the process."""
        now = time.monotonic()
        if now - self._looked < LOOKS:
            return
        self._looked = now
        host, _, port = self._head.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), 1.0).close()
        except OSError:
            self._silent_since = self._silent_since or now
            self.is_lost = now - self._silent_since > HEAD_LOST
            if self.is_lost:
                # Ray's shutdown at exit would wait for the head.
                atexit.unregister(self._ray.shutdown)
                raise LostError(
                    f"the head of the Ray cluster at {self._head} has not answered for {HEAD_LOST:.0f} s; {left} of "
                    f"{all_cells} cells are left"
                ) from None
            return  # a call would wait for the head
        self._silent_since = None
        cpus = int(self._ray.cluster_resources().get("CPU", 0))
        if cpus >= 1:
            self.cpus, self._fed = cpus, now
        elif now - self._fed > STARVED:
            raise DsimError(f"the Ray cluster lost its CPUs {STARVED:.0f} s ago; {left} of {all_cells} cells are left")


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or "no reason given"
