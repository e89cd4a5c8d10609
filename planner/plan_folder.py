"""The output folder of a plan: its replays, which a second call goes on from, and its results."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from ..engine.errors import DsimError
from ..files.place import Kind, Taken, has_schema
from ..files.write import write_whole
from ..profiler.profile import Profile, save
from ..report.html import to_html
from ..report.page import Page
from .ledger import Ledger
from .plan_replays import entry_of
from .planned import Planned

LEDGER = "replays.jsonl"
FILES = ("plan.toml", "plan.json", "report.html")
DEPLOY = "deploy"  # a folder
SCHEMA = "dsim-plan"
PLAN = Kind(
    "a plan", (*FILES, DEPLOY, "profile-*.json", LEDGER), "plan.json", has_schema(SCHEMA), (DEPLOY,), kept=LEDGER
)


class PlanFolder:
    """The folder, locked until it is closed. DsimError where it holds the replays of another plan.

    key: the plan's fingerprint.
    """

    def __init__(self, path: Path, key: str, *, force: bool) -> None:
        self.path = path
        self._taken = Taken(path, PLAN, force=force)
        try:
            self.ledger = Ledger(path / LEDGER, entry_of)
        except BaseException:
            self._taken.close()
            raise
        try:
            self._begin(key)
        except BaseException:
            self.close()
            raise

    def settle(self) -> None:
        """Keep this folder: a folder that --force replaced is not put back."""
        self._taken.settle()

    def write(self, planned: Planned, info: dict[str, Any], page: Page, sheets: Sequence[Profile]) -> list[str]:
        """Write the results and return their names. sheets: profiles made from data sheets, which are saved too."""
        self.settle()
        text = json.dumps(info, indent=1, allow_nan=False, ensure_ascii=False)
        files = {"plan.toml": planned.plan_toml, "plan.json": text + "\n", "report.html": to_html(page)}
        for name, content in files.items():
            write_whole(self.path / name, content)
        launch = {} if planned.deployment is None else planned.deployment.files()
        for name, content in launch.items():
            (self.path / DEPLOY).mkdir(exist_ok=True)
            write_whole(self.path / DEPLOY / name, content)
        for profile in sheets:
            save(profile, self.path / f"profile-{profile.name}.json", force=True)
        return [*files, *([f"{DEPLOY}/"] if launch else []), *(f"profile-{profile.name}.json" for profile in sheets)]

    def close(self) -> None:
        """Release the folder."""
        self.ledger.close()
        self._taken.close()

    def _begin(self, key: str) -> None:
        found = next((entry["plan"] for entry in self.ledger.entries if "plan" in entry), None)
        if found not in (None, key):
            raise DsimError(
                f"{self.path}: holds the replays of another plan ({found}, this one is {key}): choose another folder "
                "or pass --force"
            )
        self.ledger.begin()
        if found is None:
            self.ledger.append({"plan": key})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
