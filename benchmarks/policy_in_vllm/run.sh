#!/bin/bash
# Policies inside vLLM's CPU build at three loads, and the twin under the same policies.
#
#   benchmarks/policy_in_vllm/run.sh VENV OUT [ENGINE ...]
#
# VENV: vLLM's, as benchmarks/vllm_cpu.sh makes it. ENGINE: ar or dg, -sync or -async; all four by default. The engine
# runs in one process on the clock of its CPU time. About 3 minutes of CPU time for a tiny Qwen3, 6 for a DiffusionGemma.
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
mine=$here/policy_in_vllm
venv=$(cd "$1" && pwd)
mkdir -p "$2"
out=$(cd "$2" && pwd)
shift 2
python=${PYTHON:-python}

"$here/vllm_diffusion/install.sh" "$venv" "$out/site"
mkdir -p "$out/dsim" && ln -sfn "$(dirname "$here")" "$out/dsim/dsim"
vllm=(
    env PYTHONPATH="$out/site:$out/dsim" TRITON_INTERPRET=1 TORCH_COMPILE_DISABLE=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
    VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind VLLM_LOGGING_LEVEL=WARNING PYTHONHASHSEED=0
    VLLM_ENABLE_V1_MULTIPROCESSING=0
)
serve=(--served-model-name tiny --enforce-eager --no-enable-prefix-caching --dtype bfloat16 --max-num-seqs 4)
[ -d "$out/ar" ] || "${vllm[@]}" "$venv/bin/python" -P "$here/random_qwen3.py" "$out/ar" 2048 64 2 2 1
[ -d "$out/dg" ] || "${vllm[@]}" "$venv/bin/python" -P "$here/vllm_diffusion/tiny_gemma.py" "$out/dg" --canvas 64 --steps 12 --train 0

folders=()
for engine in ${*:-ar-sync ar-async dg-sync dg-async}; do
    more=(--async-scheduling)
    case $engine in *-sync) more=(--no-async-scheduling) ;; esac
    case $engine in
        ar-*)
            runner=(VLLM_USE_V2_MODEL_RUNNER=0 VLLM_PLUGINS=dsim_steplog,vllm_diffusion_shim) rates=8,16,32
            more+=(--max-num-batched-tokens 128 --max-model-len 256 --block-size 32 --num-gpu-blocks-override 17)
            ;;
        dg-*)
            runner=() rates=2,4,8
            more+=(--max-num-batched-tokens 320 --max-model-len 512 --num-gpu-blocks-override 40)
            more+=(--limit-mm-per-prompt '{"image": 0, "video": 0}')
            ;;
    esac
    mkdir "$out/out-$engine"
    "${vllm[@]}" "${runner[@]}" "$venv/bin/python" -P "$mine/record_policies.py" "$out/out-$engine" "$rates" 14 -- \
        --model "$out/${engine%-*}" "${serve[@]}" "${more[@]}"
    "$python" "$here/vllm_log_split.py" "$out/out-$engine"
    folders+=("$out/out-$engine=$engine")
done
"$python" -m dsim.benchmarks.policy_in_vllm.policies_table "${folders[@]}"
