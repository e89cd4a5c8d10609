"""Runs as `dsim` returns them: metrics, frames of requests and steps, page figures."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import numpy as np
import pandas as pd

from ..comparison.clients.measured import MeasuredRun, write_measured
from ..engine.allowed_code import NO_CODE, AllowedCode
from ..engine.journal import STATUSES
from ..report.page import Figure, Page
from ..report.result import Result
from ..results.manifest import Manifest
from ..results.metrics import Summary, flat
from ..results.run import Run, read_run
from ..results.scenario import Scenario, arrived
from ..sim.twin import RunRecords
from ..traces import Trace
from .record import in_twin, record


class OfRun(Result):
    @property
    @abstractmethod
    def run(self) -> Run:
        """As its folder holds it."""

    @property
    def _info(self) -> Manifest:
        """The run's manifest, as in its run.json."""
        return self.run.info

    def page(self) -> Page:
        from ..report.story import words

        return words(self.to_json(), self._info)

    def figures(self) -> list[Figure]:
        from ..report.run_page import run_page

        return run_page(self.run).figures

    def to_json(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Metrics by policy, as in `--json`."""
        return list(self._info["policies"])

    def to_frame(self) -> pd.DataFrame:
        """A row per policy; metrics named as in a sweep's table (`ttft_ms_p50`)."""
        return pd.DataFrame([{"policy": summary["policy"], **flat(summary)} for summary in self.to_json()])

    @property
    def requests(self) -> pd.DataFrame:
        """A row per request and policy: requests.parquet."""
        return pd.read_parquet(self.run.folder / "requests.parquet")

    @property
    def steps(self) -> pd.DataFrame:
        """A row per step and policy: scalar columns of steps.parquet."""
        run = self.run
        return _joined([pd.DataFrame({"policy": name, **run.steps(name)}) for name in run.policies])


RunLike: TypeAlias = str | Path | OfRun | Run


@dataclass(frozen=True, repr=False)
class Recorded(OfRun):
    """A run with a folder: replayed, live or measured."""

    recorded: Run
    kept: "TemporaryDirectory[str] | None" = None  # the folder, removed with this object

    @property
    def run(self) -> Run:
        return self.recorded


class _InMemory(OfRun):
    """A run in memory; files are written when needed."""

    folder: Path | None

    @property
    def _code(self) -> AllowedCode:
        return NO_CODE

    @cached_property
    def run(self) -> Run:
        """Without a folder, in a temporary one, removed with this object."""
        folder = self.folder or Path(self._kept.name) / "run"
        if self.folder is None:
            self._write(folder)
        return read_run(folder, self._code)

    @cached_property
    def _kept(self) -> "TemporaryDirectory[str]":
        return TemporaryDirectory(prefix="dsim-")

    @abstractmethod
    def _write(self, folder: Path) -> None:
        """Write the run's folder."""


@dataclass(frozen=True, repr=False)
class Replay(_InMemory):
    """A replay: an entry per policy, in the given order."""

    results: list[RunRecords]
    summaries: list[Summary]
    manifest: Manifest
    scenarios: Sequence[Scenario] = field(default=(), compare=False)
    traffic: Trace | None = field(default=None, compare=False)  # the replayed requests
    folder: Path | None = field(default=None, compare=False)  # if the run was written

    @property
    def _info(self) -> Manifest:
        """The manifest, without a folder."""
        return self.manifest

    @property
    def requests(self) -> pd.DataFrame:
        """A row per request and policy: requests.parquet."""
        frames = []
        for result in self.results:
            columns = arrived(result)
            status = pd.Categorical(np.array(STATUSES)[columns["status"]], list(STATUSES))
            frames.append(pd.DataFrame({"policy": result.policy.name, **columns, "status": status}))
        return _joined(frames)

    def _write(self, folder: Path) -> None:
        assert self.traffic is not None
        record(self.scenarios, self.traffic, in_twin, out=folder)

    @property
    def _code(self) -> AllowedCode:
        return self.scenarios[0].allow_code


@dataclass(frozen=True, repr=False)
class Imported(_InMemory):
    """A run that a client measured."""

    measured: MeasuredRun
    folder: Path | None = field(default=None, compare=False)  # if the run was written

    @property
    def _info(self) -> Manifest:
        """The manifest, without a folder."""
        return self.measured.info

    def _write(self, folder: Path) -> None:
        write_measured(self.measured, folder)


def _joined(frames: Sequence[pd.DataFrame]) -> pd.DataFrame:
    names = list(dict.fromkeys(frame["policy"].iloc[0] for frame in frames if len(frame)))
    joined = pd.concat(frames, ignore_index=True)
    return joined.assign(policy=pd.Categorical(joined["policy"], names))
