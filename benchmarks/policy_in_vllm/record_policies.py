"""Policies inside vLLM's engine, on the clock of its CPU time.

    record_policies.py OUT RATE,... COUNT [POLICY ...] -- OPTION ...

In vLLM's environment. OPTION: of `vllm serve`. Each policy (of POLICIES; by default all that suit the model) serves the
same traffic at each rate (req/s), COUNT requests; OUT/steps.jsonl is the hook's log, whose requests are called
POLICY-RATE.NUMBER.
"""

import json
import os
import random
import statistics
import sys
import time
from pathlib import Path

from dsim.benchmarks.vllm_diffusion.drive import Clock, Times, open_engine, request_of, serve

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
POLICIES = {
    "shortest": f"{ROOT}/examples/policies/dws.py:POLICY",
    "deadline": f"{HERE}/policies.py:DEADLINE",
    "pages": f"{HERE}/policies.py:PAGES",
    "steps": f"{HERE}/policies.py:STEPS",
    "admission": f"{HERE}/policies.py:ADMISSION",
    "prompts": f"{HERE}/policies.py:PROMPTS",
}
CAPPING = ("steps", "admission")  # policies of canvases


def spec_of(policy, preset):
    return f"{preset},discipline={POLICIES[policy]}" + ",patience=1" * (policy == "shortest")


def lines_of(rate, count, canvases):
    """Poisson traffic: prompts of 10 to 120 tokens, answers of 8 to 48 or of one to three canvases, deadlines."""
    draw, now, lines = random.Random(7), 0.0, []
    for i in range(count):
        now += draw.expovariate(rate)
        prompt, answer = draw.randint(10, 120), draw.choice((8, 12, 16, 32, 48))
        if canvases:
            answer = 64 * draw.randint(1, 3)
        line = {
            "timestamp": 1e3 * now, "input_length": prompt, "output_length": answer,
            "hash_ids": [f"{i} {block}" for block in range(8)],
            "estimated_length": max(1, round(answer * draw.uniform(0.7, 1.4))), "deadline": draw.choice((1, 3, 9)),
        }  # fmt: skip
        if canvases:
            line["diffusion_max_steps"] = draw.randint(4, 12)
        lines.append(line)
    return lines


def cost(engine, policies, preset):
    """Print the median CPU time (us) of asking a policy with 64 requests, which stay."""
    core = engine.engine_core.engine_core
    line = {"timestamp": 0, "input_length": 40, "output_length": 192, "hash_ids": [*"abc"]}
    for i in range(64):
        engine.add_request(f"cost.{i}", *request_of(line, False))
    engine.step()
    engine.step()
    for policy in policies:
        asker = under(engine, policy, preset)
        times = []
        for _ in range(1000):
            begin = time.thread_time_ns()
            asker.decide(core.scheduler.max_num_active_reqs, core.scheduler.max_num_scheduled_tokens)
            times.append(time.thread_time_ns() - begin)
        num = len(core.scheduler.waiting), len(core.scheduler.running)
        print(policy, f"{statistics.median(times) / 1e3:.0f} us with {num[0]} waiting and {num[1]} running", flush=True)


def under(engine, policy, preset):
    """Put the engine's scheduler under another policy."""
    core, config = engine.engine_core.engine_core, engine.vllm_config
    config.additional_config["dsim_policy"] = spec_of(policy, preset)
    asker = type(core.scheduler.dsim)(core.scheduler, config)
    core.scheduler.dsim = asker
    return asker


def main():
    between = sys.argv.index("--")
    out, rates, count, *policies = sys.argv[1:between]
    options = sys.argv[between + 1 :]
    os.environ |= {"DSIM_STEPLOG": f"{out}/steps.jsonl", "DSIM_STEPLOG_SKIP": "0"}
    import dsim_hooks.log
    import dsim_hooks.vllm
    import dsim_hooks.vllm_policy

    canvases = "--limit-mm-per-prompt" in options
    preset = "vllm-diffusion" if canvases else "vllm-ar"
    clock = dsim_hooks.log.time = dsim_hooks.vllm.time = Clock()
    dsim_hooks.vllm_policy.time = Times(clock)
    first = json.dumps({"dsim_policy": spec_of("deadline", preset)})
    engine = open_engine(
        [*options, "--scheduler-cls", "dsim_hooks.vllm.policy_scheduler", "--additional-config", first], clock
    )
    warm = {"timestamp": 0, "input_length": 30, "output_length": 64, "hash_ids": ["warm", "up"]}
    serve(engine, clock, "warm", [warm] * 2, False)
    policies = policies or ["shortest", "deadline", "pages", *(CAPPING if canvases else ("prompts",))]
    for policy in policies:
        asker = under(engine, policy, preset)
        for rate in rates.split(","):
            begin = clock.perf_counter()
            serve(engine, clock, f"{policy}-{rate}", lines_of(float(rate), int(count), canvases), False)
            print(policy, rate, f"{clock.perf_counter() - begin:.1f} s, {asker.num_errors} errors", flush=True)
    cost(engine, policies, preset)
    time.sleep(2)  # the log's thread writes twice a second
    path = Path(out, "steps.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    del lines[0]["settings"]["policy"]  # of the first runs only
    # The front end's receipt of a request is on another clock.
    path.write_text("".join(json.dumps({k: v for k, v in x.items() if k != "received"}) + "\n" for x in lines))
    os._exit(0)  # the engine's threads would delay it


if __name__ == "__main__":
    main()
