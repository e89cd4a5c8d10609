"""What happens to a machine while a command writes: full disks, kills, signals, and two at once.

A command runs in a child of this process, which has loaded everything: a fork costs nothing, an interpreter seconds.
"""

import contextlib
import ctypes
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import dsim
from dsim.__main__ import main
from dsim.files import interrupt
from dsim.planner.memo import FILES as STORE_FILES
from dsim.planner.memo import STORE
from dsim.results.world import World

from ...tests.stored import rows

EXAMPLE = Path(dsim.__file__).parent / "examples" / "steplog.jsonl"
ENDED = 120  # s of the CPU for one command, and ten times as long by the clock: others may work on the machine


@dataclass(frozen=True)
class Writer:
    """A command that writes, and the places it writes to."""

    name: str
    arguments: tuple[str, ...]
    places: tuple[str, ...]
    adds: bool = False  # it goes on with what is there, and needs no --force
    measures: bool = False  # the clock is in what it writes: a second run's bytes are others

    @property
    def replaces_as_it_goes(self) -> bool:
        """Whether its store begins anew, and its results are replaced once a piece of their successor is whole."""
        return self.name in ("sweep --force", "tune --force", "plan --force")

    @property
    def fine(self) -> tuple[int, ...]:
        """The exit codes of a run that was left alone: 1 is a verdict on what was measured."""
        return (0, 1) if self.measures else (0,)


SWEEP = '[base]\ntrace = "trace.jsonl"\npolicy = "ar"\n[grid]\nrate = [1, 2, 3]\n'
SPACE = 'policy = ["optimus"]\nmax_chunk = [4, 8, 16]\n'
TUNE = ("tune", "trace.jsonl", "--space", "space.toml", "--slo", "ttft=2s", "--trials", "3")
CAPACITY = (
    "capacity", "trace.jsonl", "--slo", "p90:norm_latency=60ms", "--policy", "ar", "--precision", "20%",
    "--num-requests", "100",
    "--jobs", "1",
)  # fmt: skip
PLAN = (
    "plan", "trace.jsonl", "--profile", "h100-qwen3-8b-ar", "--policy", "ar,max_batch=1",
    "--policy", "ar,max_batch=8", "--arrival", "poisson",
    "--lengths", "fixed:512,1", "--slo", "mean:e2el=150ms", "--num-requests", "100", "--rate", "3", "--jobs", "1",
    "-o", "out",
)  # fmt: skip
LIVE = ("--lengths", "fixed:8,4", "--policy", "lmdeploy-bd32:4,max_batch=4,page_size=8")
WRITERS = (
    Writer("replay", ("replay", "trace.jsonl", "--policy", "ar", "-o", "out", "--force"), ("out",)),
    Writer("sweep", ("sweep", "sweep.toml", "-o", "out", "--jobs", "1"), ("out",), adds=True),
    Writer("sweep --force", ("sweep", "sweep.toml", "-o", "out", "--jobs", "1", "--force"), ("out",)),
    Writer("tune", (*TUNE, "-o", "out"), ("out",), adds=True),
    Writer("tune --force", (*TUNE, "-o", "out", "--force"), ("out",)),
    Writer("capacity", (*CAPACITY, "-o", "out", "--force"), ("out",)),
    Writer("plan", PLAN, ("out",), adds=True),
    Writer("plan --force", (*PLAN, "--force"), ("out",)),
    Writer("compare", ("compare", "run", "run", "-o", "out", "--force"), ("out",)),
    Writer("profile --from-log", ("profile", "--from-log", str(EXAMPLE), "-o", "p.json", "--force"),
           ("p.json", "p.html")),
    Writer("profile --roofline", ("profile", "--roofline", "h200", "--model", "SDAR-8B", "-o", "p.json", "--force"),
           ("p.json",)),
    Writer("import", ("import", "bench.json", "-o", "out", "--force"), ("out",)),
    Writer("trace convert", ("trace", "convert", "azure-conv", "t.jsonl", "--force"), ("t.jsonl",)),
    Writer("trace synth", ("trace", "synth", "t.jsonl", "--rate", "5", "--num-requests", "5000", "--force"),
           ("t.jsonl",)),
)  # fmt: skip


# These run a model: PyTorch is loaded before the first fork, and computes on one thread.
ON_A_DEVICE = (
    Writer("live", ("live", "trace.jsonl", "--model", "model", "--commits", "model", "--prompts", "ids.jsonl",
                    "--num-requests", "6", "--rate", "100", *LIVE, "-o", "out", "--force"), ("out",),
           measures=True),
    Writer("profile --model", ("profile", "--model", "model", "--budget", "3s", "--prompts", "ids=ids.jsonl",
                               "--thresholds", "0.9", "--max-batch", "4", "-o", "p.json", "--force"),
           ("p.json", "p.html"), measures=True),
    Writer("validate", ("validate", "--model", "model", "--profile", "of-model.json", "--load", "0.5", "--seconds",
                        "0.2", *LIVE, "-o", "out"), ("out",), adds=True, measures=True),
)  # fmt: skip
SERVE = ("serve", "--twin", "a100-sdar-8b", "--port", "0", "--policy", "ar", "-o", "served", "--force")


def prepare_device(folder: Path) -> bool:
    """What the commands of a device read besides; False where PyTorch is not installed."""
    if find_spec("torch") is None:
        return False
    import torch

    from dsim.live.config import ModelConfig
    from dsim.live.weights import random_model
    from dsim.research.tiny.saved import save_model

    torch.set_num_threads(1)
    small = ModelConfig("small", 2, 48, 4, 2, 16, 80, 97, 128, 4, 96, rope_theta=1e4)
    save_model(random_model(small, "cpu", torch.float32), folder / "model", torch.float32)
    (folder / "ids.jsonl").write_text(json.dumps(list(range(90))) + "\n")
    [profiler] = (writer for writer in ON_A_DEVICE if writer.name == "profile --model")
    code, said = ended(run((*profiler.arguments[:-3], "-o", "of-model.json"), folder))
    assert code in (0, 1), said  # 1: this machine's noise makes the fit doubt itself
    return True


def prepare(folder: Path) -> None:
    """What the commands read."""
    from dsim.traces import synth, write

    clients = Path(dsim.__file__).parent / "tests" / "comparison" / "clients"
    shutil.copy(clients / "vllm_bench.json", folder / "bench.json")
    write(synth("poisson", 5.0, lengths="fixed:20,16", num_requests=120), folder / "trace.jsonl")
    (folder / "sweep.toml").write_text(SWEEP)
    (folder / "space.toml").write_text(SPACE)
    World(str(folder / "trace.jsonl"), policy="ar").run()  # compiled once, for all children
    assert ended(run(("replay", "trace.jsonl", "--policy", "ar", "-o", "run"), folder))[0] == 0


def run(arguments: tuple[str, ...], folder: Path, before: Callable[[], object] = lambda: None) -> int:
    """Begin a command in a child; its process."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    try:
        os.chdir(folder)
        os.setsid()
        for name, number in (("stdout", 1), ("stderr", 2)):
            descriptor = os.open(said_by(os.getpid(), name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(descriptor, number)
        sys.stdout = os.fdopen(1, "w")
        sys.stderr = os.fdopen(2, "w", buffering=1)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.argv = ["dsim", *arguments]
        resource.setrlimit(resource.RLIMIT_CPU, (ENDED, ENDED))
        before()
        main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 99
    # As an interpreter ends: the error is gone by now, with its frames and what they held.
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    os._exit(code)


def begun(writer: Writer, folder: Path, before: Callable[[], object] = lambda: None) -> int:
    """Begin a writer's command in a child."""
    return run(writer.arguments, folder, before)


def said_by(child: int, stream: str) -> Path:
    """Where a child's output goes: not on the disk that is full."""
    return Path(tempfile.gettempdir()) / f"attack-{child}.{stream}"


def ended(child: int) -> tuple[int, str]:
    """How a child ended, as a shell says it, and what it said on standard error."""
    begin = time.monotonic()
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        if time.monotonic() - begin > 10 * ENDED:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise AssertionError(f"still running after {10 * ENDED} s")
        time.sleep(0.005)
    said_by(child, "stdout").unlink()
    said = said_by(child, "stderr").read_text(errors="replace")
    said_by(child, "stderr").unlink()
    code = os.waitstatus_to_exitcode(status)
    return (code if code >= 0 else 128 - code), said


def tree(folder: Path, places: tuple[str, ...]) -> dict[str, bytes]:
    """Every file at some places."""
    files = [p for place in places for p in (folder / place, *(folder / place).rglob("*")) if p.is_file()]
    return {str(p.relative_to(folder)): p.read_bytes() for p in files}


def hidden(folder: Path) -> list[str]:
    """What is left over, hidden, anywhere below a folder."""
    return sorted(str(p.relative_to(folder)) for p in folder.rglob(".*dsim-*"))


def unlike(now: dict[str, bytes], whole: dict[str, bytes], writer: Writer) -> list[str]:
    """Files that differ, other than the store of what was done, in which a stop shows."""
    if writer.measures:  # the clock is in it: the same files, and no other
        return sorted(now.keys() ^ whole.keys())
    names = now.keys() | whole.keys()
    return sorted(n for n in names if now.get(n) != whole.get(n) and Path(n).name not in STORE_FILES)


def is_one_error(said: str) -> bool:
    """Whether a command told its error in one line, and nothing of Python's."""
    lines = [line for line in said.splitlines() if line.startswith("Error: ")]
    return len(lines) == 1 and "Traceback" not in said and "Exception ignored" not in said


def full_disk(writer: Writer, folder: Path, size: int, really: bool = False) -> str:
    """Run where no file may grow beyond `size` bytes: one line, exit 1, and what was there is there.

    really: the folder's disk, a small one, is filled up to those bytes instead.
    """
    _clear(folder, writer)
    assert ended(begun(writer, folder))[0] in writer.fine
    was = tree(folder, writer.places)
    limit = (lambda: None) if really else lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    with _filled(folder, size) if really else contextlib.nullcontext():
        code, said = ended(begun(writer, folder, limit))
    now = tree(folder, writer.places)
    assert hidden(folder) == [], f"left behind: {hidden(folder)}"
    assert "Traceback" not in said, said
    if code == 0 or (code in writer.fine and not said):
        return "fitted"
    assert (code, is_one_error(said)) == (1, True), (code, said)
    if writer.adds:  # what was added so far is kept; nothing that was there is cut short
        assert set(was) <= set(now)
    elif not (writer.replaces_as_it_goes and _holds_a_record(folder / writer.places[0])):
        begun_anew = STORE_FILES if writer.replaces_as_it_goes else ()
        changed = [name for name in was if now.get(name) != was[name] and Path(name).name not in begun_anew]
        assert changed in ([], ["p.json"]), f"lost or changed: {changed}"
    return "told"


def _holds_a_record(folder: Path) -> bool:
    """Whether a folder's run has finished a first piece of its work."""
    return bool(rows(folder / STORE))


def unwritable(writer: Writer, folder: Path, before: Callable[[Path], object]) -> str:
    """Run where nothing can be written, as `before` makes it: one line, exit 2, and no work before it is told."""
    _clear(folder, writer)
    was = sorted(folder.rglob("*"))
    begin = resource.getrusage(resource.RUSAGE_CHILDREN)
    code, said = ended(begun(writer, folder, lambda: before(folder)))
    took = resource.getrusage(resource.RUSAGE_CHILDREN)
    folder.chmod(0o755)
    assert (code, is_one_error(said)) == (2, True), (code, said)
    assert sorted(folder.rglob("*")) == was
    worked = took.ru_utime + took.ru_stime - begin.ru_utime - begin.ru_stime
    assert worked < 5, f"told after {worked:.1f} s of work"
    return "told"


def without_rights(folder: Path) -> None:
    """Take from this process the right to write to a folder, and a superuser's right to do so all the same."""
    folder.chmod(0o555)
    header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()  # linux/capability.h, version 3
    if ctypes.CDLL(None, use_errno=True).capset(header, none):
        raise OSError(ctypes.get_errno(), "capset")


def read_only(folder: Path) -> None:
    """Mount a folder read-only for this process alone, as a superuser may."""
    new_mounts = 0x20000  # CLONE_NEWNS of linux/sched.h
    if ctypes.CDLL(None, use_errno=True).unshare(new_mounts):
        raise OSError(ctypes.get_errno(), "unshare")
    for how in (("--make-rprivate", "/"), ("--bind", folder, folder), ("-o", "remount,ro,bind", folder)):
        subprocess.run(["mount", *how], check=True)
    os.chdir(folder)


def _announced() -> None:
    """Have the command of this process say when it takes signals up, and ignore them once it no longer does."""

    @contextlib.contextmanager
    def ready() -> Iterator[None]:
        with interrupt.as_ctrl_c():
            said_by(os.getpid(), "ready").touch()
            yield
        for number in interrupt.SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    dsim.cli.as_ctrl_c = ready  # type: ignore[attr-defined]


def killed(
    writer: Writer, folder: Path, share: float, number: signal.Signals = signal.SIGKILL, first: bool = False
) -> str:
    """Stop a command after this share of its time: nothing is half-written, and the next run there ends what is left.

    first: in an empty place, not over what a run before it wrote.
    """
    _clear(folder, writer)
    begin = time.monotonic()
    assert ended(begun(writer, folder))[0] in writer.fine
    took = time.monotonic() - begin
    whole = tree(folder, writer.places)
    if first:
        _clear(folder, writer)
    child = begun(writer, folder, _announced)
    while not said_by(child, "ready").exists():
        assert time.monotonic() - begin < 10 * ENDED, "no command began"
        time.sleep(0.001)
    said_by(child, "ready").unlink()
    time.sleep(share * took)
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, number)
    code, said = ended(child)
    assert "Traceback" not in said, said
    if number != signal.SIGKILL:
        assert code in (*writer.fine, 130), (code, said)
        assert hidden(folder) == [], f"left behind: {hidden(folder)}: {code}, {said}"
    again, told = ended(begun(writer, folder))
    assert again in writer.fine, (again, told)
    assert hidden(folder) == [], f"left behind: {hidden(folder)}"
    different = unlike(tree(folder, writer.places), whole, writer)
    assert different == [], f"a stopped run's successor wrote other {different}"
    return "ended before" if code in writer.fine else "stopped"


def serving(folder: Path, number: signal.Signals) -> str:
    """Stop a server: its journal is written, or the next server there removes what was left of it."""
    for how in (number, signal.SIGTERM):
        child = run(SERVE, folder)
        said = said_by(child, "stderr")
        begin = time.monotonic()
        while not (said.exists() and "Serving" in said.read_text()):
            assert time.monotonic() - begin < 10 * ENDED, "no server began"
            time.sleep(0.02)
        os.kill(child, how)
        code, told = ended(child)
        assert "Traceback" not in told, told
        if how != signal.SIGKILL:
            assert code in (0, 130), (code, told)
            assert hidden(folder) == [], f"left behind: {hidden(folder)}"
            assert (folder / "served" / "run.json").is_file()
    return "stopped"


def two_at_once(writer: Writer, folder: Path) -> str:
    """Two of a command in one place: one writes, the other is told so, or comes after it."""
    _clear(folder, writer)
    children = [begun(writer, folder) for _ in range(2)]
    ends = [ended(child) for child in children]
    assert {code for code, _ in ends} & {*writer.fine}, ends
    for code, said in ends:
        assert "Traceback" not in said, said
        assert code in writer.fine or is_one_error(said), (code, said)
    assert hidden(folder) == []
    return "/".join(str(code) for code, _ in ends)


def closed_output(arguments: tuple[str, ...], folder: Path) -> str:
    """Print to a full disk: one line, exit 1."""
    code, said = ended(run(arguments, folder, lambda: os.dup2(os.open("/dev/full", os.O_WRONLY), 1)))
    assert (code, is_one_error(said)) == (1, True), (code, said)
    return "told"


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """A disk of 64 MB at a folder, where we may mount one; whether we did."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", folder], check=False, capture_output=True
    ).returncode
    try:
        yield not mounted
    finally:
        if not mounted:
            subprocess.run(["umount", "--lazy", folder], check=True)


@contextlib.contextmanager
def _filled(folder: Path, size: int) -> Iterator[None]:
    """Leave so many bytes of a folder's disk free."""
    disk = os.statvfs(folder)
    filler = folder / "filler"
    filler.write_bytes(bytes(max(0, disk.f_bavail * disk.f_frsize - size)))
    try:
        yield
    finally:
        filler.unlink()


def _clear(folder: Path, writer: Writer) -> None:
    for place in writer.places:
        path = folder / place
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
