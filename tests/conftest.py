"""What every test may count on, and how the tests share the cores."""

import contextlib
import gc
import importlib
import importlib.util
import multiprocessing
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Generator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

# Compiled modules are kept, or each of the many processes that tests start would compile them all again.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# A core a worker: threads of PyTorch that wait for a core by spinning made some tests ten times as slow.
for threads in ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS"):
    os.environ.setdefault(threads, "1")

MOST_WORKERS = 8  # each loads PyTorch: more would want memory rather than cores
# First what takes longest, and in one process what compiles: others find it compiled.
FIRST = (
    "tests/engine/test_golden.py", "tests/sim/test_ahead.py", "tests/engine/test_run.py",
    "tests/kernels/test_warm.py", "tests/kernels/test_compile.py",
)  # fmt: skip
# Last, in each worker, what runs policies: two workers would compile the same one at once.
REPLAYING = ("api", "cli", "comparison", "engine", "files", "following", "planner", "report", "results", "sim")

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


def set_patience(monkeypatch: pytest.MonkeyPatch, patience: int) -> None:
    for name in ("PATIENCE", "STEPS_PATIENCE"):
        monkeypatch.setattr(f"dsim.engine.core.{name}", patience)


@pytest.fixture(autouse=True)
def _patient(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a quick test run the policies of golden.COMPILED compiled and all others in plain Python.

    A slow test's policies begin in plain Python and are compiled where a run is long.
    """
    core = importlib.import_module("dsim.engine.core")
    set_patience(monkeypatch, 1_000_000)
    if core.JIT and not is_slow(request.node):
        golden = importlib.import_module("dsim.tests.engine.golden")
        loops = core._run, core._serve
        monkeypatch.setattr(core, "is_kept", lambda rule, answers, kinds: rule in loops and golden.is_compiled(answers))

        def bind(rule: Any, answers: Any, *more: Any, **options: Any) -> Any:
            assert golden.is_compiled(answers), COMPILES
            return importlib.import_module("dsim.engine.jit").bind(rule, answers, *more, **options)

        monkeypatch.setattr(core, "bind", bind)
    for made in core._CORES.values():  # the steps of the tests before count for nothing
        made._spent = 0
        made._kept.clear()


@pytest.fixture(autouse=True)
def _in_an_empty_folder(request: pytest.FixtureRequest) -> Generator[None]:
    """Run a test in an empty folder of its own, but where few tests write files."""
    if request.path.parent.name in ("engine", "hooks", "kernels", "live", "profiler", "sim"):
        yield
        return
    with contextlib.chdir(request.getfixturevalue("tmp_path")):
        yield


@pytest.fixture
def two_replications(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search confirms its winners by two replays, not by ten."""
    monkeypatch.setattr("dsim.planner.tune.REPLICATIONS", 2)


@pytest.fixture(autouse=True)
def _signals() -> Generator[None, None, None]:
    """Restore handlers: a whole command leaves Ctrl-C to the system, and Ray takes SIGTERM."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)


COMPILES = (
    "a quick test compiles a policy, which takes ten seconds: use one of golden.COMPILED, a shorter run or the fixture "
    "`uncompiled`, or mark the test `slow`"
)


@pytest.fixture
def compiled(_patient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a test of what is compiled."""
    monkeypatch.setattr("dsim.engine.core.bind", importlib.import_module("dsim.engine.jit").bind)
    set_patience(monkeypatch, 0)


@pytest.fixture
def uncompiled(_patient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules stay in Python: compiling a policy's takes ten seconds."""
    monkeypatch.setattr("dsim.engine.core.is_kept", lambda rule, answers, kinds: False)
    set_patience(monkeypatch, 10**12)
    monkeypatch.setattr("dsim.engine.core._CORES", {})


@pytest.fixture(scope="module")
def _budgets_of_processor_time() -> Generator[None, None, None]:
    """Let a budget of seconds measure as much on a busy machine as on an idle one."""
    clocks = SimpleNamespace(**{**vars(time), "monotonic": time.process_time})
    with pytest.MonkeyPatch.context() as patch:
        if HAS_TORCH:
            patch.setattr("dsim.profiler.measure.time", clocks)
        yield


@pytest.fixture
def of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test's rules are the engine's own: they may answer all its questions, and see its records."""
    monkeypatch.setattr("dsim.engine.core.is_ours", lambda answer: True)


def is_slow(test: pytest.Item) -> bool:
    """Whether a test is in the slow lane."""
    return test.get_closest_marker("slow") is not None


QUICK_LIMIT = 2.0  # s of processor time of a quick test
CALIBRATION = 0.06  # s that `calibrate` takes on the machine of that limit
# Where there is a GPU kernels are compiled, and where numba is off shared rules are not: a test takes what it takes.
LIMITED = "CI" in os.environ and os.environ.get("NUMBA_DISABLE_JIT", "0") == "0" and not os.path.exists("/dev/nvidia0")
_STARTED = pytest.StashKey[float]()
_once = 0.0  # s of processor time for what is done once a process, whichever test is the first that needs it


def processor_time() -> float:
    """Processor time (s) of this process and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def calibrate() -> float:
    """Processor time (s) of a fixed piece of Python: how slow this machine is now."""
    start = time.process_time()
    sum(i * i for i in range(1_000_000))
    return time.process_time() - start


@contextlib.contextmanager
def done_once() -> Generator[None]:
    """Count processor time as `_once`, unless something around it does."""
    global _once
    before, start = _once, processor_time()
    try:
        yield
    finally:
        _once = before + processor_time() - start


class Compilations:
    """Listens to numba and counts its compilations as done once: shipped rules, which all policies share."""

    def __init__(self) -> None:
        self._open: list[contextlib.AbstractContextManager[None]] = []

    def notify(self, event: Any) -> None:
        if event.is_start:
            self._open.append(done_once())
            self._open[-1].__enter__()
        else:
            self._open.pop().__exit__(None, None, None)


def count_imports() -> None:
    """Count imports as done once."""
    exec_module = SourceFileLoader.exec_module

    def counted(loader: SourceFileLoader, module: ModuleType) -> None:
        with done_once():
            exec_module(loader, module)

    SourceFileLoader.exec_module = counted  # type: ignore[method-assign]


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> Generator[None, Any, Any]:
    """Count fixtures that tests share as done once."""
    with contextlib.nullcontext() if fixturedef.scope == "function" else done_once():
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Note when a test starts, in processor time."""
    item.stash[_STARTED] = processor_time() - _once
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fail a quick test that uses more than QUICK_LIMIT of processor time, its fixtures and processes included."""
    report = yield
    if call.when != "teardown" or not report.passed or is_slow(item) or not LIMITED:
        return report
    if multiprocessing.active_children():  # or workers end, and their time counts, while another test runs
        importlib.import_module("joblib.externals.loky").get_reusable_executor().shutdown(wait=True)
    used = processor_time() - _once - item.stash[_STARTED]
    if used > QUICK_LIMIT:
        # Twice: other workers share the cores.
        limit = 2 * QUICK_LIMIT * max(1.0, calibrate() / CALIBRATION)
        if used > limit:
            report.outcome = "failed"
            report.longrepr = (
                f"{item.nodeid} used {used:.1f} s of processor time, expected at most {limit:.1f} s of a quick test: "
                "make its world smaller, or mark it `slow`"
            )
    return report


def pytest_configure() -> None:
    """As a worker of several, import first what the others do not; count imports and compilations apart."""
    count_imports()
    event = importlib.import_module("numba.core.event")
    event.Listener.register(Compilations)
    event.register("numba:compile", Compilations())
    if worker := os.environ.get("PYTEST_XDIST_WORKER"):
        library = LIBRARIES[int(worker.removeprefix("gw")) % len(LIBRARIES)]
        if HAS_TORCH or library != "torch":
            importlib.import_module(library)


@pytest.hookimpl(optionalhook=True)  # `-p no:xdist` works too
def pytest_xdist_auto_num_workers() -> int:
    """Workers of `-n auto`: one more than the cores that this process may use, since some tests wait for a clock."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores + 1, MOST_WORKERS)


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Generator[None]:
    """Have cases that are `sampled` in the quick lane, and give each worker a share in the order that FIRST says."""
    cases: Counter[str] = Counter()
    for item in items:
        if sampled := item.get_closest_marker("sampled"):
            function = item.nodeid.partition("[")[0]
            if cases[function] % sampled.args[0]:
                item.add_marker("slow")
            cases[function] += 1
    yield
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    folders = {item: item.path.relative_to(Path(__file__).parent).parts[0] for item in items}
    halves = [[item for item in items if (folders[item] in REPLAYING) == replaying] for replaying in (False, True)]
    items.clear()
    for i in range(workers):
        share = [item for half in halves for item in half[i * len(half) // workers : (i + 1) * len(half) // workers]]
        items += sorted(share, key=lambda item: not item.nodeid.startswith(FIRST))


# What imports leave is looked through once and not again at every collection: it is never garbage.
gc.disable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """From here on cycles are looked for again, among what tests make; in the process that hands them out too."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()
