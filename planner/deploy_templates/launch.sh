#!/bin/sh
{{ head }}
# One replica: `sh launch.sh 0` on the first GPUs of a host, `sh launch.sh 1` on the next ones, ...
set -eu
cd "$(dirname "$0")"
replica=${1:-0}
first=$((replica * {{ gpus }}))
export CUDA_VISIBLE_DEVICES="$(seq -s, "$first" "$((first + {{ gpus - 1 }}))")"
exec {{ words }} "$((8000 + replica))"
