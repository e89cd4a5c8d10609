"""A search's result in words and rows: what to run, how sure that is, and who came second."""

from collections.abc import Mapping
from typing import Any

Json = Mapping[str, Any]
HIGHER = ("goodput", "throughput")


def answer(info: Json) -> str:
    """The result in a sentence."""
    name = next(iter(info["objectives"]))
    winner, default = info["winner"], info["default"]
    if was_default(info, winner):
        return f"{default['policy']}, the default, is the best of the {info['num_trials']} settings tried."
    change = change_text(name, winner["gains"][name])
    gain = f"{name} {change} against {spelt(default)}, on traffic that the search never saw"
    if info["confirmed"]:
        return f"{spelt(winner)}: {gain}."
    return f"Keep {spelt(default)}: the best found, {spelt(winner)}, has {gain}."


def change_text(name: str, gain: Json) -> str:
    """By how much an objective changes, with its interval: more goodput is above zero, less cost below."""
    if gain["value"] is None:
        return "not comparable"
    ends = [gain["value"], gain["low"], gain["high"]]
    if name not in HIGHER:
        ends = [-ends[0], -ends[2], -ends[1]]
    value, low, high = (100 * end for end in ends)
    return f"{value:+.1f} % (95 %: {low:+.1f} to {high:+.1f})"


def spelt(finalist: Json) -> str:
    """A setting as a user would say it."""
    fleet = f" on {finalist['replicas']} replicas" if finalist["replicas"] > 1 else ""
    return f"{finalist['policy']}{fleet}"


def finalists(info: Json) -> list[tuple[str, Json]]:
    """The settings that were confirmed, with what each is."""
    front = [(f"front {i}", f) for i, f in enumerate(info["front"], 1)]
    if not front:
        front = [("winner", info["winner"])]
        if info["runner_up"] is not None:
            front.append(("runner-up", info["runner_up"]))
    is_default = [was_default(info, f) for _, f in front]
    rows = [(f"{role}, default" if same else role, f) for (role, f), same in zip(front, is_default, strict=True)]
    return rows if any(is_default) else [*rows, ("default", info["default"])]


def row(info: Json, finalist: Json) -> list[str]:
    """A finalist's cells: quality, then value and gain in each objective, then attainment."""
    quality = finalist["quality"]["relative"]
    cells = ["unknown" if quality is None else f"{100 * quality:.1f} %"]
    for name in info["objectives"]:
        value, gain = finalist["values"][name], finalist["gains"][name]
        half = (value["high"] - value["low"]) / 2
        cells.append(f"{value['value']:.4g} ± {half:.2g}")
        cells.append("" if was_default(info, finalist) else change_text(name, gain))
    share = finalist["attainment"]
    return [*cells, "" if share is None else f"{100 * share:.1f} %"]


def was_default(info: Json, finalist: Json) -> bool:
    """Whether a finalist is the setting to beat itself."""
    return all(finalist[key] == info["default"][key] for key in ("policy", "replicas"))


def columns(info: Json) -> list[str]:
    """The heads of those cells."""
    heads = ["quality"]
    for name, unit in info["objectives"].items():
        heads += [f"{name} ({unit})", "against the default"]
    return [*heads, "good requests"]
