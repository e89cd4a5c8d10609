"""Four people's first hour with dsim, from a clean clone: what they type, and their pages.

    python benchmarks/walk.py OUT

OUT gets the clone, each person's commands and output (walk.txt), and with chromium pictures of each page at 1400 and
400 px, light and dark, to be looked at. Exit 1 where a command fails.
"""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# LiteLLM's spend logs, of requests replayed in the twin.
LOG = """
import pandas as pd, dsim
run = dsim.replay("azure-conv", "vllm-diffusion", profile="h200x2-diffusiongemma-vllm", replicas=3, num_requests=600)
r, t0 = run.requests, pd.Timestamp("2026-11-20 09:00")
time = lambda column: (t0 + pd.to_timedelta(r[column], unit="s")).dt.strftime("%Y-%m-%d %H:%M:%S.%f")
pd.DataFrame({
    "request_id": [f"r{i}" for i in range(len(r))], "call_type": "acompletion", "model": "diffusiongemma",
    "startTime": time("arrival"), "completionStartTime": time("first_emission"), "endTime": time("finish"),
    "prompt_tokens": r["input_length"], "completion_tokens": r["num_tokens"], "status": "success",
}).to_csv("spend.csv", index=False)
"""
TALL = {1400: 7000, 400: 14000}  # px by width: the longest page fits
ON_VLLM = "--profile h200x2-diffusiongemma-vllm"
PEOPLE = {
    "operator": [
        f"python -c {shlex.quote(LOG)}",
        "dsim trace info spend.csv",
        f"dsim replay spend.csv --policy vllm-diffusion {ON_VLLM} --replicas 3 --slo ttft=4s -o runs/today",
        f"dsim plan spend.csv {ON_VLLM} --profile h200x2-diffusiongemma-sglang --slo ttft=4s --slo 100ms/token"
        " --gpu-hour 3.5 -o runs/plan",
        "cat runs/plan/deploy/launch.sh",
    ],
    "author": [
        "cp ROOT/examples/policies/dilaserve.py mine.py",
        "dsim policies --fields ./mine.py:POLICY",
        "dsim policies --questions ./mine.py:POLICY",
        "dsim replay azure-conv --num-requests 1500 --replicas 2 --policy ./mine.py:POLICY --policy optimus"
        " --profile a100-sdar-8b --slo ttft=2s -o runs/mine",
        "dsim tune azure-conv --num-requests 400 --trials 6 --policy optimus --replicas 2 --slo ttft=2s -o runs/tuned",
    ],
    "buyer": [
        "dsim plan azure-conv --rate 12 --slo ttft=2s --slo 100ms/token --gpu a100,h100,b200"
        " --gpu-hour a100=2,h100=3.5,b200=6 --spare 1 --growth 30%/year --num-requests 1500 -o runs/purchase",
        "dsim capacity azure-conv --policy lmdeploy-bd32 --slo ttft=2s --num-requests 600 -o runs/capacity",
    ],
    "notebook": ["python ROOT/benchmarks/notebook_page.py ROOT/examples/notebook.ipynb runs/notebook/notebook.html"],
}  # fmt: skip


def pictures(page: Path, to: Path, name: str) -> None:
    """Windows have a least width, so 400 px is a frame in a wider one."""
    frame = page.with_name("narrow.html")
    frame.write_text(
        f'<body style="margin:0"><iframe src="{page.name}" width="400" height="{TALL[400]}" frameborder="0">'
    )
    for scheme, number in (("dark", 0), ("light", 1)):
        for width, shown in ((1400, page), (400, frame)):
            command = [
                "chromium", "--headless", "--no-sandbox", "--hide-scrollbars", "--allow-file-access-from-files",
                f"--blink-settings=preferredColorScheme={number}", "--virtual-time-budget=8000",
                f"--window-size={max(width, 500)},{TALL[width]}",
                f"--screenshot={to / f'{name}-{width}-{scheme}.png'}", shown.as_uri(),
            ]  # fmt: skip
            subprocess.run(command, check=True, capture_output=True, timeout=120)
    frame.unlink()


def main(out: Path) -> int:
    """1 if a command failed."""
    clone, shots, failed = out / "dsim", out / "pictures", 0
    shots.mkdir(parents=True)
    subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
    python = f"{shlex.quote(sys.executable)} -P"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(out.resolve()), *sys.path[1:]])}
    with (out / "walk.txt").open("w") as told:
        for person, commands in PEOPLE.items():
            desk = out / person
            desk.mkdir()
            for command in commands:
                line = command.replace("ROOT", str(clone.resolve()))
                line = line.replace("dsim ", f"{python} -m dsim ", 1) if line.startswith("dsim ") else line
                line = line.replace("python ", f"{python} ", 1) if line.startswith("python ") else line
                done = subprocess.run(line, shell=True, cwd=desk, env=environment, capture_output=True, text=True)
                failed += done.returncode != 0
                told.write(f"\n[{person}] $ {command}\n{done.stdout}{done.stderr}[exit {done.returncode}]\n")
                print(f"{person}: {command[:90]!r}: exit {done.returncode}", flush=True)
            for page in sorted(desk.glob("runs/*/*.html")):
                if shutil.which("chromium"):
                    pictures(page, shots, f"{person}-{page.parent.name}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
