"""The commands that the documents show, as they are written, and how they are made small enough for a test."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (
    "README.md", "CONTRIBUTING.md", "hooks/README.md",
    *sorted(p.relative_to(ROOT).as_posix() for d in ("docs", "research/evidence") for p in ROOT.glob(f"{d}/**/*.md")),
)  # fmt: skip

FENCE = re.compile(r"^(?:<!-- not run: (?P<reason>[^\n]+) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```", re.M | re.S)
# Of a page's lines that are no fence of commands: those that look like one.
LOOSE = re.compile(r"^ {4,}(?:\$ )?(?:dsim|python3?|pip|pytest) \S", re.M)

# What is added to the first that a command matches; an option that is given twice counts the second time.
SHRUNK = (
    ("replay --as-logged", ""),
    ("capacity", "--num-requests 400 --precision 50% --jobs 1"),
    ("live trace.jsonl", ""),
    ("live", "--num-requests 3 --rate 50 --lengths fixed:32,32"),
    ("plan", "--num-requests 120 --jobs 1"),
    ("profile --model", "--budget 1s --max-batch 4 --thresholds 0.9"),
    ("replay trace.jsonl", ""),
    ("replay", "--num-requests 20"),
    ("serve", "--port 0"),
    ("sweep", "--jobs 1"),
    ("tune", "--num-requests 60 --trials 2"),
    ("validate", "--profile of_tiny.json --budget 30s --seconds 0.2 --load 0.3 --lengths fixed:12,8"),
)
# What stands for something of the reader's, or would take long: the words of a page, and those of its test.
INSTEAD = {
    r"\bplan azure-conv\b": "plan few.jsonl",  # of a longer trace it settles the answer on the whole
    r"\bmodel M\b": "model tiny",
    r"\bpolicy SPEC\b": "policy ar",
    r"\b100ms/token\b": "400ms/token",  # of which a hundred requests are enough to be sure
    r"\brate 12\b": "rate 2",
    r"p90:tpot_chunk=50ms": "p90:norm_latency=50ms",  # which a few requests are enough to miss
    r"\.venv/bin/dsim": "dsim",
    r"(validate .*?--policy \S+)( --policy \S+)+": r"\1",  # one of several
    r"--budget 5s": "--budget 2s",
    r"--ensemble 19": "--ensemble 3",
    r"--budget 12m": "--policy lmdeploy-bd32",
    r" --load [\d.]+": "",
    r"/tmp/steps\.jsonl": "steps.jsonl",
    r"\bsynth out\.jsonl (.*)--num-requests 10000": r"synth out.jsonl \1--num-requests 100 --force",
    r"\bsynth out\.jsonl": "synth out.jsonl --force",
}


@dataclass(frozen=True)
class Block:
    """A fence of a page."""

    language: str
    text: str
    reason: str | None  # why its commands are not run

    @property
    def lines(self) -> list[str]:
        """Its commands, a line each, without what is said beside them."""
        joined = re.sub(r"\\\n\s*", "", self.text)
        return [line for row in joined.splitlines() if (line := re.sub(r"(^|\s)# .*$", "", row).strip())]


def blocks(page: str) -> list[Block]:
    text = (ROOT / page).read_text()
    return [Block(found["language"], found["text"], found["reason"]) for found in FENCE.finditer(text)]


def spans(page: str) -> list[list[str]]:
    """The words of each `dsim ...` within a page's text and in its fences, without `dsim`."""
    text = FENCE.sub("", (ROOT / page).read_text())
    fenced = [line for block in blocks(page) if block.language == "sh" for line in block.lines]
    return [found.split() for found in re.findall(r"`dsim ([^`]+)`", text)] + [
        shlex.split(line)[1:] for line in fenced if line.startswith("dsim ")
    ]


def shrunk(line: str) -> list[str]:
    """The words of a `dsim` command, made small: without `dsim`."""
    for words, other in INSTEAD.items():
        line = re.sub(words, other, line)
    words = [word for word in shlex.split(line) if not re.fullmatch(r"[A-Z_]+=.*", word)]  # but of the environment
    assert words[0] == "dsim", line
    more = next((more for pattern, more in SHRUNK if re.match(f"dsim {pattern}\\b", " ".join(words))), "")
    return [*words[1:], *shlex.split(more)]
