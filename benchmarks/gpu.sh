#!/usr/bin/env bash
# What needs a GPU, in stages, on a bare machine: Python, PyTorch and Triton are there, no network.
#
#   benchmarks/gpu.sh STAGE[+STAGE ...] [OUT] [SECONDS]
#
# Three calls of at most nine minutes each fit a loan of 30 minutes:
#
#   breakdown+profile  one replayed step at 1, 16, 64 and 256 sequences, kernel by kernel; then the dimensions of SDAR-8B
#                      with random weights measured: OUT/NAME.json
#   validate           5 policies, one that evicts, against that profile (or PROFILE): full batches first
#   kernels+canvases   each kernel, those that no device has run first, and whole steps, compared with the device's
#                      ceilings; then steps of DiffusionGemma and LLaDA2 mini of random weights, captured and eager
#
# With more time:
#
#   smoke              every path once at toy size
#   tests              the tests marked gpu, and the kernels' at small shapes under compute-sanitizer
#   caches             a profile of a model that attends both ways, and five full-sequence policies x 2 loads against it
#
# OUT is ./gpu-results unless given. SECONDS limits the whole call, 540 unless given. Rules are compiled before a stage's
# clock starts. Every part has a limit of its own; what does not begin in time is left out, and named. benchmarks/gpu.py
# runs the parts, several at once where no time is measured, prints a table last, and writes one file a stage,
# OUT/STAGE.tar.gz: each part's end, output and every sample; the device's clock, power and throttling.
#
# NAME names the profile, by default after the device. GRAPHS=--no-graphs makes decode steps eager in profile and validate.
# TUNE=--tune times, in kernels, every listed way to compile attention and confidence.
# PRETEND=1 runs a stage without a GPU, in seconds: on the CPU, at toy size, by the kernels' references and, where a stage
# tests kernels, under Triton's interpreter. Every file is written, and no figure in them means anything. CI does so.
# Where simpy, plotly, optuna or other needs are missing and cannot be downloaded, put their wheels in a folder and name it:
# WHEELS.
set -euo pipefail
stages=${1:?"expected stages, such as breakdown+profile, validate or kernels+canvases"}
repository=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "${2:-gpu-results}"
out=$(cd "${2:-gpu-results}" && pwd)
profile=${PROFILE:+$(realpath "$PROFILE")}
wheels=${WHEELS:+$(realpath "$WHEELS")}
python=${PYTHON:-python3}

# The repository's root is the package dsim: a link of that name stands in for an installation. Its place is the same in
# every call, since compiled rules are found again by their path.
site=${TMPDIR:-/tmp}/dsim-gpu-$(id -u)
mkdir -p -m 700 "$site"
[ -O "$site" ] || { echo "$site belongs to another user" >&2; exit 2; }
ln -sfn "$repository" "$site/dsim"
if [ -n "$wheels" ]; then
  "$python" -m pip install -q --no-index --no-deps --no-compile --upgrade --target "$site/wheels" "$wheels"/*.whl
fi
export PYTHONPATH="$site:$site/wheels${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
cd "$site"
PROFILE=$profile "$python" "$repository/benchmarks/gpu.py" "$stages" "$out" "${3:-540}"
