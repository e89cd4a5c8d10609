#!/usr/bin/env bash
# What needs a GPU, in stages of at most nine minutes, on a bare machine: Python, PyTorch and Triton are there, no network.
#
#   benchmarks/gpu.sh smoke|tests|profile|validate|kernels|caches [OUT]
#
#   smoke     five minutes, and first: every path once at toy size, so that nothing fails for the first time later on
#   tests     the tests marked gpu: kernels against their references, the executor on the device
#   profile   SDAR-8B's dimensions with random weights: OUT/h200.json (NAME to change) and its report
#   validate  4 policies x 3 loads against that profile, the most telling first; every cell is saved as it ends
#   caches    a profile of the same model attending both ways, and five full-sequence policies x 2 loads against it
#   kernels   each kernel, and whole decode steps, beside the device's ceilings: OUT/kernels.json, OUT/steps.json
#
# OUT is ./gpu-results unless given; a stage writes as it goes, and where it finds earlier results there it goes on with them.
# Decode steps are captured graphs; GRAPHS=--no-graphs makes them eager in profile and validate. TUNE=--tune times, in kernels, every listed way to compile attention and confidence.
# PRETEND=1 runs a stage without a GPU, in a few minutes: on the CPU, at toy size, its kernels under Triton's interpreter (in
# smoke) or their references. Every line below is run and every file written, and no figure in them means anything.
# Where simpy, plotly, optuna or other needs are missing and cannot be downloaded, put their wheels in a folder and name it:
# WHEELS.
set -euo pipefail
stage=${1:?"expected a stage: smoke, tests, profile, validate, kernels or caches"}
repository=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "${2:-gpu-results}"
out=$(cd "${2:-gpu-results}" && pwd)
python=${PYTHON:-python3}
name=${NAME:-h200}
pretend=${PRETEND:-}
model=${MODEL:-${pretend:+tiny}}
model=${model:-sdar-8b}
device=${pretend:+cpu}
device=${device:-cuda}
either() { if [ -z "$pretend" ]; then echo "$1"; else echo "$2"; fi; } # ON_A_GPU PRETENDING

# The repository's root is the package dsim: a link of that name stands in for an installation.
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
ln -s "$repository" "$site/dsim"
if [ -n "${WHEELS:-}" ]; then
  "$python" -m pip install -q --no-index --no-deps --no-compile --target "$site/wheels" "$WHEELS"/*.whl
fi
export PYTHONPATH="$site:$site/wheels${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
cd "$site"
PRETEND=$pretend "$python" - <<'PYTHON'
import importlib.util, os, sys
import torch
missing = [m for m in ("simpy", "plotly", "optuna", "numba", "pyarrow", "safetensors", "typer") if not importlib.util.find_spec(m)]
if missing:
    sys.exit(f"not installed: {', '.join(missing)} (put their wheels into a folder and set WHEELS)")
if os.environ["PRETEND"]:
    print("Pretending: no figure of this stage means anything")
elif not torch.cuda.is_available():
    sys.exit(f"PyTorch {torch.__version__} finds no CUDA device")
else:
    print(torch.cuda.get_device_name(), "PyTorch", torch.__version__, "CUDA", torch.version.cuda)
PYTHON

case $stage in
  smoke)
    # Each part has its own time (pretending, as long as it takes: no machine is too busy) and its own file; one that
    # fails does not keep the next from being seen.
    status=0
    part() { # NAME SECONDS COMMAND ...
      echo "smoke: $1"
      timeout "$(either "$2" 0)" "${@:3}" > "$out/smoke-$1.txt" 2>&1 || { status=1; echo "smoke: $1 FAILED, $out/smoke-$1.txt"; tail -5 "$out/smoke-$1.txt"; }
    }
    # A policy's rules take ten seconds to compile on a bare machine, and the parts that serve have less: here they are
    # not compiled. Those that profile and validate compile theirs.
    dsim=(env NUMBA_DISABLE_JIT=1 "$python" -m dsim)
    if [ -z "$pretend" ]; then
      few=(--lengths lognormal:96,48,64,32 --num-requests 12)
      toy=(--model tiny) both=(--model tiny-both-ways) own="" chunk=chunk:8
      executor=("$repository/tests/live/test_gpu.py" -m gpu)
    else
      # What the interpreter computes in minutes: a model of two layers and blocks of four.
      "$python" - "$site/toy" "$site/toy.jsonl" <<'PYTHON'
import pathlib, sys
import torch
from dsim.live.config import ModelConfig
from dsim.live.weights import random_model, save_model
toy = ModelConfig("toy", 2, 32, 2, 1, 16, 32, 67, 128, 4, 66, rope_theta=1e4)
save_model(random_model(toy, "cpu", torch.float32), pathlib.Path(sys.argv[1]), torch.float32)
pathlib.Path(sys.argv[2]).write_text(str(list(range(60))) + "\n")
PYTHON
      cat > "$site/interpreted.py" <<'PYTHON'
from dsim.cli import main
from dsim.kernels import use
with use("triton"):
    main()
PYTHON
      export TRITON_INTERPRET=1
      dsim=(env NUMBA_DISABLE_JIT=1 "$python" "$site/interpreted.py")
      few=(--lengths fixed:6,4 --num-requests 2)
      toy=(--model "$site/toy" --commits model --prompts "$site/toy.jsonl") both=("${toy[@]}")
      own=,block_length=4 chunk=chunk:2
      executor=("$repository/tests/kernels/test_in_the_executor.py::test_forwards_by_the_kernels_say_what_those_by_the_references_say")
    fi
    rm -f "$out/smoke-profile.html"
    few+=(azure-conv --arrival poisson --rate 20 --device "$device" --force)
    blocks=() whole=()
    for spec in lmdeploy-bd32 sglang-bd32 sglang-fdfo sglang-joint "$chunk" delayed-cache-plus focus; do blocks+=(--policy "$spec$own"); done
    # Pretending, graphs compute eagerly: two policies are enough once more.
    again=("${blocks[@]}")
    [ -z "$pretend" ] || again=(--policy "lmdeploy-bd32$own" --policy "focus$own")
    for spec in vanilla fast-dllm sparse-dllm dllm-cache maskkv dllm-serve; do whole+=(--policy "$spec$own"); done
    part executor 90 "$python" -m pytest "${executor[@]}" -q --rootdir "$repository" -p no:cacheprovider
    part graphs 60 "${dsim[@]}" live "${few[@]}" "${toy[@]}" --graphs "${blocks[@]}" --policy ar -o "$out/smoke-graphs"
    part eager 40 "${dsim[@]}" live "${few[@]}" "${toy[@]}" --no-graphs "${again[@]}" --policy ar -o "$out/smoke-eager"
    part both-ways 60 "${dsim[@]}" live "${few[@]}" "${both[@]}" "${whole[@]}" -o "$out/smoke-both-ways"
    # So short a budget makes a profile that doubts itself, and dsim profile ends with 1: its page is written last.
    part profile 60 bash -c '"$@" || [ -s "$0" ]' "$out/smoke-profile.html" "$python" -m dsim profile --model tiny --device "$device" --budget 20s --max-batch 8 -o "$out/smoke-profile.json" --force
    part validate 60 "$python" -m dsim validate --model tiny --device "$device" --profile "$out/smoke-profile.json" \
      $(either "--budget 20s" "--budget 1h --seconds 8") --lengths lognormal:96,48,64,32 --policy lmdeploy-bd32 --policy focus --load 0.5 --seed 1 -o "$out/smoke-validation"
    # No step may have compiled a kernel or captured a graph.
    part ready 20 "$python" -c '
import json, sys
late = {folder: {p: n for p, n in json.load(open(f"{folder}/run.json"))["live"]["made_ready"].items() if n} for folder in sys.argv[1:]}
print(late)
sys.exit(any(late.values()))' "$out/smoke-graphs" "$out/smoke-eager" "$out/smoke-both-ways"
    [ "$status" -eq 0 ] || exit 1
    ;;
  tests)
    timeout 540 "$python" -m pytest "$repository/tests/kernels" "$repository/tests/live" -m gpu -q \
      --rootdir "$repository" -p no:cacheprovider | tee "$out/tests.txt"
    ;;
  profile)
    yields=$(either "--yields a100-sdar-8b" "") # the tiny model's own weights say what commits
    timeout 540 "$python" -m dsim profile --model "$model" --device "$device" --budget "$(either 7m 30s)" $yields ${GRAPHS:-} \
      --max-batch "$(either 256 8)" --max-context 4096 -o "$out/$name.json" --force
    ;;
  validate)
    # Its own traffic: the lengths of a trace that the profile was not made on, and another seed.
    status=0
    timeout 560 "$python" -m dsim validate --model "$model" --device "$device" --profile "$out/$name.json" \
      --budget "$(either 8m 90s)" ${GRAPHS:-} --trace azure-conv --seed 1 --bound e2el=3% --bound tpot=3% --bound ttft=10% \
      $(either "--lengths sharegpt" "--lengths lognormal:96,48,64,32 --policy lmdeploy-bd32 --load 0.5") \
      -o "$out/validation" --json > "$out/validation.json" || status=$?
    tar -czf "$out/validation.tar.gz" -C "$out" validation
    [ "$status" -eq 0 ] || { echo "validate ended with $status: a bound was missed (1) or cells are left (124)"; exit "$status"; }
    ;;
  caches)
    timeout 560 "$python" -m dsim validate --model "$model" --device "$device" --budget "$(either 9m 3m)" --seed 1 \
      $(either "--lengths lognormal:400,200,96,32 --policy fast-dllm --policy sparse-dllm --policy dllm-cache --policy maskkv
        --policy dllm-serve,max_batch=16 --load 0.4 --load 0.7" "--lengths lognormal:96,48,64,32 --policy fast-dllm --load 0.5") \
      -o "$out/caches" --json > "$out/caches.json"
    tar -czf "$out/caches.tar.gz" -C "$out" caches
    ;;
  kernels)
    timeout 400 "$python" "$repository/benchmarks/kernels.py" ${TUNE:-} ${pretend:+--smoke} --json "$out/kernels.json" | tee "$out/kernels.txt"
    timeout 140 "$python" "$repository/benchmarks/step.py" --model "$model" --json "$out/steps.json" | tee "$out/steps.txt"
    ;;
  *)
    echo "stage is $stage, expected smoke, tests, profile, validate, kernels or caches" >&2
    exit 2
    ;;
esac
echo "Wrote $out/"
