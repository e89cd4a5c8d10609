"""The output folder of a plan: its replays, which a second call goes on from, and its results."""

import json
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


@dataclass(frozen=True)
class PlanFolder:
    """An open folder, which no other process writes."""

    path: Path
    ledger: Ledger
    _taken: Taken

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


@contextmanager
def plan_folder(path: Path, key: str, *, force: bool) -> Iterator[PlanFolder]:
    """Lock a folder and open its replays; DsimError where they are of another plan than `key`, its fingerprint."""
    with closing(Taken(path, PLAN, force=force)) as taken, closing(Ledger(path / LEDGER, entry_of)) as ledger:
        found = next((entry["plan"] for entry in ledger.entries if "plan" in entry), None)
        if found not in (None, key):
            raise DsimError(
                f"{path}: holds the replays of another plan ({found}, this one is {key}): choose another folder or "
                "pass --force"
            )
        ledger.begin()
        if found is None:
            ledger.append({"plan": key})
        yield PlanFolder(path, ledger, taken)
