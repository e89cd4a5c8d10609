"""Output places: only what dsim wrote is replaced, only by rename, and a kill between two renames loses nothing."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dsim.engine.errors import MachineError
from dsim.files.lock import Lock, is_held
from dsim.files.place import FolderKind, Staged, check_folder, hold_folder, write_folder
from dsim.files.write import check_file, write_whole, writing
from dsim.results.run_folder import RunWriter

from ..checks import cases, refused

KIND = FolderKind("a thing", ("it.json", "page.html", "log-*.txt"), "it.json", "it", store="log-0.txt")
OURS = {"it.json": '{"schema": "it"}', "page.html": "<p>"}


def tree(folder: str = ".") -> dict[str, str]:
    """Every file below a folder, hidden ones included."""
    return {str(p.relative_to(folder)): p.read_text() for p in sorted(Path(folder).rglob("*")) if p.is_file()}


def make(folder: str, files: dict[str, str]) -> Path:
    path = Path(folder).resolve()
    path.mkdir(parents=True)
    for name, text in files.items():
        (path / name).write_text(text)
    return path


@cases(
    "files says",
    (OURS | {"thesis.tex": "years"}, "holds thesis.tex, which is not of a thing: choose another folder"),
    ({"page.html": "mine"}, "holds page.html and no it.json: choose another folder"),
    ({"it.json": '{"schema": "other"}'}, "it.json: does not say that dsim wrote it: choose another folder"),
    ({"it.json": "[" * 100_000}, "it.json: does not say that dsim wrote it: choose another folder"),
)
def test_force_replaces_nothing_that_dsim_did_not_write(files: dict[str, str], says: str) -> None:
    make("out", files)
    with refused() as error:
        write_folder("out", KIND, OURS, force=True)
    assert str(error.value).endswith(says)
    assert tree("out") == files


def test_what_dsim_wrote_is_replaced_by_force_alone() -> None:
    make("out", OURS | {"log-1.txt": "old"})
    with refused(r"exists and holds it.json, log-1.txt, page.html: choose another folder or"):
        write_folder("out", KIND, OURS)
    write_folder("out", KIND, OURS | {"page.html": "new"}, force=True)
    assert tree() == {"out/it.json": OURS["it.json"], "out/page.html": "new"}


def test_links_devices_and_pipes_are_nobodys_to_replace() -> None:
    make("theirs", OURS)
    Path("link").symlink_to("theirs")
    Path("dangling").symlink_to("nowhere")
    os.mkfifo("pipe")
    for name, kind in {"link": "a symbolic link", "dangling": "a symbolic link", "pipe": "a pipe"}.items():
        for check in (lambda p: check_folder(p, KIND, force=True), lambda p: check_file(p, force=True)):
            with refused(f"{name}: is {kind}, expected "):
                check(name)
    with refused("/dev/full: is a device, expected the name of a file to write"):
        write_whole("/dev/full", "x")
    inner = make("out", OURS)
    (inner / "log-1.txt").symlink_to(Path("theirs/it.json").resolve())
    with refused(r"holds log-1.txt, which is not of a thing"):
        check_folder(inner, KIND, force=True)
    assert tree("theirs") == OURS


KILLED = """
import os, signal, sys
from pathlib import Path
import dsim.files.place as place
renames = 0
rename = os.rename
def counted(*names):
    global renames
    if renames == {at}:
        os.kill(os.getpid(), signal.SIGKILL)
    renames += 1
    rename(*names)
os.rename = counted
place.write_folder({out!r}, place.FolderKind("a thing", ("it.json", "page.html"), "it.json", "it"),
                   {files!r}, force=True)
"""


@cases("at", 0, 1)
def test_a_kill_at_either_rename_loses_neither_folder(at: int, capfd: pytest.CaptureFixture[str]) -> None:
    out = make("out", OURS)
    new = OURS | {"page.html": "new"}
    code = KILLED.format(at=at, out=str(out), files=new)
    done = subprocess.run([sys.executable, "-c", code], check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert out.exists() == (at == 0)
    place = check_folder(out, KIND, force=True)
    assert tree() == {f"out/{name}": text for name, text in OURS.items()}
    said = capfd.readouterr().err
    assert ("Found " in said) == (at == 1)
    assert said.count("left by a killed run") == 1
    write_folder(place, KIND, new, force=True)
    assert tree() == {f"out/{name}": text for name, text in new.items()}


def test_what_a_living_run_builds_is_neither_removed_nor_shared() -> None:
    with Staged("out", KIND) as staged:
        (staged.path / "page.html").write_text("half")
        with refused("another dsim is writing there: wait for it, or choose another folder"):
            Staged("out", KIND)
        assert (staged.path / "page.html").read_text() == "half"
    assert os.listdir() == []


def test_a_folder_that_is_added_to_has_one_writer() -> None:
    out = make("out", OURS)
    lock = hold_folder(out)
    for force in (False, True):
        with refused("another dsim is writing there"):
            check_folder(out, KIND, force=force, add=True)
    lock.close()
    assert check_folder(out, KIND, force=False, add=True) == out


def test_a_lock_ends_with_its_process() -> None:
    code = "from dsim.files.lock import Lock; held = Lock('.'); print('held', flush=True); input()"
    holder = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    holder.stdout.readline()
    assert is_held(Path())
    holder.kill()
    holder.communicate()
    Lock(Path()).close()


def test_a_file_is_whole_or_as_it_was() -> None:
    path = Path("p.json")
    path.write_text("old")

    def half() -> None:
        with writing(path) as file:
            file.write(b"ne")
            raise KeyError

    with pytest.raises(KeyError):
        half()
    assert tree() == {"p.json": "old"}
    with refused(r"p.json: cannot be written: No space left on device", MachineError), writing(path):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert tree() == {"p.json": "old"}
    write_whole(path, "new \udc80")
    assert tree() == {"p.json": "new \\udc80"}


def test_where_nothing_can_be_written_is_told_before_the_work() -> None:
    Path("file").write_text("")
    for place, why in {"none/p.json": "No such file or directory", "file/p.json": "Not a directory"}.items():
        with refused(f"{place}: cannot be written: {why}"):
            check_file(place, force=False)
    with refused("file/deep: cannot be written: Not a directory"):
        check_folder("file/deep/er", KIND, force=False)
    long = "x" * 300
    with refused("cannot be written: File name too long"):
        check_file(long, force=False)
    assert tree() == {"file": ""}


def test_leftovers_of_a_killed_write_are_named_and_removed(capfd: pytest.CaptureFixture[str]) -> None:
    left = Path(".p.json.dsim-new.0a1b2c3d")
    left.write_text("half")
    write_whole("p.json", "whole")
    assert tree() == {"p.json": "whole"}
    assert capfd.readouterr().err == f"Removed {left}, left by a killed run\n"


def test_an_interrupt_while_a_place_is_made_leaves_nothing_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("dsim.files.place.Lock", stop)
    monkeypatch.setattr("dsim.files.write.Lock", stop)
    with pytest.raises(KeyboardInterrupt) as held:  # which holds the frames, and so whatever was made in them
        Staged("out", KIND)
    assert held.type is KeyboardInterrupt
    assert os.listdir() == []
    with pytest.raises(KeyboardInterrupt):
        write_whole("out.json", "{}")
    assert os.listdir() == []
    monkeypatch.undo()
    monkeypatch.setattr("pyarrow.parquet.ParquetWriter", stop)
    with pytest.raises(KeyboardInterrupt) as held:
        RunWriter("run")
    assert held.type is KeyboardInterrupt
    assert os.listdir() == []
