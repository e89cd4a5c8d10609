"""A run read back from its folder: run.json, requests.parquet and steps.parquet."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ..engine.errors import DsimError
from ..engine.journal import REQUEST_COLUMNS, STATUSES, STEP_COLUMNS, STEP_LISTS
from .manifest import Manifest

SCHEMA, VERSION = "dsim-run", 1
FILES = ("run.json", "requests.parquet", "steps.parquet", "report.html")

Array = npt.NDArray[Any]
Columns = dict[str, Array]


@dataclass(frozen=True)
class Run:
    """A run read back. Columns are loaded when asked for: a long run's steps need not fit in memory."""

    folder: Path
    info: Manifest  # run.json

    @property
    def policies(self) -> list[str]:
        """The policies, in the order in which they were given."""
        return [summary["policy"] for summary in self.info.get("policies", [])]

    @property
    def num_steps(self) -> int:
        """Rows of steps.parquet."""
        return int(pq.read_metadata(self.folder / "steps.parquet").num_rows)

    def requests(self, policy: str, columns: Sequence[str] | None = None) -> Columns:
        """A policy's request columns, `status` as an index into STATUSES."""
        names = list(columns or REQUEST_COLUMNS)
        table = pq.read_table(self.folder / "requests.parquet", columns=names, filters=pc.field("policy") == policy)
        # Columns beside the journal's, as of a load generator's file, are of seconds.
        return {name: _numpy(table[name].combine_chunks(), REQUEST_COLUMNS.get(name, "float64")) for name in names}

    def step_batches(self, policy: str, columns: Sequence[str] | None = None) -> Iterator[Columns]:
        """A policy's steps, some thousands at a time; scalar columns only."""
        names = list(columns or STEP_COLUMNS)
        with pq.ParquetFile(self.folder / "steps.parquet") as file:
            held = set(file.schema_arrow.names)  # a run of before the column was kept lacks it
            for batch in file.iter_batches(columns=["policy", *(name for name in names if name in held)]):
                mine = batch.filter(pc.equal(batch["policy"].cast(pa.string()), policy))
                if len(mine):
                    yield {
                        name: _numpy(mine[name], STEP_COLUMNS[name]) if name in held else _unknown(name, len(mine))
                        for name in names
                    }

    def steps(self, policy: str, columns: Sequence[str] | None = None) -> Columns:
        """A policy's step columns, whole."""
        names = list(columns or STEP_COLUMNS)
        batches = list(self.step_batches(policy, names))
        empty = [np.zeros(0, STEP_COLUMNS[name]) for name in names]
        return {
            name: np.concatenate([b[name] for b in batches] or [none]) for name, none in zip(names, empty, strict=True)
        }

    def step_groups(
        self, policy: str, spans: Sequence[tuple[float, float]]
    ) -> Iterator[tuple[Columns, dict[str, tuple[Array, Array]]]]:
        """The groups of a policy's steps that meet a stretch of time (s), with their lists as (values, offsets).

        Nothing where the run kept scalar columns only.
        """
        with pq.ParquetFile(self.folder / "steps.parquet") as file:
            lists = [
                name for name in ("requests", "phases", "num_tokens", "commits") if name in file.schema_arrow.names
            ]
            for k in range(file.num_row_groups):
                times = file.read_row_group(k, columns=["policy", "start", "latency"])
                if not times.num_rows or times["policy"][0].as_py() != policy:
                    continue
                start, latency = (np.asarray(times[name]) for name in ("start", "latency"))
                end = start + latency
                if not any(((end > low) & (start < high)).any() for low, high in spans):
                    continue
                table = file.read_row_group(k, columns=["replica", "step", *lists])
                if any(table[name].null_count for name in lists):
                    return
                columns = {"start": start, "latency": latency}
                columns |= {name: np.asarray(table[name]) for name in ("replica", "step")}
                yield columns, {name: _list(table[name].combine_chunks(), STEP_LISTS[name]) for name in lists}

    def step_lists(self, policy: str) -> dict[str, tuple[Array, Array]]:
        """A policy's STEP_LISTS as (values, offsets); a DsimError when the run did not keep them."""
        path = self.folder / "steps.parquet"
        held = set(pq.read_schema(path).names)
        names = [name for name in STEP_LISTS if name in held]
        table = pq.read_table(path, columns=names, filters=pc.field("policy") == policy)
        lists = {}
        for name in names:
            column = table[name].combine_chunks()
            if column.null_count:
                raise DsimError(
                    f"{self.folder}/steps.parquet: column '{name}' is empty: the run kept scalar columns only"
                )
            lists[name] = _list(column, STEP_LISTS[name])
        if "evictions" not in held:
            lists["evictions"] = (np.zeros_like(lists["window"][0]), lists["window"][1])
        return lists


def read_run(folder: str | Path) -> Run:
    """Open a run's folder; a DsimError says what is missing, broken or newer than this dsim."""
    folder = Path(folder)
    path = folder / "run.json"
    if not folder.is_dir():
        raise DsimError(f"{folder}: no such folder; `dsim replay -o {folder}` writes one")
    missing = [name for name in FILES[:3] if not (folder / name).is_file()]
    if missing:
        raise DsimError(f"{folder}: not a run of dsim: it lacks {', '.join(missing)}")
    try:
        info = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DsimError(f"{path}: not JSON: {str(error).splitlines()[0]}") from error
    if not isinstance(info, dict) or info.get("schema") != SCHEMA:
        found = info.get("schema") if isinstance(info, dict) else type(info).__name__
        raise DsimError(f"{path}: schema is {found!r}, expected '{SCHEMA}'")
    if not isinstance(info.get("version"), int) or info["version"] > VERSION:
        raise DsimError(f"{path}: version is {info.get('version')!r}, this dsim reads up to {VERSION}: update dsim")
    for name in FILES[1:3]:
        try:
            pq.read_metadata(folder / name)
        except (pa.ArrowException, OSError) as error:
            raise DsimError(f"{folder / name}: not a Parquet file: {str(error).splitlines()[0]}") from error
    return Run(folder, cast(Manifest, info))


def _unknown(name: str, num: int) -> Array:
    """A column that a run of before it was kept lacks: nobody measured the device, and nothing was evicted."""
    return np.full(num, np.nan if STEP_COLUMNS[name] == "float64" else 0, STEP_COLUMNS[name])


def _list(column: Any, dtype: str) -> tuple[Array, Array]:
    """A column of lists as (values, offsets)."""
    lengths = np.asarray(pc.list_value_length(column), np.int64)
    return _numpy(column.flatten(), dtype), np.concatenate([[0], np.cumsum(lengths)])


def _numpy(array: Any, dtype: str) -> Array:
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    if isinstance(array, pa.DictionaryArray):
        known = np.array([STATUSES.index(name) for name in array.dictionary.to_pylist()], np.int64)
        array = pa.array(known[np.asarray(array.indices)])
    return np.asarray(array.to_numpy(zero_copy_only=False), dtype)
