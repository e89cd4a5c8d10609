#!/bin/bash
# `dsim follow` on a real engine: a tiny random Qwen3 under vLLM's CPU build, whose pages of metrics are recorded while
# nothing changes, then more traffic comes, and at last it runs with another flag.
#
#   benchmarks/follow_vllm.sh VENV OUT        VENV: vLLM's, as benchmarks/vllm_cpu.sh makes it; OUT: a new folder
#
# The engine runs in one process on the clock of its own CPU time (vllm_diffusion/drive.py), so that other work on the
# machine does not count. The profile is fitted to that engine's own step log. The pages are then read by `dsim follow`.
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
mine=$here/benchmarks/vllm_diffusion
venv=$(cd "$1" && pwd)
mkdir -p "$2"
out=$(cd "$2" && pwd)
python=${PYTHON:-python}
rate=${RATE:-2}          # req/s
more=${MORE:-3}          # req/s, after the change of the traffic
window=${WINDOW:-40}     # s, with as many requests as come in it
before=${BEFORE:-14}     # windows without a change
after=${AFTER:-8}        # windows with one
lengths=${LENGTHS:-lognormal:80,60,24,14}
seqs=${SEQS:-16}
other=${OTHER:---max-num-seqs 1} # the flag that is changed
dsim() { "$python" -m dsim "$@"; }

if [ ! -d "$out/site" ]; then
    cp -r "$here/hooks" "$out/hooks" # a build leaves its folders in the source
    "$venv/bin/pip" install -q --no-deps --no-build-isolation --target "$out/site" "$out/hooks"
fi
export PYTHONHASHSEED=0
vllm=(
    env PYTHONPATH="$out/site" HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 VLLM_CPU_KVCACHE_SPACE=1 TORCH_COMPILE_DISABLE=1
    VLLM_CPU_OMP_THREADS_BIND=nobind VLLM_LOGGING_LEVEL=WARNING VLLM_ENABLE_V1_MULTIPROCESSING=0 "$venv/bin/python" -P
)
serve=(
    --model "$out/model" --served-model-name tiny --enforce-eager --max-num-batched-tokens 512
    --no-enable-prefix-caching --max-model-len 2048 --dtype bfloat16 --no-async-scheduling
)

if [ ! -d "$out/model" ]; then
    "$venv/bin/python" -P "$here/benchmarks/random_qwen3.py" "$out/model" 2048 256 2 4 2
fi

trace() { # trace NAME RATE SECONDS SEED: Poisson traffic, as the driver reads it
    dsim trace synth "$out/$1.plain.jsonl" --rate "$2" --num-requests $(($2 * $3)) --lengths "$lengths" --seed "$4" >/dev/null
    dsim trace convert "$out/$1.plain.jsonl" "$out/$1.jsonl" --hash-ids >/dev/null
    echo "$1=$out/$1.jsonl"
}
drive() { # drive NAME RUN ... -- OPTION ...
    local name=$1
    shift
    DSIM_STEPLOG=$out/$name.log "${vllm[@]}" "$mine/drive.py" "$@" "${serve[@]}" >"$out/$name.out" 2>&1
}

if [ ! -f "$out/vllm.json" ]; then
    runs=()
    for one in 1 2 4 6; do runs+=("$(trace "calibration-$one" "$one" 40 $((100 + one)))"); done
    runs+=("$(trace calibration-burst 20 4 110)")
    drive calibration "${runs[@]}" -- --max-num-seqs "$seqs"
    dsim profile --from-log "$out/calibration.log" -o "$out/vllm.json" || echo "the fit doubts itself: see above"
fi
if [ ! -f "$out/second.pages" ]; then
    same=$(trace same "$rate" $((window * before)) 1)
    busy=$(trace busy "$more" $((window * after)) 2)
    flag=$(trace flag "$more" $((window * after)) 3)
    drive first "$same" "$busy" -- --max-num-seqs "$seqs" --pages="$out/first.pages,2"
    drive second "$flag" -- --max-num-seqs "$seqs" $other --pages="$out/second.pages,2"
fi
policy=${POLICY:-$("$python" -c 'import sys
from dsim.profiler.as_logged import policy_of
from dsim.profiler.steplog import read_log
print(policy_of(read_log(sys.argv[1]).header)[0])' "$out/calibration.log")}
"$python" -m dsim.benchmarks.follow_vllm "$out" --policy "$policy" --window "$window" --out "$out/pages.jsonl.xz"
