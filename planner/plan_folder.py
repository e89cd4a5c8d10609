"""The output folder of a plan: stored replays and results."""

import json
from collections.abc import Sequence
from typing import Any

from ..files.place import FolderKind, has_schema
from ..files.write import write_whole
from ..profiler.profile import Profile, save
from ..report.html import to_html
from ..report.page import Page
from .memo import FILES as STORE_FILES
from .memo import STORE, StoreFolder
from .planned import SCHEMA, Planned

FILES = ("plan.toml", "plan.json", "report.html")
DEPLOY = "deploy"  # a folder
PLAN = FolderKind(
    "a plan", (*FILES, DEPLOY, "profile-*.json", *STORE_FILES), "plan.json", has_schema(SCHEMA), (DEPLOY,),
    kept=STORE,
)  # fmt: skip


class PlanFolder(StoreFolder):
    """Writes nothing without a folder."""

    def write(self, planned: Planned, info: dict[str, Any], page: Page, sheets: Sequence[Profile]) -> list[str]:
        """Write the results; returns their names. sheets: profiles made from data sheets, saved too."""
        if self.folder is None:
            return []
        text = json.dumps(info, indent=1, allow_nan=False, ensure_ascii=False)
        files = {"plan.toml": planned.plan_toml, "plan.json": text + "\n", "report.html": to_html(page)}
        launch = {} if planned.deployment is None else planned.deployment.files()
        for name, content in launch.items():
            (self.folder / DEPLOY).mkdir(exist_ok=True)
            write_whole(self.folder / DEPLOY / name, content)
        for profile in sheets:
            save(profile, self.folder / f"profile-{profile.name}.json", force=True)
        self.put(files)
        return [*files, *([f"{DEPLOY}/"] if launch else []), *(f"profile-{profile.name}.json" for profile in sheets)]
