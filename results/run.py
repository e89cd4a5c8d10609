"""A run read back from its folder."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..engine.allowed_code import NO_CODE, AllowedCode
from ..engine.errors import CodeError, DsimError
from ..engine.journal import CHOICE_COLUMNS, MORE_COLUMNS, REQUEST_COLUMNS, STATUSES, STEP_COLUMNS, STEP_LISTS
from ..engine.latency import Features
from ..engine.spec import Policy, parse
from ..files.read import LARGEST, FilePath, cut, parsing, quoted, read_json
from ..profiler.placed import placed
from .run_info import FILES, RunInfo
from .slo import Slo

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

STEP_KINDS = STEP_COLUMNS | CHOICE_COLUMNS

Array = npt.NDArray[Any]
Columns = dict[str, Array]


# A counter after an eviction: the counter, and the journal's evicted column.
LEFT = {
    "left_tokens": ("tokens", "evicted"),
    "left_q_kv": ("sum_q_kv", "evicted_q_kv"),
    "left_kv": ("sum_kv", "evicted_kv"),
    "left_sampled": ("sampled_rows", "evicted_sampled"),
}


@dataclass(frozen=True)
class Run:
    """Columns are loaded on request: a long run's steps may exceed memory."""

    folder: Path
    info: RunInfo
    allow_code: AllowedCode = NO_CODE  # that policies may load

    def policy(self, name: str) -> Policy:
        """CodeError if it needs code that is not allowed."""
        try:
            return parse(placed(name)[0], self.allow_code)
        except CodeError as error:
            raise CodeError(f"{self.folder}: {error}") from None

    @property
    def policies(self) -> list[str]:
        """In the command line's order."""
        return [summary.policy for summary in self.info.policies]

    @property
    def num_steps(self) -> int:
        with _opened(self.folder / "steps.parquet") as file:
            return int(file.metadata.num_rows)

    def requests(self, policy: str, columns: Sequence[str] | None = None) -> Columns:
        """`status` is an index into STATUSES."""
        names = list(columns or REQUEST_COLUMNS)
        path = self.folder / "requests.parquet"
        with _opened(path) as file:
            rows = _of_policy(file.read(["policy", *names]), policy)
            # Other columns, as a load generator's, are s.
            kinds = REQUEST_COLUMNS | MORE_COLUMNS
            table = {name: _numpy(rows[name], kinds.get(name, "float64")) for name in names}
        return table

    def step_batches(self, policy: str, names: Sequence[str]) -> Iterator[Columns]:
        """Scalar columns, a few thousand steps at a time."""
        with _opened(self.folder / "steps.parquet") as file:
            for batch in file.iter_batches(columns=["policy", *names]):
                rows = _of_policy(batch, policy)
                if len(rows):
                    yield {name: _numpy(rows[name], STEP_KINDS[name]) for name in names}

    def steps(self, policy: str) -> Columns:
        """All scalar columns."""
        nothing = {name: np.zeros(0, kind) for name, kind in STEP_COLUMNS.items()}
        batches = [nothing, *self.step_batches(policy, [*STEP_COLUMNS])]
        return {name: np.concatenate([batch[name] for batch in batches]) for name in STEP_COLUMNS}

    def step_lists(self, policy: str) -> dict[str, tuple[Array, Array]]:
        """STEP_LISTS as (values, offsets); DsimError if the run lacks them."""
        path = self.folder / "steps.parquet"
        lists = {}
        with _opened(path) as file:
            missing = STEP_LISTS.keys() - set(file.schema_arrow.names)
            if missing:
                raise DsimError(f"{path}: lacks the columns {', '.join(sorted(missing))}")
            table = _of_policy(file.read(["policy", *STEP_LISTS]), policy)
            for name in STEP_LISTS:
                column = table[name].combine_chunks()
                if column.null_count:
                    raise DsimError(f"{path}: column '{name}' is empty: the run kept scalar columns only")
                lengths = np.asarray(column.value_lengths(), np.int64)
                offsets = np.concatenate([[0], np.cumsum(lengths)])
                lists[name] = _numpy(column.flatten(), STEP_LISTS[name]), offsets
        return lists


def counters_of(steps: Mapping[str, Array]) -> Columns:
    """A journal's steps, as `step_times` takes them."""
    counters = {name: steps[name] for name in (*Features._fields, "continues", "evicting") if name != "prefill_tokens"}
    after = {counter: steps[name] - steps[evicted] for counter, (name, evicted) in LEFT.items()}
    return counters | after | {"prefill_tokens": np.where(steps["prefill"], steps["tokens"], 0)}


def read_run(folder: FilePath, allow_code: AllowedCode = NO_CODE) -> Run:
    """DsimError for a missing or damaged file, or one of another version."""
    folder = Path(folder)
    path = folder / "run.json"
    if not folder.is_dir():
        raise DsimError(f"{folder}: no such folder; `dsim replay -o {folder}` writes one")
    missing = [name for name in FILES[:3] if not (folder / name).is_file()]
    if missing:
        raise DsimError(f"{folder}: not a run of dsim: it lacks {', '.join(missing)}")
    data = read_json(path)
    if not isinstance(data, dict):
        raise DsimError(f"{path}: schema is {quoted(type(data).__name__)}, expected {quoted(RunInfo.schema)}")
    info = RunInfo.from_json(data, str(path))
    for text in info.slos:
        try:
            Slo.parse(text)
        except DsimError as error:
            raise DsimError(f"{path}: slos: {error}") from None
    for name, expected in (("requests.parquet", REQUEST_COLUMNS), ("steps.parquet", STEP_COLUMNS)):
        with _opened(folder / name) as file:
            _check_columns(file.schema_arrow, expected, folder / name)
    return Run(folder, info, allow_code)


def _check_columns(schema: "pa.Schema", expected: Mapping[str, str], path: Path) -> None:
    """DsimError unless all columns have their types."""
    import pyarrow as pa  # slow to load: only files need it

    for name, dtype in {"policy": "str", **expected}.items():
        if name not in schema.names:
            raise DsimError(f"{path}: lacks column {name}, expected {', '.join(['policy', *expected])}")
        kind = schema.field(name).type
        is_names = pa.types.is_dictionary(kind) and pa.types.is_string(kind.value_type)
        if not (is_names if name in ("policy", "status") else kind == pa.from_numpy_dtype(np.dtype(dtype))):
            raise DsimError(f"{path}: column {name} is {cut(kind)}, expected {'names' if is_names else dtype}")


@contextmanager
def _opened(path: Path) -> "Iterator[pq.ParquetFile]":
    """Arrow's errors become one line."""
    import pyarrow.parquet as pq

    with parsing(path, "a run's Parquet file"), path.open("rb") as data, pq.ParquetFile(data) as file:
        yield file


def _of_policy(table: Any, policy: str) -> Any:
    import pyarrow as pa
    import pyarrow.compute as pc

    return table.filter(pc.equal(table["policy"].cast(pa.string()), policy))


def _numpy(array: Any, dtype: str) -> Array:
    import pyarrow as pa

    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    if isinstance(array, pa.DictionaryArray):
        codes = np.array([STATUSES.index(name) for name in array.dictionary.to_pylist()], np.int64)
        array = pa.array(codes[np.asarray(array.indices)])
    if array.null_count and np.dtype(dtype).kind in "iub":
        raise ValueError(f"it lacks {array.null_count} values of a column of whole numbers")
    values = np.asarray(array.to_numpy(zero_copy_only=False), dtype)
    if values.dtype.kind == "f" and (np.abs(values) > LARGEST).any():
        raise ValueError(f"it holds {np.nanmax(np.abs(values)):g}, expected numbers of at most {LARGEST:g}")
    return values
