"""The documents' pictures are what their scripts make of today's tables and runs: `python docs/pictures.py`."""

import re
from pathlib import Path

import pytest

from dsim.benchmarks import ranking, readme_answers
from dsim.docs import pictures

from .checks import cases
from .cli.pages import PAGES
from .test_engines_page import script

TEXT = {page: (pictures.ROOT / page).read_text() for page in PAGES}
KEPT = pictures.kept()


@cases("name", *pictures.SVGS)
def test_a_picture_is_drawn_again_and_its_page_says_its_title(name: str) -> None:
    assert (pictures.FOLDER / f"{name}.svg").read_text() == pictures.SVGS[name]()
    assert f"![{pictures.TITLES[name]}](images/{name}.svg)" in TEXT["docs/concepts.md"]


def test_the_figures_of_the_load_are_those_of_its_page_and_of_today() -> None:
    rows = re.findall(r"^\| `.*", TEXT["research/evidence/ranking.md"], re.M)
    assert set(rows) <= set(pictures.FIGURES.read_text().splitlines())
    latency, _ = ranking.cell("chunk:8", 3.0, "a100-sdar-8b", 2000, 4).mean("norm_latency_ms.p50")
    assert (3.0, round(latency, 1)) in pictures.measured()["chunk:8"]


def test_the_page_says_what_the_photograph_shows() -> None:
    assert f"![A report: {KEPT['answer']}](images/report.png)" in TEXT["docs/report.md"]


@pytest.mark.slow
def test_the_photographed_command_gives_the_same_numbers_today() -> None:
    assert {**pictures.shown(Path("run")), "picture": pictures.digest()} == KEPT


def test_a_script_makes_every_picture_and_a_page_shows_it() -> None:
    engines = {f"engine-{name}.svg" for name in script("engine_pictures").WORLDS}
    made = {*engines, *(f"{name}.svg" for name in pictures.SVGS), readme_answers.PICTURE.name, pictures.PHOTO.name}
    assert {path.name for path in pictures.FOLDER.iterdir()} == made | {pictures.KEPT.name}
    assert {Path(name).name for text in TEXT.values() for name in re.findall(r"!\[.*?\]\((.*?)\)", text)} == made
