"""A page's section: the recommended fleet next to the cheapest with a prefill pool."""

from .digits import counted
from .page import Block, Code, Section, Words, table
from .search import Json, money
from .table import number

CAPTION = (
    "The fewest replicas that meet the SLOs at the rate, alike and with a pool that only prefills. Latencies are of "
    "one replay. Busy: the share of time in which a pool's replicas run steps."
)


def split_or_not(info: Json) -> list[Section]:
    """Empty without a link."""
    found = info.get("split")
    if found is None:
        return []
    blocks: list[Block] = [Words((sentence(info),), loud=True)]
    rows = [_row(info, "not split", found["whole"])]
    if found["split"] is not None:
        rows.append(_row(info, "split", found["split"]))
    head = ["fleet", "replicas", "GPUs", *(["an hour"] if info["priced"] else []), "ttft p90 (ms)"]
    head += ["norm_latency p90 (ms)", "busy"]
    blocks.append(table(head, rows, caption=CAPTION))
    if found["split"] is not None:
        blocks.append(
            Words(
                ("fleet.toml, for `dsim replay --fleet fleet.toml` and `dsim capacity --fleet fleet.toml`:",),
                loud=found["pays"],
            )
        )
        blocks.append(Code(tuple(found["fleet_toml"].splitlines())))
    return [Section("Split or not", tuple(blocks), spoken=True)]


def sentence(info: Json) -> str:
    """Which fleet, and why."""
    found = info["split"]
    whole, split = found["whole"], found["split"]
    if found["refused"]:
        return f"Not split: {found['refused']}."
    if split is None:
        return f"Not split: no split fleet for less than twice {_price(info, whole)} surely meets the SLOs."
    counts = " + ".join(map(str, split["replicas"]))
    fleets = f"replicas {counts} ({_price(info, split)}) split, {_price(info, whole)} not split"
    busy = " and ".join(f"{100 * share:.0f} %" for share in split["busy"])
    seen = ", ".join(
        f"{name} p90 {number(split['p90_ms'][name])} ms split and {number(whole['p90_ms'][name])} ms not"
        for name in ("ttft", "norm_latency")
        if split["p90_ms"][name] is not None and whole["p90_ms"][name] is not None
    )
    why = f"{seen}; split, the pools are busy for {busy} of their time, and none can take over another's work"
    if found["pays"]:
        return f"Split: {fleets}. {seen}: prompts no longer stop those that decode."
    tie = " Both cost the same, and then the fleet that is not split is recommended." if found.get("ties") else ""
    return f"Not split: {fleets}.{tie} {why}."


def _price(info: Json, side: Json) -> str:
    hourly = "" if side["per_hour"] is None else f", {money(side['per_hour'], info)} an hour"
    return f"{counted(side['gpus'], 'GPU')}{hourly}"


def _row(info: Json, name: str, side: Json) -> list[str]:
    hourly = [money(side["per_hour"], info)] if info["priced"] else []
    seen = ["–" if side["p90_ms"][one] is None else number(side["p90_ms"][one]) for one in ("ttft", "norm_latency")]
    busy = " + ".join(f"{100 * share:.0f} %" for share in side["busy"])
    return [name, " + ".join(map(str, side["replicas"])), f"{side['gpus']:,}", *hourly, *seen, busy]
