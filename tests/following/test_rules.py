"""The alert rules against what `dsim follow` exports, by promql-parser, and promtool where it is."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from dsim.following.exported import METRICS

from ..checks import cases
from .day import NOW, a_day
from .pages import exposition

ALERTS = Path(__file__).parents[2] / "following" / "alerts.yml"
RULES = yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]
EXPRESSIONS = [rule["expr"] for rule in RULES]


def selectors(expression: Any) -> Iterator[Any]:
    """The vector selectors of a parsed expression."""
    if type(expression).__name__ == "VectorSelector":
        yield expression
    for name in ("lhs", "rhs", "expr", "vector_selector"):
        if (inner := getattr(expression, name, None)) is not None:
            yield from selectors(inner)
    for inner in getattr(expression, "args", None) or ():
        yield from selectors(inner)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, set[str]]]:
    """By metric, the type and the labels of what is exported of a server as its twin says."""
    follower = a_day(tmp_path_factory.mktemp("day"))
    follower.alarms.close()
    text = exposition(follower, NOW)
    return {
        family.name: (family.type, {label for sample in family.samples for label in sample.labels})
        for family in text_string_to_metric_families(text)
    }


def test_every_metric_is_exported_with_a_value_and_documented(exported: dict[str, tuple[str, set[str]]]) -> None:
    assert {name: kind for name, (kind, _) in exported.items()} == {f"dsim_follow_{name}": "gauge" for name in METRICS}


@cases("expression", *EXPRESSIONS)
def test_an_expression_parses_and_selects_exported_metrics_by_their_labels(
    expression: str, exported: dict[str, tuple[str, set[str]]]
) -> None:
    parser = pytest.importorskip("promql_parser", reason="promql-parser is not installed (the test extra)")
    found = list(selectors(parser.parse(expression)))
    assert found
    for one in found:
        kind, labels = exported[one.name]
        assert kind == "gauge"  # a counter would want rate()
        assert {matcher.name for matcher in one.matchers.matchers} <= labels


PROMTOOL = shutil.which("promtool")
# An alert, the series that raise it, and the minute from which it is open.
RAISED: tuple[tuple[str, dict[str, str], int], ...] = (
    ("DsimFollowAlarm", {'dsim_follow_alarm{cause="prices"}': "0 1 1"}, 1),
    ("DsimFollowNoHeadroom", {"dsim_follow_headroom": "1 -0.1x20"}, 11),
    ("DsimFollowSoonFull", {"dsim_follow_requests_rate": "1+0.05x20", "dsim_follow_capacity": "4x20"}, 11),
    ("DsimFollowSilent", {"dsim_follow_age_seconds": "900+1x20"}, 6),
    ("DsimFollowServerGone", {'dsim_follow_up{url="http://a"}': "1 0x20"}, 3),
)


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")
def test_promtool_accepts_rules_and_metrics_and_each_rule_raises_its_alert() -> None:
    Path("alerts.yml").write_text(ALERTS.read_text())
    tests = []
    for name, series, minute in RAISED:
        at: list[dict[str, Any]] = [{"eval_time": f"{minute + late}m", "alertname": name} for late in (-1, 0)]
        summary = next(rule for rule in RULES if rule["alert"] == name)["annotations"]["summary"]
        for variable, text in ((r"$labels.cause", "prices"), (r"$labels.url", "http://a"), ("$value", "906")):
            summary = summary.replace(f"{{{{ {variable} }}}}", text)
        labels = dict(re.findall(r'(\w+)="(.*?)"', next(iter(series)))) | {"severity": "warning"}
        at[1] |= {"exp_alerts": [{"exp_labels": labels, "exp_annotations": {"summary": summary}}]}
        inputs = [{"series": name, "values": values} for name, values in series.items()]
        tests.append({"input_series": inputs, "alert_rule_test": at, "interval": "1m"})
    given = {"rule_files": ["alerts.yml"], "evaluation_interval": "1m", "tests": tests}
    Path("tests.yml").write_text(json.dumps(given))
    for command, text in (
        (("check", "rules", "alerts.yml"), ""), (("test", "rules", "tests.yml"), ""),
        (("check", "metrics"), exposition(a_day(Path("day")), NOW)),
    ):  # fmt: skip
        run = subprocess.run([PROMTOOL, *command], input=text, capture_output=True, text=True)
        assert (run.returncode, run.stderr) == (0, ""), run.stdout
