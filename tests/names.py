"""Count what makes code hard to read: empty names, inline ifs, lines kept from the formatter.

    python tests/names.py [--worst N]

A bound name is empty if it is a pronoun, a participle or a preposition. Exit code 1: a count is above its limit.
"""

import argparse
import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
EMPTY = """
own held given found asked said one ones known made kept others shown told named wanted seen left taken sent here there
what whole part much more most some rest way how apart beyond mine its theirs where when why at on of by to from_ upto
it them thing things both each either such
"""
NOT_PRODUCTION = {"tests", "benchmarks", "examples", "docs", "research"}
LIMITS = {"empty names, %": 1.0, "inline ifs in 1,000 lines": 15.0, "fmt: skip": 60}


def names_of(tree: ast.AST) -> list[str]:
    """Names that are bound, and parameters."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.append(node.id)
        elif isinstance(node, ast.arg):
            names.append(node.arg)
    return [name for name in names if name not in ("self", "_")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worst", type=int, default=0, metavar="N", help="files with most empty names")
    worst = parser.parse_args().worst
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    bound, inline, lines, skips = 0, 0, 0, 0
    empty: dict[str, list[str]] = {}
    for name in listed.stdout.split():
        if "/" in name and name.split("/")[0] in NOT_PRODUCTION:
            continue
        text = (ROOT / name).read_text(encoding="utf-8")
        tree = ast.parse(text)
        names = names_of(tree)
        bound += len(names)
        empty[name] = [word for word in names if word in EMPTY.split()]
        inline += sum(isinstance(node, ast.IfExp) for node in ast.walk(tree))
        lines += sum(1 for line in text.splitlines() if line.strip())
        skips += text.count("# fmt: skip")
    num_empty = sum(map(len, empty.values()))
    counts = {
        "empty names, %": 100 * num_empty / bound,
        "inline ifs in 1,000 lines": 1000 * inline / lines,
        "fmt: skip": skips,
    }
    for count, limit in LIMITS.items():
        print(f"{count}: {counts[count]:.1f}, at most {limit:g}")
    for name in sorted(empty, key=lambda name: -len(empty[name]))[:worst]:
        print(f"  {name}: {', '.join(f'{word} {num}' for word, num in Counter(empty[name]).most_common(5))}")
    return int(any(counts[count] > limit for count, limit in LIMITS.items()))


if __name__ == "__main__":
    sys.exit(main())
