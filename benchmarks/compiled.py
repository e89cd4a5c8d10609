"""The compiler's facts about every kernel, as a table: `python benchmarks/compiled.py [--write] [CAPABILITY ...]`.

Registers, spills, shared memory, programs on a multiprocessor and tensor-core instructions at the shapes of real steps,
from tests/kernels/compile_ahead.py. No GPU is needed; the default is compute capability 9.0, 10.0 and 12.0. These are
facts of compilation, not times. --write puts the table into kernels/README.md.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import triton

HERE = Path(__file__).resolve().parent
README = HERE.parent / "kernels" / "README.md"
BEGIN, END = "<!-- made by benchmarks/compiled.py -->", "<!-- end of what is made -->"
CAPABILITIES = ["90", "100", "120"]
COLUMNS = ("warps", "registers", "spilled", "shared", "programs", "tensor_cores")


def facts(capabilities: Iterable[str]) -> list[dict[str, Any]]:
    """The output of compile_ahead.py: an entry a compute capability, kernel and shape."""
    script = HERE.parent / "tests" / "kernels" / "compile_ahead.py"
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, str(script), *capabilities], stdout=subprocess.PIPE, check=True, env=env)
    return [json.loads(line) for line in done.stdout.splitlines()]


def table(found: list[dict[str, Any]]) -> str:
    """A row for each kernel and shape; of shapes compiled to the same kernel, only the first."""
    capabilities = list(dict.fromkeys(fact["capability"] for fact in found))
    rows: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    for fact in found:
        rows.setdefault((fact["kernel"], fact["case"]), {})[fact["capability"]] = fact
    names = " / ".join(f"{capability / 10:.1f}" for capability in capabilities)
    lines = [
        f"Triton {triton.__version__}, PyTorch {torch.__version__}; figures for {names}, one where all are the same.",
        "",
        "| kernel | warps | registers | spilled, B | shared, KiB | programs | products |",
        "|---|---|---|---|---|---|---|",
    ]
    seen = set()
    for (kernel, case), by_capability in rows.items():
        cells = [_cell([by_capability.get(c, {}).get(name) for c in capabilities], name) for name in COLUMNS]
        if (kernel, *cells) not in seen:
            seen.add((kernel, *cells))
            _, _, folder, _, function = kernel.split(".")
            lines.append(" | ".join([f"| {folder}, `{function}`{', ' + case if case else ''}", *cells]) + " |")
    return "\n".join(lines) + "\n"


def _cell(values: list[Any], name: str) -> str:
    """A column's figures by capability, with a dash if not compiled."""
    words = ["-" if v is None else f"{v / 1024:.0f}" if name == "shared" else str(v) for v in values]
    compiled = {word for word in words if word != "-"}
    return compiled.pop() if len(compiled) == 1 else " / ".join(words)


def main() -> None:
    parser = argparse.ArgumentParser(description="Say what the compiler says of every kernel.")
    parser.add_argument("capability", nargs="*", default=CAPABILITIES, help="compute capabilities, such as 90")
    parser.add_argument("--write", action="store_true", help="put the table into kernels/README.md")
    given = parser.parse_args()
    made = table(facts(given.capability))
    print(made, end="")
    if given.write:
        before, rest = README.read_text(encoding="utf-8").split(f"{BEGIN}\n")
        _, after = rest.split(END)
        README.write_text(f"{before}{BEGIN}\n\n{made}\n{END}{after}", encoding="utf-8")
        print(f"Wrote {README}")


if __name__ == "__main__":
    main()
