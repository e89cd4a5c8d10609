"""For a buyer: the best fleet by GPU, how long it lasts, and the fleet for the peak."""

import math

from .fleet import cost_of, met_share, name_of
from .page import Section, Words, table
from .search import Json, money
from .table import counted

HOURS = 24 * 365.25  # in a year
UNITS = (("days", 365.25, 0.05), ("weeks", 365.25 / 7, 0.25), ("months", 12.0, 3.0), ("years", 1.0, math.inf))


def best_of_each(info: Json) -> list[Json]:
    """Each GPU's cheapest fleet, those of the ranking first."""
    best: dict[str, Json] = {}
    for fleet in (*info["ranking"], *info["left_out"]):
        known = best.setdefault(fleet["device"], fleet)
        if cost(info, fleet) < cost(info, known) and known not in info["ranking"]:
            best[fleet["device"]] = fleet
    return sorted(best.values(), key=lambda fleet: (fleet not in info["ranking"], cost(info, fleet)))


def by_gpu(info: Json) -> tuple[Section, ...]:
    """`best_of_each` as a table; none for a single GPU."""
    best = best_of_each(info)
    if len(best) < 2:
        return ()
    rows = []
    for fleet in best:
        count, hour = _estimate(info, fleet)
        hourly = [hour] if info["priced"] else []
        rows.append([fleet["device"], fleet["policy"], count, *hourly, met_share(info, fleet), _why(info, fleet)])
    caption = (
        "The cheapest fleet of each GPU that meets the SLOs. 'about': estimated by a short replay. 'at least': the "
        "search stopped there, because it knew two cheaper fleets."
    )
    head = ["GPU", "policy", "GPUs", *(["an hour"] if info["priced"] else []), "meet the SLOs", "why"]
    words = frozenset({0, 1, len(head) - 1})
    shown = table(head, rows, caption=caption, left=words, spare=("meet the SLOs",))
    return (Section("The best of each GPU", (shown,), spoken=True),)


def estimated_gpus(info: Json, fleet: Json) -> tuple[str, float]:
    """Certainty prefix and GPUs; infinity if unknown."""
    known = (("", fleet["replicas"]), ("about ", fleet["about"]), ("at least ", fleet["least"]))
    sure, replicas = next((item for item in known if item[1] is not None), ("", math.inf))
    return sure, (replicas + info["recommended"]["spare"]) * fleet["gpus_per_replica"]


def cost(info: Json, fleet: Json) -> float:
    """An estimate outside the ranking."""
    if fleet in info["ranking"]:
        return cost_of(info, fleet)
    _, gpus = estimated_gpus(info, fleet)
    return float(gpus * fleet["price"] if info["priced"] else gpus)


def _estimate(info: Json, fleet: Json) -> tuple[str, str]:
    """GPUs and cost an hour, with certainty; dashes if unknown."""
    sure, gpus = estimated_gpus(info, fleet)
    if gpus == math.inf:
        return "–", "–"
    return f"{sure}{gpus:,}", f"{sure}{money(cost(info, fleet), info)}" if info["priced"] else ""


def _why(info: Json, fleet: Json) -> str:
    best = info["recommended"]
    if fleet == best:
        return "the recommendation"
    if fleet not in info["ranking"]:
        return str(fleet["dropped"])
    more = cost_of(info, fleet) / cost_of(info, best) - 1
    if math.isclose(more, 0, abs_tol=1e-9):
        tied = name_of(fleet) in info["tied"]
        return "costs the same, and is as good as the best" if tied else "costs the same, nearer to the bounds"
    return f"costs {100 * more:.0f} % more an hour" if info["priced"] else f"needs {100 * more:.0f} % more GPUs"


def lasting(info: Json) -> str:
    """How long the fleet lasts; empty without --growth."""
    growth = info["growth"]
    if growth is None:
        return ""
    best = info["recommended"]
    low, high = max(growth["low"], 0.0), growth["high"]
    when = f"it runs out after {_between(low, high)}" if high > 0 else "there is no room to grow"
    text = f"If traffic grows by {100 * growth['share']:g} % a {growth['per']}, {when}"
    if info["priced"]:
        paid = money(best["mean_cost"] * HOURS * growth["horizon"], info)
        text += f"; over {_years(growth['horizon'])} it costs {paid}"
    return f"{text}."


def over_time(info: Json) -> tuple[Section, ...]:
    """What each GPU's best fleet needs and costs as traffic grows; none without --growth."""
    growth = info["growth"]
    if growth is None:
        return ()
    best: dict[str, Json] = {}
    for fleet in info["ranking"]:
        best.setdefault(fleet["device"], fleet)
    rows = []
    for fleet in best.values():
        row = [name_of(fleet)]
        row += [f"{d['gpus']}" + (f": {money(d['per_hour'], info)}" if info["priced"] else "") for d in fleet["due"]]
        if info["priced"]:
            limit = info["rate"] * (1 + fleet["headroom"]["value"])
            row += [money(fleet["mean_cost"] * HOURS * growth["horizon"], info), money(fleet["per_hour"] / limit, info)]
        rows.append(row)
    dates = ["today", *(f"after {_years(d['years'])}" for d in info["recommended"]["due"][1:])]
    when = "all GPUs bought today" if growth["buy_now"] else "GPUs bought when they are needed"
    caption = (
        f"GPUs and cost an hour as traffic grows to {info['recommended']['due'][-1]['rate']:.4g} req/s, each date by "
        f"replays at its rate; the sum is with {when}. The last column is today's fleet at the most that it takes."
    )
    head = ["", *dates, *(["in all", "an hour for each req/s at the limit"] if info["priced"] else [])]
    return (Section("As traffic grows", (table(head, rows, caption=caption, left=frozenset({0})),), spoken=True),)


def _years(years: float) -> str:
    months = round(12 * years)
    return counted(months // 12, "year") if months % 12 == 0 else counted(months, "month")


def grown(info: Json) -> tuple[Words, ...]:
    """The fleet for the busiest time."""
    lines = []
    best, peak = info["recommended"], info["peak"]
    if peak is not None:
        lines.append(
            f"The trace's busiest {peak['window']} has {peak['times']:.2f} times its mean rate: {peak['rate']:.3g} "
            f"req/s instead of {info['rate']:.4g}. If it lasted, it would need about "
            f"{_fleet(info, best, peak['replicas'])}, by the low end of the headroom, not replayed. The plan's own "
            "replays contain the trace's busy times."
        )
    return (Words(tuple(lines), loud=True),) if lines else ()


def _fleet(info: Json, best: Json, replicas: int) -> str:
    """`replicas` and the spare: size, cost."""
    gpus = (replicas + best["spare"]) * best["gpus_per_replica"]
    hourly = f", {money(gpus * best['price'], info)} an hour" if info["priced"] else ""
    return f"{counted(gpus, 'GPU')}{hourly}"


def _between(low: float, high: float) -> str:
    """Of years, in one unit: `5 to 8 months`."""
    unit, of_year = next((name, of_year) for name, of_year, most in UNITS if (low or high) < most)
    return f"{math.floor(low * of_year)} to {math.ceil(high * of_year)} {unit}"
