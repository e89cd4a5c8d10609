"""The output folder of a search: its stored replays and its results."""

import json
from typing import Any

from ..files.place import FolderKind, has_keys
from ..files.write import csv_of
from ..report.html import to_html
from ..report.page import Page
from ..results.metrics import no_nan
from .memo import FILES as STORE_FILES
from .memo import STORE, StoreFolder
from .tuned import Tuned

FILES = ("policy.toml", "fleet.toml", "tune.json", "trials.csv", "report.html")
TUNE = FolderKind(
    "a search", (*FILES, "front-*.toml", *STORE_FILES), "tune.json",
    has_keys("objectives", "winner", "num_trials"), kept=STORE,
)  # fmt: skip


class TuneFolder(StoreFolder):
    """Without a folder nothing is written."""

    def write(self, tuned: Tuned, info: dict[str, Any], page: Page) -> list[str]:
        if self.folder is None:
            return []
        trials = tuned.trials.astype(object).where(tuned.trials.notna(), None)
        files = {
            tuned.recommended.file: tuned.policy_toml,
            "tune.json": json.dumps(no_nan(info), indent=1, allow_nan=False) + "\n",
            "trials.csv": csv_of([trials.columns, *trials.itertuples(index=False, name=None)]),
            "report.html": to_html(page),
        }
        for i, finalist in enumerate(tuned.front, 1):
            files[f"front-{i}.toml"] = finalist.candidate.toml()
        self.put(files)
        for path in self.folder.glob("front-*.toml"):
            if path.name not in files:  # of a longer front
                path.unlink()
        return list(files)
