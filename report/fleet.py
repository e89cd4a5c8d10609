"""A fleet in words: GPUs, cost, SLOs."""

from collections.abc import Mapping
from typing import Any

from .table import counted, number, outward, percent, percent_span, places_of, time_of

Json = Mapping[str, Any]  # of a plan


def met_share(info: Json, fleet: Json) -> str:
    """Criteria with intervals."""
    return ", ".join(value_of(info, fleet, text, value) for text, value in fleet["values"].items()) or "–"


def value_of(info: Json, fleet: Json, text: str, value: Json) -> str:
    """With its interval; if replications agree, with the number of requests."""
    mean, low, high = value["value"], value["low"], value["high"]
    bound = info["bounds"][text]
    if text not in info["share_criteria"]:
        ends = "" if low is None else f" ({number(1e3 * low)} to {number(1e3 * high)})"
        if low is not None and low == high:  # without draws the interval is empty
            ends = " in every replication"
        return f"{text.partition('=')[0]} {time_of(1e3 * mean, bound)} ms{ends}"
    if mean == 1:
        sure = "" if low is None else f", at least {floor_of(low)} %"
        return f"100 % of {fleet['judged']:,}{sure}"
    if low is None:
        return f"{percent(mean, bound)} %"
    return percent_span(mean, low, high, bound)


def floor_of(share: float) -> str:
    """In percent, down to the first digit of its distance from 100."""
    if not 0 < share < 1:
        return f"{100 * share:g}"
    places = max(0, places_of(100 * (1 - share)) - 1)
    return f"{outward(100 * share, places):.{places}f}"


def name_of(fleet: Json) -> str:
    """With its place if there are several."""
    return f"{fleet['policy']} on {fleet['place']}" if fleet["place"] else str(fleet["policy"])


def bought(fleet: Json) -> int:
    """Replicas that are paid, without the spare."""
    return int(fleet["gpus"] // fleet["gpus_per_replica"] - fleet["spare"])


def gpus_of(fleet: Json) -> str:
    count = fleet["gpus"]
    of_each = f" of {fleet['gpus_per_replica']}" if fleet["gpus_per_replica"] > 1 else ""
    spare = f" and {fleet['spare']} spare" if fleet["spare"] else ""
    replicas = f" ({counted(bought(fleet), 'replica')}{of_each}{spare})" if of_each or spare else ""
    return f"{count:,} {fleet['device']}{replicas}"


def cost_of(info: Json, fleet: Json) -> float:
    """What ranks fleets: money an hour, or GPUs without prices; with growth the mean over the horizon."""
    if fleet["mean_cost"] is not None:
        return float(fleet["mean_cost"])
    return float(fleet["per_hour"] if info["priced"] else fleet["gpus"])
