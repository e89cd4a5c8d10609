#!/usr/bin/env bash
# What needs a GPU, in stages of at most nine minutes, on a bare machine: Python, PyTorch and Triton are there, no network.
#
#   benchmarks/gpu.sh tests|profile|validate|kernels|caches [OUT]
#
#   tests     the tests marked gpu: kernels against their references, the executor on the device
#   profile   SDAR-8B's dimensions with random weights: OUT/h200.json (NAME to change) and its report
#   validate  4 policies x 3 loads against that profile, the most telling first; every cell is saved as it ends
#   caches    a profile of the same model attending both ways, and five full-sequence policies x 2 loads against it
#   kernels   each kernel, and whole decode steps, beside the device's ceilings: OUT/kernels.json, OUT/steps.json
#
# OUT is ./gpu-results unless given; a stage that finds its earlier results there goes on with them. GRAPHS=--graphs captures
# decode steps in profile and validate. TUNE=--tune times, in kernels, every listed way to compile attention and confidence.
# Where simpy, plotly, optuna or other needs are missing and cannot be downloaded, put their wheels in a folder and name it:
# WHEELS.
set -euo pipefail
stage=${1:?"expected a stage: tests, profile, validate, kernels or caches"}
repository=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "${2:-gpu-results}"
out=$(cd "${2:-gpu-results}" && pwd)
python=${PYTHON:-python3}
name=${NAME:-h200}
model=${MODEL:-sdar-8b}

# The repository's root is the package dsim: a link of that name stands in for an installation.
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
ln -s "$repository" "$site/dsim"
if [ -n "${WHEELS:-}" ]; then
  "$python" -m pip install -q --no-index --no-deps --no-compile --target "$site/wheels" "$WHEELS"/*.whl
fi
export PYTHONPATH="$site:$site/wheels${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
cd "$site"
"$python" - <<'PYTHON'
import importlib.util, sys
import torch
missing = [m for m in ("simpy", "plotly", "optuna", "numba", "pyarrow", "safetensors", "typer") if not importlib.util.find_spec(m)]
if missing:
    sys.exit(f"not installed: {', '.join(missing)} (put their wheels into a folder and set WHEELS)")
if not torch.cuda.is_available():
    sys.exit(f"PyTorch {torch.__version__} finds no CUDA device")
print(torch.cuda.get_device_name(), "PyTorch", torch.__version__, "CUDA", torch.version.cuda)
PYTHON

case $stage in
  tests)
    timeout 540 "$python" -m pytest "$repository/tests/kernels" "$repository/tests/live" -m gpu -q \
      --rootdir "$repository" -p no:cacheprovider | tee "$out/tests.txt"
    ;;
  profile)
    timeout 540 "$python" -m dsim profile --model "$model" --device cuda --budget 7m --yields a100-sdar-8b ${GRAPHS:-} \
      --max-batch 256 --max-context 4096 -o "$out/$name.json" --force
    ;;
  validate)
    # Its own traffic: the lengths of a trace that the profile was not made on, and another seed.
    status=0
    timeout 560 "$python" -m dsim validate --model "$model" --device cuda --profile "$out/$name.json" --budget 8m ${GRAPHS:-} \
      --trace azure-conv --lengths sharegpt --seed 1 --bound e2el=3% --bound tpot=3% --bound ttft=10% \
      -o "$out/validation" --json > "$out/validation.json" || status=$?
    tar -czf "$out/validation.tar.gz" -C "$out" validation
    [ "$status" -eq 0 ] || { echo "validate ended with $status: a bound was missed (1) or cells are left (124)"; exit "$status"; }
    ;;
  caches)
    timeout 560 "$python" -m dsim validate --model "$model" --device cuda --budget 9m --lengths lognormal:400,200,96,32 \
      --policy fast-dllm --policy sparse-dllm --policy dllm-cache --policy maskkv --policy dllm-serve,max_batch=16 \
      --load 0.4 --load 0.7 --seed 1 -o "$out/caches" --json > "$out/caches.json"
    tar -czf "$out/caches.tar.gz" -C "$out" caches
    ;;
  kernels)
    timeout 400 "$python" "$repository/benchmarks/kernels.py" ${TUNE:-} --json "$out/kernels.json" | tee "$out/kernels.txt"
    timeout 140 "$python" "$repository/benchmarks/step.py" --model "$model" --json "$out/steps.json" | tee "$out/steps.txt"
    ;;
  *)
    echo "stage is $stage, expected tests, profile, validate, kernels or caches" >&2
    exit 2
    ;;
esac
echo "Wrote $out/"
