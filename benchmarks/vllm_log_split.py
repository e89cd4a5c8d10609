"""Divide a hook's log by runs; requests' names begin with their run's: `python benchmarks/vllm_log_split.py OUT`.

OUT/steps.jsonl becomes OUT/RUN.steps.jsonl, all runs called calibration... in one. Requests get prefix ids from
OUT/RUN.jsonl, if there is one.
"""

import json
import sys
from pathlib import Path
from typing import Any


def run_of(name: str) -> str:
    """Of cmpl-RUN.NUMBER-0-SUFFIX."""
    run = name.split("cmpl-")[-1].rsplit(".", 1)[0]
    return "calibration" if run.startswith("calibration") else run


def with_prefix(line: dict[str, Any], out: Path) -> dict[str, Any]:
    """With the trace's prefix ids."""
    run, _, rest = line["id"].split("cmpl-")[-1].rpartition(".")
    trace = out / f"{run}.jsonl"
    if not trace.exists():
        return line
    sent = json.loads(trace.read_text().splitlines()[int(rest.split("-")[0])])
    return line | {name: sent[name] for name in ("hash_ids", "block_size")}


def main() -> None:
    out = Path(sys.argv[1])
    header, *lines = [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]
    run = {line["request"]: run_of(line["id"]) for line in lines if line["kind"] == "request"}
    runs: dict[str, list[object]] = {}
    for line in lines:
        found = {run[i] for i in line.get("requests", [line.get("request")])}
        if line["kind"] == "request":
            line = with_prefix(line, out)
        if len(found) == 1:
            runs.setdefault(found.pop(), [header]).append(line)
    for name, held in runs.items():
        (out / f"{name}.steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in held))


if __name__ == "__main__":
    main()
