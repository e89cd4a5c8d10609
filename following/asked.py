"""Answers the live page's questions about another fleet or more traffic: replays in the background, one at a time."""

import re
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..engine.errors import DsimError, cut
from ..engine.policy import PRESETS, parse
from .background import Background
from .follower import Follower
from .outlook import MOST_REPLICAS, asked

LIMIT = 120.0  # s for an answer
KEPT = 6  # answers
MOST_TEXT = 300  # characters of a SPEC
TRAFFIC = (-90.0, 900.0)  # percent more traffic than arrived
FIELDS = ("replicas", "traffic", "settings")


class Asked:
    """The questions that a page asks, and the newest answers."""

    def __init__(self, follower: Follower) -> None:
        self._follower = follower
        self._background = Background(LIMIT)
        self._lock = threading.Lock()
        self._open = ""  # the question that is being answered
        self._answers: deque[dict[str, Any]] = deque(maxlen=KEPT)

    def ask(self, body: Mapping[str, Any]) -> None:
        """Start a question; DsimError if it is not valid, or if another one is being answered.

        replicas: a number. traffic: percent more than arrived. settings: a shipped preset's SPEC; empty: no change.
        """
        follower = self._follower
        unknown = [name for name in body if name not in FIELDS]
        if unknown:
            raise DsimError(f"the question has {cut(unknown[0])}, expected {', '.join(FIELDS)}")
        if not follower.windows or not follower.judged:
            raise DsimError("no window has been judged since the start, expected one whose traffic can be replayed")
        last = follower.windows[-1]
        replicas = _number(body, "replicas", last["replicas"], 1, MOST_REPLICAS)
        if replicas != int(replicas):
            raise DsimError(f"replicas is {replicas:g}, expected a whole number")
        traffic = _number(body, "traffic", 0.0, *TRAFFIC)
        given = body.get("settings", "")
        if not isinstance(given, str):
            raise DsimError(f"settings is {cut(given)}, expected text")
        now, known = follower.scenario.policy, (follower.followed.scenario.policy, *follower.followed.others)
        policy = given.strip() or now
        if policy not in (now, *known):
            check_spec(policy)
        name = f"{int(replicas)} replica{'' if replicas == 1 else 's'}"
        name += f", {abs(traffic):g}% {'more' if traffic > 0 else 'less'} traffic" if traffic else ""
        name += f", {policy}" if policy != now else ""
        scenario = replace(follower.scenario, replicas=int(replicas), policy=policy)
        trace = follower.recent().time_scaled(1 / (1 + traffic / 100))
        with self._lock:
            self._background.start(asked, name, scenario, trace)
            self._open = name

    def look(self) -> dict[str, Any]:
        """The question that is being answered, and the answers, the newest first."""
        with self._lock:
            for found in self._background.poll():
                if self._open:
                    self._background.close()
                    self._answers.appendleft({"question": self._open, "time": time.time()} | found)
                self._open = ""
            return {"asking": self._open, "answers": list(self._answers)}

    def close(self) -> None:
        """Stop the current question."""
        self._background.close()


def _number(body: Mapping[str, Any], name: str, usual: float, least: float, most: float) -> float:
    value = body.get(name, usual)
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise DsimError(f"{name} is {cut(value)}, expected a number from {least:g} to {most:g}")
    return float(value)


def check_spec(spec: str) -> None:
    """DsimError unless the SPEC is a shipped preset with fields: the page must not name files."""
    name = re.split("[:,]", spec)[0]
    if len(spec) > MOST_TEXT or not re.fullmatch(r"[\w.:,=+-]+", spec) or spec.endswith(".toml") or name not in PRESETS:
        raise DsimError(f"settings is {cut(spec)}, expected a preset and its fields, such as vllm-ar,max_num_seqs=16")
    parse(spec)
