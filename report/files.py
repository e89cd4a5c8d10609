"""Writes a run's folder: run.json, requests.parquet, steps.parquet and report.html, all of them or nothing."""

import json
import math
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ..engine.errors import DsimError
from ..engine.journal import REQUEST_COLUMNS, STATUSES, STEP_COLUMNS, STEP_LISTS
from .manifest import Manifest
from .run import FILES, SCHEMA, VERSION, Array, read_run

Lists = Mapping[str, tuple[Array, Array]]  # name -> (values, offsets: one more than there are steps)

_NAME = pa.dictionary(pa.int32(), pa.string())


def _arrow(dtype: str) -> pa.DataType:
    return pa.from_numpy_dtype(np.dtype(dtype))


REQUEST_SCHEMA = pa.schema(
    [("policy", _NAME)] + [(name, _NAME if name == "status" else _arrow(t)) for name, t in REQUEST_COLUMNS.items()]
)
STEP_SCHEMA = pa.schema(
    [("policy", _NAME)]
    + [(name, _arrow(t)) for name, t in STEP_COLUMNS.items()]
    + [(name, pa.list_(_arrow(t))) for name, t in STEP_LISTS.items()]
)


class StepSink:
    """Where one policy's steps go, batch by batch."""

    def __init__(self, policy: str, writer: pq.ParquetWriter) -> None:
        self._policy = policy
        self._writer = writer

    def append(self, columns: Mapping[str, Array], lists: Lists | None = None) -> None:
        """Write a batch of steps (STEP_COLUMNS, and STEP_LISTS where they are kept); thousands at a time are best."""
        n = len(columns["step"])
        if not n:
            return
        arrays = [_names(np.zeros(n, np.int32), [self._policy])]
        arrays += [pa.array(np.asarray(columns[name], dtype)) for name, dtype in STEP_COLUMNS.items()]
        for name, dtype in STEP_LISTS.items():
            if lists is None:
                arrays.append(pa.nulls(n, pa.list_(_arrow(dtype))))
                continue
            values, offsets = lists[name]
            assert len(offsets) == n + 1, f"{name} has {len(offsets)} offsets for {n} steps"
            # `words` words a row may arrive as [rows, words].
            flat = np.ascontiguousarray(values, dtype).reshape(-1)
            arrays.append(pa.ListArray.from_arrays(pa.array(np.asarray(offsets, np.int32)), pa.array(flat)))
        self._writer.write_batch(pa.record_batch(arrays, schema=STEP_SCHEMA))


class RunWriter:
    """Builds a run's folder beside its place and moves it there at the end, so that nothing is ever half-written.

    As a context manager it aborts unless `finish` was called.
    """

    def __init__(self, folder: str | Path, *, force: bool = False, more: Sequence[str] = ()) -> None:
        """more: request columns beside the journal's, of seconds."""
        # Without `..`: a parent that is made on the way must not turn the path into another's.
        self.folder = Path(os.path.normpath(Path(folder).absolute()))
        self._force = force
        _check_place(self.folder, force)
        self._made = [p for p in (self.folder.parent, *self.folder.parent.parents) if not p.exists()]
        try:
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            self._build = Path(tempfile.mkdtemp(prefix=f".{self.folder.name}.", dir=self.folder.parent))
        except OSError as error:
            self._remove_parents()
            raise DsimError(f"{folder}: cannot be created: {error.strerror}") from error
        self._steps = pq.ParquetWriter(self._build / "steps.parquet", STEP_SCHEMA, **_ENCODING)
        self._request_schema = pa.schema([*REQUEST_SCHEMA, *((name, pa.float64()) for name in more)])
        self._requests = pq.ParquetWriter(self._build / "requests.parquet", self._request_schema, **_ENCODING)
        self._open = True

    def steps(self, policy: str) -> StepSink:
        """A sink for the steps of one policy."""
        return StepSink(policy, self._steps)

    def requests(self, policy: str, columns: Mapping[str, Array]) -> None:
        """Write all requests of one policy (REQUEST_COLUMNS, and what `more` names)."""
        n = len(columns["request"])
        arrays = [_names(np.zeros(n, np.int32), [policy])]
        for name, dtype in REQUEST_COLUMNS.items():
            column = np.asarray(columns[name], dtype)
            arrays.append(_names(column.astype(np.int32), STATUSES) if name == "status" else pa.array(column))
        arrays += [
            pa.array(np.asarray(columns[name], np.float64)) for name in self._request_schema.names[len(arrays) :]
        ]
        self._requests.write_batch(pa.record_batch(arrays, schema=self._request_schema))

    def finish(self, run_json: Manifest | Mapping[str, Any]) -> None:
        """Write run.json and report.html, and move the folder to its place, replacing the run that was there.

        A Ctrl-C meanwhile does not cost the run: it takes a second one.
        """
        with _finishing(self.folder):
            self._finish(run_json)

    def _finish(self, run_json: Manifest | Mapping[str, Any]) -> None:
        # Imported here: a run without a folder draws nothing and need not load Plotly.
        from .run_page import write_html

        self._steps.close()
        self._requests.close()
        info = {"schema": SCHEMA, "version": VERSION, **run_json}
        text = json.dumps(_plain(info), indent=2, allow_nan=False, ensure_ascii=False)
        (self._build / "run.json").write_text(text + "\n", encoding="utf-8")
        write_html(self._build / "report.html", read_run(self._build))
        # mkdtemp makes a private folder; the result gets the permissions of any other.
        umask = os.umask(0)
        os.umask(umask)
        self._build.chmod(0o777 & ~umask)
        self._move()
        self._open = False

    def abort(self) -> None:
        """Remove what was built; what was in the folder's place stays."""
        if not self._open:
            return
        self._open = False
        for writer in (self._steps, self._requests):
            writer.close()
        shutil.rmtree(self._build, ignore_errors=True)
        self._remove_parents()

    def _remove_parents(self) -> None:
        for parent in self._made:
            if parent.is_dir() and not any(parent.iterdir()):
                parent.rmdir()

    def _move(self) -> None:
        # Something may have come to the folder's place since the run began.
        _check_place(self.folder, self._force)
        if not self.folder.exists():
            self._build.rename(self.folder)
            return
        old = Path(tempfile.mkdtemp(prefix=f".{self.folder.name}.old.", dir=self.folder.parent))
        self.folder.rename(old / "run")
        self._build.rename(self.folder)
        shutil.rmtree(old, ignore_errors=True)

    def __enter__(self) -> "RunWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()


@contextmanager
def _finishing(folder: Path) -> Iterator[None]:
    """The first Ctrl-C says what is being done, the second ends it."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before == signal.SIG_IGN:
        yield
        return

    def wait(_signum: int, _frame: FrameType | None) -> None:
        print(f"Writing {folder}: Ctrl-C again discards it", file=sys.stderr)
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, wait)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


# Names repeat and times do not: a dictionary of every time would cost time and space.
_ENCODING: dict[str, Any] = {
    "compression": "zstd",
    "compression_level": 1,
    "use_dictionary": ["policy", "status"],
    "write_statistics": False,
}


def _check_place(folder: Path, force: bool) -> None:
    if not folder.exists() and not folder.is_symlink():
        return
    if not folder.is_dir():
        raise DsimError(f"{folder}: is a file, expected a folder to write to")
    held = sorted(entry.name for entry in folder.iterdir())
    foreign = [name for name in held if name not in FILES]
    if foreign:
        # Replacing a folder deletes it: only what dsim wrote may go.
        raise DsimError(f"{folder}: holds {foreign[0]}, which dsim did not write: choose another folder")
    if held and not force:
        raise DsimError(f"{folder}: exists and holds {', '.join(held)}: choose another folder or pass --force")


def _names(indices: Array, names: Sequence[str]) -> pa.DictionaryArray:
    return pa.DictionaryArray.from_arrays(pa.array(indices, pa.int32()), pa.array(list(names), pa.string()))


def _plain(value: Any) -> Any:
    """The value as JSON has it: NaN becomes null, NumPy's numbers become Python's."""
    if isinstance(value, Mapping):
        return {str(key): _plain(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
