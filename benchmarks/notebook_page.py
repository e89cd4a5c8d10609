"""A notebook as one page: cells, and what they show of their last expression.

    python benchmarks/notebook_page.py NOTEBOOK PAGE

In JupyterLab's light or dark colours, as the browser prefers.
"""

import ast
import html
import json
import sys
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

STYLE = """
:root { color-scheme: light dark }
body { font: 13px/1.4 system-ui, sans-serif; margin: 12px; color: light-dark(#212121, #e0e0e0); background: light-dark(#fff, #111) }
pre { background: light-dark(#f5f5f5, #212121); padding: 8px; overflow: auto }
div.output { overflow: auto }
table { border-collapse: collapse; font-size: 12px }
th, td { text-align: right; padding: 4px 8px }
tbody tr:nth-child(odd) { background: light-dark(#f5f5f5, #212121) }
"""  # noqa: E501


def shown(source: str, names: dict[str, Any]) -> str:
    """Run a cell; HTML of its last expression, or empty."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), names)
    if not isinstance(last, ast.Expr):
        return ""
    value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
    if isinstance(value, go.Figure):
        return str(value.to_html(full_html=False, include_plotlyjs=False, config={"responsive": True}))
    return f'<div class="output">{value._repr_html_()}</div>'


def main(notebook: Path, page: Path) -> None:
    parts = [f"<!doctype html><meta charset=utf-8><style>{STYLE}</style><script>{get_plotlyjs()}</script>"]
    names: dict[str, Any] = {}
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code":
            parts += [f"<pre>{html.escape(source)}</pre>", shown(source, names)]
        else:
            parts.append(f"<p>{html.escape(source)}</p>")
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text("\n".join(parts), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
