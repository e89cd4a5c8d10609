"""No comment or document cites a file of ours that is not there, or a section that its file does not have."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SPECS, EVIDENCE = ROOT / "research" / "specs", ROOT / "research" / "evidence"
FOLDERS = tuple(path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith("."))
# A document by its name, or a file by its path from the root.
DOCUMENT = re.compile(r"(?<![\w/.*{}])((?:\.\./)*(?:[\w-]+/)*[\w-]+\.md)\b")
FILE = re.compile(rf"(?<![\w/.*-])((?:{'|'.join(FOLDERS)})/[\w./-]+\.(?:py|sh|toml|csv|jsonl|json|svg|png))\b")
SECTION = re.compile(r"(?<![\w/])([\w-]+\.md),? (?:section )?(\d+(?:\.\d+)?)(?![\d:])")
LINK = re.compile(r"\]\((?!https?://|#|mailto:)([^)#\s]+)(#[^)\s]*)?\)")
# They name files that are not there.
NOT_OURS = ("tests/cli/test_model.py", "tests/test_citations.py", "research/attack")


def texts(*endings: str) -> Iterator[tuple[Path, str]]:
    """The tracked files with these endings."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a checkout")
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if path.suffix in endings and path.is_file() and not name.startswith(NOT_OURS):
            yield path, path.read_text()


def found(path: Path, cited: str) -> bool:
    """Whether a name is of a file: beside the one that cites it, in the root, or among the documents.

    docs/generate.py cites from docs/reference, which is there only while the site is built.
    """
    folders = (path.parent, ROOT, ROOT / "docs", ROOT / "docs" / "reference", SPECS, EVIDENCE)
    return any((folder / cited).resolve().is_file() for folder in folders)


def test_every_cited_file_is_there() -> None:
    generated = set(re.findall(r'"(reference/[\w-]+\.md)"', (ROOT / "docs" / "generate.py").read_text()))
    missing = []
    for path, text in texts(".py", ".md", ".toml", ".yml", ".sh"):
        if path.name == "not-here.md":  # which tells of files that are gone
            continue
        cited = DOCUMENT.findall(text) + FILE.findall(text)
        if SPECS in path.parents:  # they cite other projects' sources, and one another
            cited = [name for name in cited if "/" not in name]
        names = set(cited) - generated
        missing += [f"{path.relative_to(ROOT)}: {name}" for name in sorted(names) if not found(path, name)]
    assert missing == []


def test_every_cited_section_of_a_spec_is_there() -> None:
    specs = {path.name: path.read_text() for path in SPECS.glob("*.md")}
    held = {name: set(re.findall(r"^#{2,3} (\d+(?:\.\d+)?)", text, re.MULTILINE)) for name, text in specs.items()}
    count = 0
    for path, text in texts(".py", ".md"):
        for name, section in SECTION.findall(text):
            if name in held and name != "errata.md":
                count += 1
                assert section in held[name], f"{path.relative_to(ROOT)}: {name} {section}"
    assert count > 40


def test_every_link_between_documents_leads_somewhere() -> None:
    for path, text in texts(".md"):
        for cited, _ in LINK.findall(text):
            there = (path.parent / cited).exists() or cited.startswith("reference/")
            assert there, f"{path.relative_to(ROOT)}: {cited}"
