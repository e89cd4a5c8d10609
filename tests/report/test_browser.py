"""The pages in a real browser: they draw, fit, fold, open, brush and change their colours."""

import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dsim.profiler.profile import load, save

from ..checks import cases
from ..cli.command import rows, succeed
from ..cli.test_sweep import TOML
from .browser import CHROMIUM, Browser

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM, reason="no chromium on this machine: apt-get install chromium"),
]

QUEUE = "azure-conv --profile ar.json --policy ar,max_batch=1 --arrival poisson --lengths fixed:512,1 --jobs 1"
COMMANDS = {
    "replay": "replay azure-conv --num-requests 80 --policy lmdeploy-bd32 --policy optimus --slo ttft=800ms",
    "capacity": f"capacity {QUEUE} --slo mean:e2el=150ms --num-requests 150 --precision 50%",
    "tune": "tune trace.jsonl --space space.toml --slo norm_latency=20ms --trials 3",
    "sweep": "sweep sweep.toml --jobs 1",
    "compare": "compare replay replay",
    "plan": f"plan {QUEUE} --policy ar,max_batch=8 --slo mean:e2el=150ms --num-requests 200 --rate 30",
}  # fmt: skip
SPACE = 'policy = ["optimus", "chunk"]\nchunk = [4, 16]\nmax_batch = ["none", 32]\n'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A page of every command that writes a folder."""
    with contextlib.chdir(tmp_path_factory.mktemp("pages")):
        Path("trace.jsonl").write_text(rows(100))
        save(replace(load("a100-sdar-8b"), family="autoregressive"), "ar.json")
        Path("space.toml").write_text(SPACE)
        Path("sweep.toml").write_text(TOML)
        for name, command in COMMANDS.items():
            succeed(command, "-o", name)
        yield Path.cwd()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as opened:
        yield opened


def colours(browser: Browser) -> tuple[str, str]:
    """The page's ground and its ink."""
    found = browser.js("(s => [s.backgroundColor, s.color])(getComputedStyle(document.body))")
    return found[0], found[1]


# Tables that are wider than their place.
WIDER = (
    "[...document.querySelectorAll('section.table > .scroll')].filter(s => s.checkVisibility())"
    ".filter(s => s.scrollWidth > s.clientWidth).length"
)


@cases("name", *COMMANDS)
def test_a_page_draws_everything_and_fits_wide_and_narrow_light_and_dark_and_on_paper(
    browser: Browser, folder: Path, name: str
) -> None:
    for width, dark in ((400, True), (1400, False)):
        browser.open(folder / name / "report.html", width=width, dark=dark)
        assert (browser.errors, browser.js("document.documentElement.scrollWidth")) == ([], width)
        undrawn = "[...document.querySelectorAll('.plot')].filter(p => p.checkVisibility() && !p.data).map(p => p.id)"
        assert browser.js(undrawn) == []
        assert colours(browser)[0] == ("rgb(22, 24, 27)" if dark else "rgb(246, 247, 249)")
        if width == 400:
            assert browser.js(WIDER) == 0
            for role, words in browser.js(
                "[...document.querySelectorAll('.plot')].map(p => [p.getAttribute('role'), p.ariaLabel])"
            ):
                assert role == "img"
                assert re.match(r"Chart: .* over ", words), words
            assert browser.js("document.querySelectorAll('.plot .legend').length") == 0  # Plotly's own
    # On the wide one's first screen, 900 high, are the answer, its numbers and a chart.
    bottoms = browser.js(
        "[...document.querySelectorAll('.answer, .numbers, .plot')].slice(0, 3)"
        ".map(e => e.getBoundingClientRect().bottom)"
    )
    assert len(bottoms) == 3
    assert max(bottoms) < 900
    command = browser.js("document.querySelector('.command').textContent")
    assert command.startswith(f"dsim {COMMANDS[name].split()[0]} ")
    assert " -o " not in command
    browser.print_view()
    shown = "[...document.querySelectorAll('section.table > .scroll > table, .plot .main-svg')]"
    fits = ".filter(e => e.checkVisibility()).every(e => e.getBoundingClientRect().right <= innerWidth)"
    assert browser.js(shown + fits)


def test_buttons_change_light_and_dark_hide_a_policy_everywhere_and_open_the_wall_of_numbers(
    browser: Browser, folder: Path
) -> None:
    browser.open(folder / "replay" / "report.html")
    light = colours(browser)
    browser.click("#theme")
    assert colours(browser) == ("rgb(22, 24, 27)", "rgb(232, 234, 237)")
    grid = "getComputedStyle(document.querySelector('#queue .gridlayer path')).stroke"
    assert browser.js(grid) == "rgb(60, 66, 72)"
    browser.click("#theme")
    assert colours(browser) == light
    browser.click("nav button:nth-of-type(2)")
    browser.wait("document.getElementById('queue').data[1].visible === false")
    assert browser.js("document.getElementById('queue').data[0].visible") is not False
    assert browser.js("document.getElementById('cdf-e2el').data[1].visible") is False
    browser.click("nav button:nth-of-type(2)")
    browser.wait("document.getElementById('queue').data[1].visible === true")
    table = "document.querySelector('details.section table').checkVisibility()"
    assert not browser.js(table)
    browser.click("details.section summary")
    assert browser.js(table)


def test_dragging_over_a_chart_shows_the_same_time_in_all(browser: Browser, folder: Path) -> None:
    browser.open(folder / "replay" / "report.html")
    span = "document.getElementById('{}').layout.xaxis.range"
    whole = browser.js(span.format("kv"))
    browser.drag(browser.place("#queue .nsewdrag", 0.25), browser.place("#queue .nsewdrag", 0.5))
    browser.wait(f"{span.format('kv')}[0] > {whole[0]}")
    chosen = browser.js(span.format("queue"))
    for other in ("queue", "batch", "kv", "slo-time"):
        assert browser.js(span.format(other)) == pytest.approx(chosen)


def test_a_click_on_a_head_sorts_a_table_within_its_groups_and_back(browser: Browser, folder: Path) -> None:
    browser.open(folder / "sweep" / "report.html")
    cells = (
        "[...document.querySelector('section.table table').tBodies[0].rows].map(r => r.cells[{}].textContent.trim())"
    )
    heads = browser.js("[...document.querySelectorAll('section.table th button.sort')].map(b => b.textContent.trim())")
    column = heads.index("policy.chunk")
    before = browser.js(cells.format(column))
    assert before == ["4", "8", "4", "8"]
    click = f"document.querySelectorAll('section.table th button.sort')[{column}].click()"
    found = []
    for _ in range(3):
        browser.js(click)
        found.append(browser.js(cells.format(column)))
    assert found == [["4", "4", "8", "8"], ["8", "8", "4", "4"], before]
    browser.open(folder / "replay" / "report.html")
    groups = (
        "[...document.querySelectorAll('section.table tr')].map((r, i) => [i, r.className, r.textContent.trim()])"
        ".filter(row => row[1] === 'group')"
    )
    first = browser.js(groups)
    assert len(first) > 1
    browser.js("document.querySelectorAll('section.table th button.sort')[1].click()")
    assert browser.js(groups) == first
    assert browser.js("document.querySelectorAll('th[aria-sort=ascending]').length") == 1


def test_a_table_without_room_is_stacked(browser: Browser, folder: Path) -> None:
    browser.open(folder / "replay" / "report.html", width=300)  # where the moment's table of two policies has no room
    assert browser.js(WIDER) == 0
    browser.open(folder / "plan" / "report.html", width=400)
    risk = "getComputedStyle(document.querySelectorAll('.stacked td')[0], '::before').content"
    assert browser.js(risk) == 'attr(data-head) ": "' or ": " in browser.js(risk)


def test_a_printed_page_is_light_and_unfolded(browser: Browser, folder: Path) -> None:
    browser.open(folder / "replay" / "report.html", dark=True)
    assert browser.pdf().startswith(b"%PDF")
    assert browser.js("document.querySelector('details.section').open")


def test_a_page_shows_the_numbers_of_its_json(browser: Browser, folder: Path) -> None:
    found = json.loads((folder / "capacity" / "capacity.json").read_text())
    browser.open(folder / "capacity" / "report.html")
    shown, unit = browser.js("document.querySelector('.number p').textContent").split()
    assert (float(shown), unit) == (pytest.approx(found["rate"]["value"], rel=0.005), "req/s")
    [[rates, used]] = browser.js("document.getElementById('distance').data.map(t => [t.x, t.y])")
    bound = found["bounds"]["mean:e2el=150ms"]
    assert used == pytest.approx([p["values"]["mean:e2el=150ms"] / bound for p in found["curve"]])
    assert rates == pytest.approx([p["rate"] for p in found["curve"]])
