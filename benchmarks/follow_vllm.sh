#!/bin/bash
# `dsim follow` on a real engine: vLLM's CPU build with a tiny random model, whose pages of metrics are recorded while
# nothing changes, then more traffic comes, then a limit of the scheduler is set in mid-run. A second engine runs with
# another flag under the same traffic.
#
#   benchmarks/follow_vllm.sh VENV OUT [autoregressive|diffusion]
#
# VENV: vLLM's, as benchmarks/vllm_cpu.sh makes it; OUT: a new folder. The engine runs in one process on the clock of its
# own CPU time (vllm_diffusion/drive.py), so that other work on the machine does not count as waiting. The profile is
# fitted to that engine's own step log. Then `dsim follow` reads the pages (follow_vllm.py). About 40 minutes.
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
mine=$here/benchmarks/vllm_diffusion
venv=$(cd "$1" && pwd)
mkdir -p "$2"
out=$(cd "$2" && pwd)
kind=${3:-autoregressive}
python=${PYTHON:-python}
every=2                  # s between two pages

vllm=(
    env PYTHONPATH="$out/site" HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 VLLM_CPU_KVCACHE_SPACE=1 TORCH_COMPILE_DISABLE=1
    VLLM_CPU_OMP_THREADS_BIND=nobind VLLM_LOGGING_LEVEL=WARNING VLLM_ENABLE_V1_MULTIPROCESSING=0 PYTHONHASHSEED=0
)
serve=(
    --model "$out/model" --served-model-name tiny --enforce-eager --no-enable-prefix-caching --dtype bfloat16
    --no-async-scheduling
)
case $kind in
autoregressive)
    policy=vllm-ar,max_num_seqs=16,max_num_batched_tokens=512,async_scheduling=false
    rates=2,4,6,9 rate=6 more=9 lengths=lognormal:80,60,48,28 steps=() seconds=40
    window=30 before=14 busy=8 after=8 only=hooks
    serve+=(--max-num-batched-tokens 512 --max-model-len 2048)
    usual=(--max-num-seqs 16) other=(--max-num-seqs 4) set=max_num_scheduled_tokens,16
    model=("$here/benchmarks/random_qwen3.py" "$out/model" 2048 256 2 4 2)
    ;;
diffusion)
    policy=vllm-diffusion,canvas_length=64,max_num_seqs=8,max_num_batched_tokens=1024,async_scheduling=false
    rates=2,4,5.5 rate=4 more=5.5 lengths=lognormal:100,60,64,30 steps=(--steps 2,6) seconds=25
    window=25 before=9 busy=5 after=5 only=
    vllm+=(TRITON_INTERPRET=1)
    serve+=(--max-num-batched-tokens 1024 --max-model-len 4096 --limit-mm-per-prompt '{"image": 0, "video": 0}')
    usual=(--max-num-seqs 8) other=(--max-num-seqs 1) set=max_num_scheduled_tokens,64
    model=("$mine/tiny_gemma.py" "$out/model" --canvas 64 --steps 12)
    ;;
*) echo "kind is $kind, expected autoregressive or diffusion" >&2 && exit 2 ;;
esac
vllm+=("$venv/bin/python" -P)

drive() { # drive NAME RUN ... -- OPTION ...
    local name=$1
    shift
    DSIM_STEPLOG=$out/$name.log "${vllm[@]}" "$mine/drive.py" "$@" "${serve[@]}" >"$out/$name.out" 2>&1
}

if [ ! -d "$out/site" ]; then "$mine/install.sh" "$venv" "$out/site" $only; fi
if [ ! -d "$out/model" ]; then "${vllm[@]}" "${model[@]}" >"$out/model.log" 2>&1; fi
"$python" -m dsim.benchmarks.follow_vllm traces "$out" --lengths "$lengths" --rates "$rates" --seconds "$seconds" "${steps[@]}" \
    --run "same,$rate,$((window * before))" --run "busy,$more,$((window * busy))" --run "changed,$more,$((window * after))"
if [ ! -f "$out/vllm.json" ]; then
    runs=()
    for trace in "$out"/calibration-*.jsonl; do runs+=("$(basename "$trace" .jsonl)=$trace"); done
    drive calibration "${runs[@]}" -- "${usual[@]}"
    "$python" -m dsim profile --from-log "$out/calibration.log" -o "$out/vllm.json" || echo "the fit doubts itself: see above"
fi
if [ ! -f "$out/flag.pages" ]; then
    rm -f "$out"/{first,flag}.pages
    drive first "same=$out/same.jsonl" "busy=$out/busy.jsonl" "changed=$out/changed.jsonl" -- "${usual[@]}" \
        "--set=changed,$set" "--pages=$out/first.pages,$every"
    drive flag "changed=$out/changed.jsonl" -- "${usual[@]}" "${other[@]}" "--pages=$out/flag.pages,$every"
fi
"$python" -m dsim.benchmarks.follow_vllm follow "$out" --policy "$policy" --window "$window" \
    --changes "$((window * before)),$((window * (before + busy)))"
