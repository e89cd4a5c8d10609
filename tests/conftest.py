"""What every test may count on, and how the tests share the cores."""

import gc
import importlib
import importlib.util
import os
import signal
import sys
from collections.abc import Generator

import pytest

# Compiled modules are kept, or each of the many processes that tests start would compile them all again.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# A core a worker: threads of PyTorch that wait for a core by spinning made some tests ten times as slow.
for threads in ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS"):
    os.environ.setdefault(threads, "1")

MOST_WORKERS = 8  # each loads PyTorch: more would want memory rather than cores
# First, in one process, what compiles every policy and then some of their rules again by other ways in: it keeps what
# they share, and the others find it compiled.
COMPILING = (
    "tests/engine/test_golden.py",
    "tests/sim/test_ahead.py",
    "tests/engine/test_run.py",
    "tests/engine/test_prefix.py",
    "tests/engine/test_threshold.py",
    "tests/sim/test_failures.py",
    "tests/planner/test_outside.py",
    "tests/comparison/test_logged.py",
    "tests/cli/test_own_policy.py",
)
# The longest begin another worker's share, so that none is left alone with one of them at the end.
LONGEST = ("tests/kernels/test_warm.py", "tests/kernels/test_compile.py")
# Last what would otherwise have compiled policies before those, in processes that share none of their rules.
REPLAYING = ("tests/planner/", "tests/following/", "tests/report/test_html.py")

# In a new environment workers make bytecode of what they import: each begins with another of these.
LIBRARIES = ("torch", "scipy.stats", "pandas")

# A shell that runs the tests in the background has them ignore Ctrl-C, which some of them are about.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


HAS_TORCH = importlib.util.find_spec("torch") is not None
# Its conftest imports PyTorch before any test can be skipped.
collect_ignore = [] if HAS_TORCH else ["kernels"]


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Skip a module or folder of tests that imports PyTorch where PyTorch is not installed (Python 3.13)."""
    report = yield
    if report.failed and not HAS_TORCH and "No module named 'torch'" in str(report.longrepr):
        report.outcome, report.longrepr = "skipped", (str(collector.path), 0, "Skipped: PyTorch is not installed")
    return report


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    # Tests step a little through many policies: compiling each would take longer than all its steps.
    for patience in ("PATIENCE", "STEPS_PATIENCE"):
        monkeypatch.setattr(f"dsim.engine.core.{patience}", 1_000_000)
    core = importlib.import_module("dsim.engine.core")
    for made in core._CORES.values():  # the steps of the tests before count for nothing
        if made._spent and all(map(core.is_ours, made._answers.values())):
            made._spent = 0
            made._kept.clear()


@pytest.fixture(autouse=True)
def _signals() -> Generator[None, None, None]:
    """Restore handlers: a whole command leaves Ctrl-C to the system, and Ray takes SIGTERM."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)


@pytest.fixture
def compiled(_patient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a test of what is compiled."""
    for patience in ("PATIENCE", "STEPS_PATIENCE"):
        monkeypatch.setattr(f"dsim.engine.core.{patience}", 0)


@pytest.fixture
def uncompiled(_patient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules stay in Python, users' too: compiling each takes ten seconds."""
    for patience in ("PATIENCE", "STEPS_PATIENCE"):
        monkeypatch.setattr(f"dsim.engine.core.{patience}", 10**12)
    monkeypatch.setattr("dsim.engine.core.is_ours", lambda answer: True)
    monkeypatch.setattr("dsim.engine.core._CORES", {})


def pytest_configure() -> None:
    """As a worker of several, import first what the others do not."""
    if worker := os.environ.get("PYTEST_XDIST_WORKER"):
        library = LIBRARIES[int(worker.removeprefix("gw")) % len(LIBRARIES)]
        if HAS_TORCH or library != "torch":
            importlib.import_module(library)


@pytest.hookimpl(optionalhook=True)  # `-p no:xdist` works too
def pytest_xdist_auto_num_workers() -> int:
    """Workers of `-n auto`: one more than the cores that this process may use, since some tests wait for a clock."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores + 1, MOST_WORKERS)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What others wait for first; the rest as it is written, which keeps a file's shared worlds together."""

    def place(item: pytest.Item) -> tuple[int, bool]:
        first = next((i for i, name in enumerate(COMPILING) if item.nodeid.startswith(name)), len(COMPILING))
        return first, item.nodeid.startswith(REPLAYING)

    rest = sorted((item for item in items if not item.nodeid.startswith(LONGEST)), key=place)
    longest = [item for item in items if item.nodeid.startswith(LONGEST)]
    share = len(items) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    items[:] = rest[:share] + longest + rest[share:]


# What imports leave is looked through once and not again at every collection: it is never garbage.
gc.disable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """From here on cycles are looked for again, among what tests make; in the process that hands them out too."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()
