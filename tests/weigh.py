"""Weigh the tree in non-blank lines and syntax nodes, and hold each part against its budget: `python tests/weigh.py`.

Nodes are counted as well as lines, since lines can be saved by packing. `tests/weight.json` holds the budgets, `[lines,
nodes]`; they may only fall, unless a third value says what the raised one pays for. Exit code 1: a part is above its
budget, or a budget was raised without a word.
"""

import ast
import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
BUDGET = "tests/weight.json"
NOT_PRODUCTION = {"tests", "benchmarks", "examples", "docs", "research"}
Weights = dict[str, list[int]]  # lines and nodes by part
Budget = dict[str, list[Any]]  # lines, nodes and perhaps the reason for more


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def weights() -> Weights:
    """Weigh each top-level folder, `production` as a whole, and the words of the pages (their nodes are 0)."""
    weight: Weights = defaultdict(lambda: [0, 0])
    for name in git("ls-files", "*.py").split():
        text = (ROOT / name).read_text(encoding="utf-8")
        lines = sum(1 for line in text.splitlines() if line.strip())
        nodes = sum(1 for _ in ast.walk(ast.parse(text)))
        folder = name.split("/")[0] if "/" in name else "."
        for part in {folder} if folder in NOT_PRODUCTION else {folder, "production"}:
            weight[part][0] += lines
            weight[part][1] += nodes
    pages = git("ls-files", "README.md", "CONTRIBUTING.md", "docs/*.md").split()
    weight["words of pages"][0] = sum(len((ROOT / page).read_text(encoding="utf-8").split()) for page in pages)
    return weight


def raised(budget: Budget) -> list[str]:
    """Parts whose budget is above the one in an earlier commit, without a reason."""
    commits = git("log", "--format=%H", "--", BUDGET).split()
    earlier = [json.loads(git("show", f"{commit}:{BUDGET}")) for commit in commits]
    return [
        f"{part}: the budget {limit} is above an earlier one, {old[part]}, and says not what for"
        for part, limit in budget.items()
        for old in earlier
        if len(limit) == 2 and part in old and (limit[0] > old[part][0] or limit[1] > old[part][1])
    ]


def main() -> int:
    budget: Budget = json.loads((ROOT / BUDGET).read_text(encoding="utf-8"))
    problems = raised(budget)
    for part, weight in sorted(weights().items(), key=lambda item: -item[1][0]):
        limit = budget.get(part)
        most = "" if limit is None else f"   of {limit[0]:,} and {limit[1]:,}"
        print(f"{part:16} {weight[0]:7,} lines {weight[1]:9,} nodes{most}")
        if limit is not None and (weight[0] > limit[0] or weight[1] > limit[1]):
            problems.append(f"{part} weighs {weight}, expected at most {limit[:2]}")
    if problems:
        print(*problems, sep="\n")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
