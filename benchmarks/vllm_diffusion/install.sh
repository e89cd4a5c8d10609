#!/bin/bash
# What vLLM's CPU build needs to serve a diffusion model under the hook, in a folder of its own for PYTHONPATH: VENV stays
# as it is.
#
#   benchmarks/vllm_diffusion/install.sh VENV SITE [hooks]      hooks: those alone, for a model that is not of diffusion
set -euo pipefail
mine=$(cd "$(dirname "$0")" && pwd)
source=$(mktemp -d) # a build leaves its folders in the source
trap 'rm -rf "$source"' EXIT
cp -r "$mine/../../hooks" "$mine/shim" "$source"
if [ "${3:-}" = hooks ]; then
    "$1/bin/pip" install -q --no-deps --no-build-isolation --upgrade --target "$2" "$source/hooks"
    exit
fi
"$1/bin/pip" install -q --no-deps --no-build-isolation --upgrade --target "$2" "$source/hooks" "$source/shim"
if [ ! -d "$2/torchvision" ]; then "$1/bin/pip" install -q --no-deps --target "$2" torchvision==0.28.0; fi
