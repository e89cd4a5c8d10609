"""The README's picture, from what its first command found: `python benchmarks/answer.py runs/plan/plan.json`.

It writes docs/images/answer.svg; tests/cli/test_pages.py holds the README's sentence to the picture.
"""

import argparse
import json
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape, quoteattr

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "answer.svg"
INK, BEST, OTHER = "#7d8694", "#2f7ed8", "#d9822b"
LEFT, SCALE, TOP, ROW = 150, 330, 60, 62  # pixels; SCALE is the dearest fleet's


def title(plan: dict[str, Any]) -> str:
    """The picture in words, for those who cannot see it."""
    fleets = " and ".join(f"{f['policy']} needs {f['gpus']} for {f['per_hour']:g} dollars" for f in plan["ranking"])
    return f"What meets the target at {plan['rate']:g} requests a second costs an hour, in A100s: {fleets}"


def svg(plan: dict[str, Any]) -> str:
    """Each policy's smallest fleet that meets the SLOs: a square a GPU, the cost, and the share of requests that do."""
    fleets = plan["ranking"]
    step = SCALE / max(fleet["gpus"] for fleet in fleets)
    said = escape(title(plan))
    height = TOP + ROW * len(fleets)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 {height}" width="720" height="{height}" role="img" '
        f'aria-label={quoteattr(title(plan))} font-family="system-ui, sans-serif">',
        f"<title>{said}</title>",
        text(20, 24, f"A100s that meet the target at {plan['rate']:g} requests a second", INK, 15, bold=True),
    ]
    for row, fleet in enumerate(fleets):
        y, colour = TOP + ROW * row, OTHER if row else BEST
        [attained] = fleet["values"].values()
        out.append(text(LEFT - 14, y + 20, fleet["policy"], colour, 14, "end", bold=True))
        out += [
            f'<rect x="{LEFT + step * k:.0f}" y="{y}" width="{step - 6:.0f}" height="30" rx="3" fill="{colour}"/>'
            for k in range(fleet["gpus"])
        ]
        x = round(LEFT + step * fleet["gpus"] + 6)
        out.append(text(x, y + 13, f"{fleet['gpus']} GPUs, ${fleet['per_hour']:g} an hour", colour, 14, bold=True))
        out.append(text(x, y + 31, f"{100 * attained['value']:.1f} % of requests meet it", INK, 13))
    return "\n".join([*out, "</svg>"]) + "\n"


def text(x: int, y: int, words: str, colour: str, size: int, anchor: str = "start", *, bold: bool = False) -> str:
    """A line of text."""
    style = f'fill="{colour}" text-anchor="{anchor}" font-size="{size}"' + (' font-weight="600"' if bold else "")
    return f'<text x="{x}" y="{y}" {style}>{escape(words)}</text>'


def main() -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plan", type=Path)
    plan = json.loads(parser.parse_args().plan.read_text(encoding="utf-8"))
    PICTURE.write_text(svg(plan), encoding="utf-8")
    print(title(plan))


if __name__ == "__main__":
    main()
