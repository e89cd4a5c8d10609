"""`dsim follow` on recorded pages: `python -m dsim.benchmarks.follow_vllm OUT [--window S] [--out FILE]`

OUT is a folder of benchmarks/follow_vllm.sh: vllm.json, the profile; first.pages, in which the traffic changes, and
second.pages, of the same engine started again with another flag. Prints a line for each window, and writes the pages to
FILE, as small as `dsim follow` can still read them.
"""

import argparse
import json
import lzma
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from dsim.following.follower import Followed, Follower
from dsim.following.sources.engines import sample_of
from dsim.following.windows import Scrape
from dsim.results.scenario import Scenario

ZERO = 1.8e9  # s since 1970 of the first page
PAUSE = 60.0  # s between the two recordings
READ = (
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "request_success", "prompt_tokens",
    "generation_tokens", "num_preemptions", "cache_config_info", "time_to_first_token_seconds",
    "e2e_request_latency_seconds", "request_queue_time_seconds", "request_prompt_tokens", "request_generation_tokens",
)  # fmt: skip


def short(page: str) -> str:
    """The lines of a page that `dsim follow` reads."""
    names = tuple(f"vllm:{name}" for name in READ)
    lines = [line for line in page.splitlines() if line.removeprefix("# TYPE ").startswith(names)]
    return "\n".join(line for line in lines if "_created" not in line) + "\n"


def recorded(folder: Path) -> Iterator[tuple[float, str]]:
    """The pages of both recordings, one after the other: s since 1970, and the page."""
    begin = ZERO
    for name in ("first", "second"):
        pages = [json.loads(line) for line in (folder / f"{name}.pages").read_text().splitlines()]
        for page in pages:
            yield begin + page["time"] - pages[0]["time"], page["page"]
        begin += pages[-1]["time"] - pages[0]["time"] + PAUSE


def follow(
    pages: Iterable[tuple[float, str]], scenario: Scenario, folder: Path, window: float, interval: float = 2.0
) -> Iterator[dict[str, Any]]:
    """Follow the pages; the windows' records."""
    followed = Followed(scenario, ("recorded",), interval, window, requests=40, outlook=False)
    follower = Follower(followed, folder, tell=lambda line: print(f"# {line}"))
    for when, page in pages:
        record = follower.add(Scrape(when, (sample_of(page, when, "recorded"),)))
        if record is not None:
            yield record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--policy", default="vllm-ar")
    parser.add_argument("--window", type=float, default=40.0)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    pages = list(recorded(asked.folder))
    if asked.out is not None:
        lines = [json.dumps({"time": round(when, 3), "page": short(page)}) + "\n" for when, page in pages]
        asked.out.write_bytes(lzma.compress("".join(lines).encode(), preset=9 | lzma.PRESET_EXTREME))
    scenario = Scenario(trace="", policy=asked.policy, profile=str(asked.folder / "vllm.json"))
    with tempfile.TemporaryDirectory() as folder:
        for record in follow(pages, scenario, Path(folder), asked.window):
            residuals = {name: round(of[0], 3) for name, of in record["residuals"].items() if of[0] is not None}
            print(json.dumps({
                "begin": round(record["begin"] - ZERO), "end": round(record["end"] - ZERO),
                "requests": record["requests"], "residuals": residuals,
                "raised": [alarm["words"] for alarm in record["raised"]], "open": list(record["alarms"]),
            }), flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
