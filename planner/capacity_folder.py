"""The output folder of a capacity: stored replays and results."""

from pathlib import Path
from typing import Any

from ..files.place import FolderKind
from ..files.write import write_whole
from ..report.capacity import FILES, IS_CAPACITY
from ..report.html import json_and_page
from ..report.page import Page
from .memo import FILES as STORE_FILES
from .memo import STORE, StoreFolder

CAPACITY = FolderKind("a capacity", (*FILES, *STORE_FILES), FILES[0], IS_CAPACITY, kept=STORE)


class CapacityFolder(StoreFolder):
    """Writes nothing without a folder."""

    def __init__(self, folder: Path | None, *, force: bool) -> None:
        super().__init__(folder, CAPACITY, force=force)

    def write(self, info: dict[str, Any], page: Page) -> None:
        if self.folder is not None:
            self.settle()
            for name, text in zip(FILES, json_and_page(info, page), strict=True):
                write_whole(self.folder / name, text)
