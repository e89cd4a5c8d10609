"""Change the code at random, in one place at a time, and count what the tests notice: `python research/mutants.py`.

A mutant is one comparison, number, `and`, `or`, `not` or arithmetic operator of a file, replaced. It is killed if the
tests of its own folder fail, or outlast the time limit, in a copy of the tree. Rules that are mutated stay in plain
Python. The log holds a line a mutant; a second call with the same log goes on where the first one stopped.
"""

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("engine", "planner", "profiler", "sim", "report")
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult,
}  # fmt: skip


def replacements(node: ast.AST) -> Iterator[ast.AST]:
    """What may stand in place of a node."""
    match node:
        case ast.Compare(left, [operator], right):
            yield ast.Compare(left, [COMPARISONS[type(operator)]()], right)
        case ast.BoolOp(ast.And(), values):
            yield ast.BoolOp(ast.Or(), values)
        case ast.BoolOp(ast.Or(), values):
            yield ast.BoolOp(ast.And(), values)
        case ast.UnaryOp(ast.Not(), operand):
            yield operand
        case ast.BinOp(left, operator, right) if type(operator) in ARITHMETIC:
            yield ast.BinOp(left, ARITHMETIC[type(operator)](), right)
        case ast.Constant(int() | float() as number) if not isinstance(number, bool):
            yield ast.Constant(number + 1)
            yield ast.Constant(number - 1)


class Replace(ast.NodeTransformer):
    """Counts the replacements of a file's nodes, and does the one with a number. Annotations stay."""

    def __init__(self, number: int = -1) -> None:
        self.count, self.number, self.name = 0, number, ""

    def generic_visit(self, node: ast.AST) -> ast.AST:
        for replacement in replacements(node):
            if self.count == self.number:
                self.name = f"line {getattr(node, 'lineno', 0)}: {ast.unparse(node)} -> {ast.unparse(replacement)}"
                node = replacement
            self.count += 1
        return super().generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is not None:
            node.value = self.visit(node.value)
        return node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        return node


def count(path: Path) -> int:
    """How many mutants of a file there are."""
    replace = Replace()
    replace.visit(ast.parse(path.read_text(encoding="utf-8")))
    return replace.count


def choose(folder: str, number: int, seed: int) -> list[tuple[str, int]]:
    """Random mutants of a folder: file and number."""
    files = sorted((ROOT / folder).rglob("*.py"))
    every = [(str(path.relative_to(ROOT)), i) for path in files for i in range(count(path))]
    return random.Random(f"{seed} {folder}").sample(every, number)


def copy_tree(to: Path) -> None:
    """Copy the files that git knows."""
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in names.splitlines():
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, to / name)


def outcome(tree: Path, folder: str, marks: str, limit: float) -> str:
    """What the tests of a folder say: `survived`, `killed` or `killed by the time limit`."""
    plain = str(int(folder == "engine"))  # which alone has rules
    env = os.environ | {"NUMBA_DISABLE_JIT": plain, "PYTHONPATH": str(tree.parent), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", "-m", marks]
    try:
        done = subprocess.run(
            [*command, f"tests/{folder}"], cwd=tree, env=env, timeout=limit, capture_output=True, check=False
        )
    except subprocess.TimeoutExpired:
        return "killed by the time limit"
    return "survived" if done.returncode == 0 else "killed"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", default=FOLDERS, metavar="FOLDER", help=" ".join(FOLDERS))
    parser.add_argument("--number", type=int, default=20, help="of mutants a folder [20]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-m", dest="marks", default="not slow", help='tests, as for pytest ["not slow"]')
    parser.add_argument("--limit", type=float, default=900.0, help="seconds of a folder's tests [900]")
    parser.add_argument("--log", type=Path, default=Path("mutants.jsonl"))
    options = parser.parse_args()
    results: dict[tuple[str, int, str], str] = {}
    if options.log.exists():
        for line in options.log.read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            results[entry["file"], entry["number"], entry["marks"]] = entry["result"]
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch) / "dsim"
        copy_tree(tree)
        for folder in options.folders:
            chosen = choose(folder, options.number, options.seed)
            missing = [mutant for mutant in chosen if (*mutant, options.marks) not in results]
            if missing and outcome(tree, folder, options.marks, options.limit) != "survived":
                print(f"{folder}: its tests fail without a mutant, or take longer than {options.limit:.0f} s")
                return 1
            for name, number in missing:
                text = (tree / name).read_text(encoding="utf-8")
                replace = Replace(number)
                mutant = replace.visit(ast.parse(text))
                (tree / name).write_text(ast.unparse(ast.fix_missing_locations(mutant)) + "\n", encoding="utf-8")
                result = outcome(tree, folder, options.marks, options.limit)
                (tree / name).write_text(text, encoding="utf-8")
                results[name, number, options.marks] = result
                entry = {"file": name, "number": number, "marks": options.marks, "result": result}
                with options.log.open("a", encoding="utf-8") as log:
                    log.write(json.dumps(entry | {"what": replace.name}) + "\n")
                print(f"{result}: {name}, {replace.name}", flush=True)
            killed = sum(results[(*mutant, options.marks)].startswith("killed") for mutant in chosen)
            print(f"{folder}: {killed} of {len(chosen)} killed", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
