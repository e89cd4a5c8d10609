"""Output places: only what dsim wrote is replaced, only by rename, and a kill between two renames loses nothing."""

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dsim.engine.errors import DsimError, MachineError
from dsim.files.lock import Lock, is_held
from dsim.files.place import FolderKind, Staged, check_folder, hold_folder, write_folder
from dsim.files.write import check_file, write_whole, writing
from dsim.results.run_folder import RunWriter

KIND = FolderKind("a thing", ("it.json", "page.html", "log-*.txt"), "it.json", "it", store="log-0.txt")
OURS = {"it.json": '{"schema": "it"}', "page.html": "<p>"}


def tree(folder: Path) -> dict[str, str]:
    """Every file below a folder, hidden ones included."""
    return {str(p.relative_to(folder)): p.read_text() for p in sorted(folder.rglob("*")) if p.is_file()}


def make(folder: Path, files: dict[str, str]) -> Path:
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (OURS | {"thesis.tex": "years"}, "holds thesis.tex, which is not of a thing: choose another folder"),
        ({"page.html": "mine"}, "holds page.html and no it.json: choose another folder"),
        ({"it.json": '{"schema": "other"}'}, "it.json: does not say that dsim wrote it: choose another folder"),
        ({"it.json": "[" * 100_000}, "it.json: does not say that dsim wrote it: choose another folder"),
    ],
)
def test_force_replaces_nothing_that_dsim_did_not_write(tmp_path: Path, files: dict[str, str], says: str) -> None:
    make(tmp_path / "out", files)
    with pytest.raises(DsimError) as error:
        write_folder(tmp_path / "out", KIND, OURS, force=True)
    assert str(error.value).endswith(says)
    assert tree(tmp_path / "out") == files


def test_what_dsim_wrote_is_replaced_by_force_alone(tmp_path: Path) -> None:
    make(tmp_path / "out", OURS | {"log-1.txt": "old"})
    with pytest.raises(DsimError, match=r"exists and holds it.json, log-1.txt, page.html: choose another folder or"):
        write_folder(tmp_path / "out", KIND, OURS)
    write_folder(tmp_path / "out", KIND, OURS | {"page.html": "new"}, force=True)
    assert tree(tmp_path) == {"out/it.json": OURS["it.json"], "out/page.html": "new"}


def test_links_devices_and_pipes_are_nobodys_to_replace(tmp_path: Path) -> None:
    make(tmp_path / "theirs", OURS)
    (tmp_path / "link").symlink_to("theirs")
    (tmp_path / "dangling").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe")
    for name, kind in {"link": "a symbolic link", "dangling": "a symbolic link", "pipe": "a pipe"}.items():
        for check in (lambda p: check_folder(p, KIND, force=True), lambda p: check_file(p, force=True)):
            with pytest.raises(DsimError, match=f"{name}: is {kind}, expected "):
                check(tmp_path / name)
    with pytest.raises(DsimError, match="/dev/full: is a device, expected the name of a file to write"):
        write_whole("/dev/full", "x")
    inner = make(tmp_path / "out", OURS)
    (inner / "log-1.txt").symlink_to(tmp_path / "theirs" / "it.json")
    with pytest.raises(DsimError, match=r"holds log-1.txt, which is not of a thing"):
        check_folder(inner, KIND, force=True)
    assert tree(tmp_path / "theirs") == OURS


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


@pytest.mark.parametrize("at", [0, 1])
def test_a_kill_at_either_rename_loses_neither_folder(
    tmp_path: Path, at: int, capfd: pytest.CaptureFixture[str]
) -> None:
    out = make(tmp_path / "out", OURS)
    new = OURS | {"page.html": "new"}
    done = subprocess.run(
        [sys.executable, "-c", KILLED.format(at=at, out=str(out), files=new)], check=False, timeout=60
    )
    assert done.returncode == -signal.SIGKILL
    assert out.exists() == (at == 0)
    place = check_folder(out, KIND, force=True)
    assert tree(tmp_path) == {f"out/{name}": text for name, text in OURS.items()}
    said = capfd.readouterr().err
    assert ("Found " in said) == (at == 1)
    assert said.count("left by a killed run") == 1
    write_folder(place, KIND, new, force=True)
    assert tree(tmp_path) == {f"out/{name}": text for name, text in new.items()}


def test_what_a_living_run_builds_is_neither_removed_nor_shared(tmp_path: Path) -> None:
    with Staged(tmp_path / "out", KIND) as staged:
        (staged.path / "page.html").write_text("half")
        with pytest.raises(DsimError, match="another dsim is writing there: wait for it, or choose another folder"):
            Staged(tmp_path / "out", KIND)
        assert (staged.path / "page.html").read_text() == "half"
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_added_to_has_one_writer(tmp_path: Path) -> None:
    out = make(tmp_path / "out", OURS)
    lock = hold_folder(out)
    for force in (False, True):
        with pytest.raises(DsimError, match="another dsim is writing there"):
            check_folder(out, KIND, force=force, add=True)
    lock.close()
    assert check_folder(out, KIND, force=False, add=True) == out


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    code = f"from dsim.files.lock import Lock; held = Lock({str(tmp_path)!r}); print('held', flush=True); input()"
    holder = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout is not None
    holder.stdout.readline()
    assert is_held(tmp_path)
    holder.kill()
    holder.communicate()
    Lock(tmp_path).close()


def test_a_file_is_whole_or_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text("old")

    def half() -> None:
        with writing(path) as file:
            file.write(b"ne")
            raise KeyError

    with pytest.raises(KeyError):
        half()
    assert tree(tmp_path) == {"p.json": "old"}
    with pytest.raises(MachineError, match=r"p.json: cannot be written: No space left on device"), writing(path):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert tree(tmp_path) == {"p.json": "old"}
    write_whole(path, "new \udc80")
    assert tree(tmp_path) == {"p.json": "new \\udc80"}


def test_where_nothing_can_be_written_is_told_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place, why in {"none/p.json": "No such file or directory", "file/p.json": "Not a directory"}.items():
        with pytest.raises(DsimError, match=f"{place}: cannot be written: {why}"):
            check_file(tmp_path / place, force=False)
    with pytest.raises(DsimError, match="file/deep: cannot be written: Not a directory"):
        check_folder(tmp_path / "file/deep/er", KIND, force=False)
    long = "x" * 300
    with pytest.raises(DsimError, match="cannot be written: File name too long"):
        check_file(tmp_path / long, force=False)
    assert json.dumps(tree(tmp_path)) == '{"file": ""}'


def test_leftovers_of_a_killed_write_are_named_and_removed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    left = tmp_path / ".p.json.dsim-new.0a1b2c3d"
    left.write_text("half")
    write_whole(tmp_path / "p.json", "whole")
    assert tree(tmp_path) == {"p.json": "whole"}
    assert capfd.readouterr().err == f"Removed {left}, left by a killed run\n"


def test_an_interrupt_while_a_place_is_made_leaves_nothing_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("dsim.files.place.Lock", stop)
    monkeypatch.setattr("dsim.files.write.Lock", stop)
    with pytest.raises(KeyboardInterrupt) as held:  # which holds the frames, and so whatever was made in them
        Staged(tmp_path / "out", KIND)
    assert held.type is KeyboardInterrupt
    assert os.listdir(tmp_path) == []
    with pytest.raises(KeyboardInterrupt):
        write_whole(tmp_path / "out.json", "{}")
    assert os.listdir(tmp_path) == []
    monkeypatch.undo()
    monkeypatch.setattr("pyarrow.parquet.ParquetWriter", stop)
    with pytest.raises(KeyboardInterrupt) as held:
        RunWriter(tmp_path / "run")
    assert held.type is KeyboardInterrupt
    assert os.listdir(tmp_path) == []
