"""The words of a fleet that cannot be read: one line with both values, whichever reads them."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from dsim.engine.errors import PolicyError
from dsim.sim.link import Link
from dsim.sim.routers import routing
from dsim.sim.scalers import scaling
from dsim.sim.startup import Startup


@pytest.mark.parametrize(
    ("read", "words", "message"),
    [
        (routing, "jsq,delay=x", "router 'jsq,delay=x': there is no field 'delay', expected none"),
        (routing, "jsk,delay=1", "router is 'jsk' (did you mean jsq?), expected one of round-robin, random, least"),
        (
            scaling,
            "hpb",
            "scaler is 'hpb' (did you mean hpa?), expected one of fixed, schedule, hpa, queued-forward",
        ),
        (scaling, "hpa,metric=cpu", "metric is 'cpu', expected one of requests, waiting, running, tokens, kv"),
        (scaling, "hpa,worst=2", "there is no field 'worst', expected one of every, metric, target, least, most"),
        (scaling, "hpa,every=0", "every is 0.0 s, expected above 0 and finite"),
        (scaling, "schedule,at=0/2/x/4", "at is '0/2/x/4', expected TIME/REPLICAS/TIME/REPLICAS..., such as 0/2/3"),
        (Startup.parse, "load", "startup is 'load', expected seconds, PART=SECONDS[+-SD],... such as provision=240"),
        (Startup.parse, "-4", "startup is -4 s, expected at least 0 and finite"),
        (Link.parse, "450GB/s,10", "'10' is not a latency in us, ms, s"),
        (Link.parse, "1GB/s,share=pool", "there is no field 'share', expected one of from, to, sharing, overlap"),
        (Link.parse, "1GB/s,overlap=yes", "overlap is 'yes', expected true or false"),
    ],
)
def test_words_that_cannot_be_read_are_refused_with_both_values(
    read: Callable[[str], Any], words: str, message: str
) -> None:
    with pytest.raises(PolicyError, match=re.escape(message)) as error:
        read(words)
    assert "\n" not in str(error.value)
