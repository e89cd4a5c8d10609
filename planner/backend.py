"""Many cells through one function, on one core, on all cores or on a Ray cluster: the same answers, as they finish."""

import importlib
import logging
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ..engine.errors import DsimError

C = TypeVar("C")
R = TypeVar("R")

BACKENDS = ("local", "ray")
MAX_CRASHES = 3  # of local workers, one after another, without a cell finished in between
MAX_RETRIES = 5  # of a cell whose Ray worker was lost
CONNECT_TIMEOUT = 5.0  # s, for the address to answer at all
JOIN_TIMEOUT = 30.0  # s, for what answers to prove a Ray cluster
STARVED = 60.0  # s without a CPU left in the cluster


@dataclass(frozen=True)
class Outcome(Generic[R]):
    """What became of a cell: its value, or why there is none, in one line."""

    key: str
    value: R | None = None
    error: str | None = None
    refused: bool = False  # the error is a DsimError: the cell asks for what cannot be, today and tomorrow


def run_cells(
    function: Callable[[C], R],
    cells: Mapping[str, C],
    *,
    backend: str = "local",
    jobs: int | None = None,
    address: str | None = None,
) -> Generator[Outcome[R], None, None]:
    """One outcome a cell, in the order in which they finish; the rest goes on when one fails.

    `function` and the cells travel to other processes by pickle. `jobs` is how many run at once: all cores by default,
    on Ray as many as the cluster has CPUs. A lost worker's cells are run again. Close the generator to stop early.
    A DsimError tells a wrong setting or an unreachable cluster at once, before the first cell.
    """
    if backend not in BACKENDS:
        raise DsimError(f"backend is {backend}, expected one of: {', '.join(BACKENDS)}")
    if jobs is not None and jobs < 1:
        raise DsimError(f"jobs is {jobs}, expected at least 1")
    if backend == "local" and address is not None:
        raise DsimError(f"address is {address} and backend is local, expected ray")
    if not cells:
        return _in_process(function, cells)
    if backend == "ray":
        shut_down = _join(address)
        return _on_ray(function, cells, jobs, shut_down)
    from joblib import cpu_count  # imported here: most commands run nothing in parallel

    jobs = min(jobs or cpu_count(), len(cells))
    return _in_process(function, cells) if jobs == 1 else _on_cores(function, cells, jobs)


def _attempt(function: Callable[[C], R], key: str, cell: C) -> Outcome[R]:
    """Run a cell where it is; its exceptions stay with it."""
    try:
        return Outcome(key, function(cell))
    except DsimError as error:
        return Outcome(key, error=_line(error), refused=True)
    except Exception as error:
        return Outcome(key, error=f"{type(error).__name__}: {_line(error)}")


def _in_process(function: Callable[[C], R], cells: Mapping[str, C]) -> Generator[Outcome[R], None, None]:
    for key, cell in cells.items():
        yield _attempt(function, key, cell)


@contextmanager
def deaf_to_interrupts() -> Iterator[None]:
    """Processes begun in here ignore Ctrl-C, which a terminal sends to all: the one that began them ends them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _on_cores(function: Callable[[C], R], cells: Mapping[str, C], jobs: int) -> Generator[Outcome[R], None, None]:
    from joblib import Parallel, delayed
    from joblib.externals.loky.process_executor import TerminatedWorkerError

    left = dict(cells)
    crashes = 0
    while left:
        # One cell a task: a batch would hold finished cells back, and lose them with the worker.
        parallel = Parallel(jobs, backend="loky", return_as="generator_unordered", batch_size=1)
        with deaf_to_interrupts():
            outcomes = parallel(delayed(_attempt)(function, key, cell) for key, cell in left.copy().items())
        try:
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
                warnings.simplefilter("ignore")  # that what was begun is thrown away is what closing early means
                outcomes.close()


def _join(address: str | None) -> Callable[[], None]:
    """Join the cluster; what leaves it again. Ray itself waits for minutes, or ends the process: so ask first."""
    ray = _ray()
    if ray.is_initialized():  # a notebook's own connection
        _check_cpus(ray)
        return lambda: None
    if address is None:
        raise DsimError("backend is ray without an address, expected HOST:PORT of a cluster, or auto")
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
    """Ray, an extra that most never need."""
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise DsimError("backend is ray, and Ray is not installed: pip install 'dsim[cluster]'") from None


def _check_answers(address: str, own_address: str) -> None:
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not host or not port.isdigit():
        raise DsimError(f"address is {address}, expected HOST:PORT of a Ray cluster, or auto")
    # Ray reads localhost as this machine's own address.
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


def _on_ray(
    function: Callable[[C], R], cells: Mapping[str, C], jobs: int | None, shut_down: Callable[[], None]
) -> Generator[Outcome[R], None, None]:
    ray = _ray()
    # A cell's own exceptions come back as values; what is retried is the loss of a worker or a node.
    task = ray.remote(num_cpus=1, max_retries=MAX_RETRIES, scheduling_strategy="SPREAD")(_attempt)
    waiting = list(cells.items())[::-1]
    flying: dict[Any, str] = {}
    fed = time.monotonic()
    try:
        shared = ray.put(function)
        while waiting or flying:
            while waiting and (jobs is None or len(flying) < jobs):
                key, cell = waiting.pop()
                flying[task.remote(shared, key, cell)] = key
            ready, _ = ray.wait(list(flying), num_returns=1, timeout=1.0)
            if ready or ray.cluster_resources().get("CPU", 0) >= 1:
                fed = time.monotonic()
            elif time.monotonic() - fed > STARVED:
                left = len(waiting) + len(flying)
                raise DsimError(
                    f"the Ray cluster lost its CPUs {STARVED:.0f} s ago; {left} of {len(cells)} cells are left"
                )
            for ref in ready:
                key = flying.pop(ref)
                try:
                    yield ray.get(ref)
                except ray.exceptions.RayError as error:
                    yield Outcome(key, error=f"{type(error).__name__}: {_line(error)}")
    finally:
        _cancel(ray, flying)
        shut_down()


def _cancel(ray: Any, refs: Iterable[Any]) -> None:
    for ref in refs:
        ray.cancel(ref, force=True)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or "no reason given"
