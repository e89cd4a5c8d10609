"""Write a run's folder atomically."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ..engine.journal import MORE_COLUMNS, REQUEST_COLUMNS, STATUSES, STEP_COLUMNS, STEP_LISTS
from ..files.interrupt import asked_to_stop
from ..files.place import FolderKind, Staged, whole_path
from ..files.read import FilePath, naming
from ..files.write import encoded, tell
from .run import Array, Run
from .run_info import FILES, RunInfo

RUN = FolderKind("a run", FILES, "run.json", RunInfo.schema)

Lists = Mapping[str, tuple[Array, Array]]  # (values, offsets: steps + 1)

_NAME = pa.dictionary(pa.int32(), pa.string())


def _arrow(dtype: str) -> pa.DataType:
    return pa.from_numpy_dtype(np.dtype(dtype))


def _fields(columns: Mapping[str, str]) -> list[tuple[str, pa.DataType]]:
    return [(name, _NAME if name == "status" else _arrow(kind)) for name, kind in columns.items()]


class RunWriter:
    """Builds a folder under a temporary name and moves it into place.

    Leaving the `with` block before `finish` aborts.
    """

    def __init__(
        self, folder: FilePath, *, force: bool = False, more: Sequence[str] = (), chosen: Sequence[str] = ()
    ) -> None:
        """more, chosen: other columns of requests and of steps, typed by name (MORE_COLUMNS) or else s."""
        self._staged = Staged(whole_path(folder), RUN, force=force)
        self.folder = self._staged.folder
        requests = _fields(REQUEST_COLUMNS | {name: MORE_COLUMNS.get(name, "float64") for name in more})
        lists = [(name, pa.list_(kind)) for name, kind in _fields(STEP_LISTS)]
        steps = [*_fields(STEP_COLUMNS), *lists, *_fields({name: MORE_COLUMNS[name] for name in chosen})]
        # Arrow rejects names that are not UTF-8.
        try:
            with naming(self.folder):
                self._files = [(self._staged.path / name).open("wb") for name in ("steps.parquet", "requests.parquet")]
            self._steps = pq.ParquetWriter(self._files[0], pa.schema([("policy", _NAME), *steps]), **_ENCODING)
            self._requests = pq.ParquetWriter(self._files[1], pa.schema([("policy", _NAME), *requests]), **_ENCODING)
        except BaseException:  # interrupts too: no caller can abort yet
            self._staged.abort()
            raise
        self._open = True

    def append(self, policy: str, columns: Mapping[str, Array], lists: Lists | None = None) -> None:
        """A policy's STEP_COLUMNS, chosen ones, perhaps STEP_LISTS; best a few thousand steps."""
        if len(columns["step"]):
            _write(self._steps, _batch(self._steps.schema, policy, {**columns, **(lists or {})}), self.folder)

    def requests(self, policy: str, columns: Mapping[str, Array]) -> None:
        """A policy's REQUEST_COLUMNS and `more`."""
        _write(self._requests, _batch(self._requests.schema, policy, columns), self.folder)

    def finish(self, info: RunInfo, page: Callable[[Run], str] | None = None) -> None:
        """Write run.json and the page as report.html, and move the folder into place over an old run.

        The first Ctrl-C is ignored, the second discards the run. A page's error is raised after the run is written
        without it.
        """
        build, failures = self._staged.path, list[Exception]()
        line = f"Writing {self.folder}: Ctrl-C again discards it"
        with asked_to_stop(partial(tell, line)), naming(self.folder):
            self._close()
            (build / "run.json").write_bytes(encoded(info.to_text()))
            try:
                if page is not None:
                    (build / "report.html").write_bytes(encoded(page(Run(build, info))))
            except Exception as error:
                failures.append(error)
                (build / "report.html").unlink(missing_ok=True)
            self._staged.commit()
            self._open = False
            for failure in failures:
                raise failure

    def abort(self) -> None:
        """An existing run stays."""
        if self._open:
            self._open = False
            with suppress(OSError):
                self._close()
        self._staged.abort()

    def _close(self) -> None:
        with ExitStack() as stack:  # every file, even if one fails
            for part in (*self._files, self._requests, self._steps):
                stack.callback(part.close)

    def __enter__(self) -> "RunWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()


# Only names repeat.
_ENCODING: dict[str, Any] = {
    "compression": "zstd",
    "compression_level": 1,
    "use_dictionary": ["policy", "status"],
    "write_statistics": False,
}


def _write(writer: pq.ParquetWriter, batch: pa.RecordBatch, path: FilePath) -> None:
    with naming(path):
        writer.write_batch(batch)


def _batch(schema: pa.Schema, policy: str, values: Mapping[str, Any]) -> pa.RecordBatch:
    """A policy's columns as arrays; lists as (values, offsets), or empty if missing."""
    num = len(next(iter(values.values())))
    arrays = [_names(np.zeros(num, np.int32), [policy])]
    for column in list(schema)[1:]:
        kind = column.type
        if pa.types.is_dictionary(kind):
            arrays.append(_names(np.asarray(values[column.name], np.int32), STATUSES))
        elif not pa.types.is_list(kind):
            arrays.append(pa.array(np.asarray(values[column.name], kind.to_pandas_dtype())))
        elif column.name not in values:
            arrays.append(pa.nulls(num, kind))
        else:
            items, offsets = values[column.name]
            assert len(offsets) == num + 1, f"{column.name} has {len(offsets)} offsets for {num} steps"
            # A row's words may come as [rows, words].
            flat = np.ascontiguousarray(items, kind.value_type.to_pandas_dtype()).reshape(-1)
            arrays.append(pa.ListArray.from_arrays(pa.array(np.asarray(offsets, np.int32)), pa.array(flat)))
    return pa.record_batch(arrays, schema=schema)


def _names(indices: Array, names: Sequence[str]) -> pa.DictionaryArray:
    return pa.DictionaryArray.from_arrays(pa.array(indices, pa.int32()), pa.array(list(names), pa.string()))
