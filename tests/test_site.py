"""The documents build strictly into a site that fetches nothing, with every page and a reference made from the code."""

import html
import re
import subprocess
import sys
from html.parser import HTMLParser
from importlib import util
from pathlib import Path

import pytest

from dsim.engine.part import AXES, fields_of
from dsim.engine.spec import PRESETS
from dsim.profiler.hardware import GPUS
from dsim.traces.formats import FORMATS

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if util.find_spec("material") is None:
        pytest.skip("mkdocs-material is not installed")
    out = tmp_path_factory.mktemp("site")
    options = ("--strict", "--quiet", "-f", str(ROOT / "mkdocs.yml"), "-d", str(out))
    command = [sys.executable, "-m", "mkdocs", "build", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


class Fetched(HTMLParser):
    """What a browser would fetch to show a page."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        held = dict(attrs)
        address = held.get("src") if tag != "link" else held.get("href")
        if tag == "link" and held.get("rel") in ("canonical", "next", "prev"):
            return
        if address:
            self.addresses.append(address)


@pytest.mark.slow
def test_no_page_fetches_anything_from_elsewhere(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 30
    for page in pages:
        parser = Fetched()
        parser.feed(page.read_text())
        assert parser.addresses, page
        assert [address for address in parser.addresses if re.match(r"(https?:)?//", address)] == [], page
    for style in site.rglob("*.css"):
        assert re.findall(r"url\([\"']?https?://[^)]*", style.read_text()) == [], style


@pytest.mark.slow
def test_every_document_is_a_page(site: Path) -> None:
    for document in (ROOT / "docs").rglob("*.md"):
        name = document.relative_to(ROOT / "docs").with_suffix("")
        folder = name.parent if name.name in ("index", "README") else name
        assert (site / folder / "index.html").is_file(), document


def test_a_page_has_fewer_than_1200_words() -> None:
    pages = [*ROOT.glob("docs/*.md"), *ROOT.glob("docs/engines/*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    assert len(pages) > 40
    pages.remove(ROOT / "docs" / "not-here.md")  # a list, which grows with what is taken out
    assert [page.name for page in pages if len(page.read_text().split()) >= 1200] == []


def test_contributing_names_files_that_exist() -> None:
    named = re.findall(r"`([\w.-]+/[\w./-]+(?:/|\.\w+))`", (ROOT / "CONTRIBUTING.md").read_text())
    assert len(named) > 30
    assert [name for name in named if not (ROOT / name).exists() and not name.startswith(".venv")] == []


@pytest.mark.slow
def test_the_reference_is_made_from_the_code(site: Path) -> None:
    def words(page: str) -> str:
        return html.unescape(re.sub(r"<[^>]+>", "", (site / "reference" / page / "index.html").read_text()))

    commands = words("commands")
    for option in ("dsim capacity", "dsim plan", "--gpu-hour", "--columns", "dsim compare"):
        assert option in commands
    fields = words("fields")
    for name, preset in PRESETS.items():
        assert name in fields
        for axis in AXES:
            for field in fields_of(getattr(preset.policy, axis)):
                assert field.name in fields
    assert set(GPUS) <= set(words("gpus").split())
    formats = words("formats")
    for form in FORMATS.values():
        assert {form.name, *f"{form.time} or {form.input} or {form.output}".split(" or ")} - set(
            re.findall(r"[\w.-]+(?: tokens)?", formats)
        ) == set()
