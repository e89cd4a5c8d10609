"""Published yields of diffusion models (published.json, written by research/calibration/publications.py)."""

from dataclasses import replace
from pathlib import Path

from ..engine.commits import CanvasLaw, CommitModel, ImportanceDeltas
from ..files.read import read_json
from ..files.schema import read_as

FILE = Path(__file__).with_name("published.json")


_PUBLISHED = read_json(FILE)
FOCUS_DELTAS = ImportanceDeltas(**_PUBLISHED["focus"])  # assumed
# Forwards per canvas of DiffusionGemma; the first workload is the default.
CANVAS_LAWS: tuple[CanvasLaw, ...] = tuple(read_as(CanvasLaw, FILE.name, "", row) for row in _PUBLISHED["canvas_laws"])


def editing_laws(model: str) -> tuple[CanvasLaw, ...]:
    """Laws of forwards per block edited until no token changes; empty for other models.

    LLaDA2.2's report has none: its models borrow those of LLaDA2.1's report, with SGLang's cap, which is one higher.
    """
    editing, near = _PUBLISHED["editing"], model.replace("LLaDA2.2", "LLaDA2.1")
    published = tuple(read_as(CanvasLaw, FILE.name, "", row) for row in editing.get(model, ()))
    if near == model:
        return published
    borrowed = (read_as(CanvasLaw, FILE.name, "", row) for row in editing.get(near, ()))
    return published + tuple(
        replace(law, most=law.most + 1, source=f"borrowed from {near}: {law.source}") for law in borrowed
    )


def published_commits(model: str) -> tuple[CommitModel, ...]:
    """Commit models for a model name, the default workload first; those of another size are marked as borrowed."""
    for family in _PUBLISHED["commits"]:
        if model.startswith(family["prefix"]):
            models = [read_as(CommitModel, FILE.name, "", row) for row in family["models"]]
            if model != family["model"]:
                models = [replace(m, source=f"borrowed from {family['model']}: {m.source}") for m in models]
            return tuple(models)
    return ()
