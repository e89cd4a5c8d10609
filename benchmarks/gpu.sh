#!/usr/bin/env bash
# What needs a GPU, in stages of at most nine minutes, on a bare machine: Python, PyTorch and Triton are there, no network.
#
#   benchmarks/gpu.sh STAGE[+STAGE ...] [OUT] [SECONDS]
#
#   smoke      every path once at toy size, so that nothing fails for the first time later on
#   tests      the tests marked gpu: kernels against their references, the executor on the device
#   kernels    each kernel, and whole decode steps, compared with the device's ceilings
#   profile    SDAR-8B's dimensions with random weights: OUT/NAME.json
#   validate   5 policies, one that evicts, x 3 loads against that profile (or PROFILE), the most telling first
#   breakdown  one replayed step at 1, 16, 64 and 256 sequences, kernel by kernel
#   canvases   steps of DiffusionGemma and LLaDA2 mini of random weights, captured and eager
#   sanitize   compute-sanitizer over the kernels' tests at small shapes
#   caches     a profile of a model that attends both ways, and five full-sequence policies x 2 loads against it
#
# Five calls cover it: smoke+tests, kernels, profile, breakdown+validate, canvases+sanitize. `caches` is a sixth: `validate` leaves
# it no time. On an H200 a run took at most 19 s; the 15 of 5 policies at two loads, one of them twice, take 285 of the 360 s
# that breakdown and compilation leave, and a second profile with three runs would take 160.
# OUT is ./gpu-results unless given. SECONDS limits the whole call, 540 unless given: parts get less time, and those that do
# not begin are named. benchmarks/gpu.py runs the parts, several at once where no time is measured, prints a table last,
# and writes OUT/STAGE.json (each part's end, the device's clock, power and throttling) and OUT/STAGE.tar.gz (all else).
#
# NAME names the profile, by default after the device. GRAPHS=--no-graphs makes decode steps eager in profile and validate.
# TUNE=--tune times, in kernels, every listed way to compile attention and confidence.
# PRETEND=1 runs a stage without a GPU, in seconds: on the CPU, at toy size, by the kernels' references and, where a stage
# tests kernels, under Triton's interpreter. Every file is written, and no figure in them means anything. CI does so.
# Where simpy, plotly, optuna or other needs are missing and cannot be downloaded, put their wheels in a folder and name it:
# WHEELS.
set -euo pipefail
stages=${1:?"expected a stage: smoke, tests, kernels, profile, validate, breakdown, canvases, sanitize or caches"}
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
