"""What asking a policy costs vLLM's scheduler a step: `python benchmarks/policy_in_vllm/cost.py`.

With the folder of dsim_hooks on the path. Around stand-ins for vLLM's objects, with 64 requests; CPU time of the
thread, medians of 2,000.
"""

import logging
import statistics
import sys
import time
import types
from collections import deque

from dsim.benchmarks.policy_in_vllm.record_policies import CAPPING, POLICIES, spec_of

Bag = types.SimpleNamespace
NUM = 64


class Request(Bag):
    @property
    def num_output_tokens(self):
        return len(self.output)


class Scheduler:
    """What a policy reads of vLLM's."""

    def __init__(self, vllm_config):
        self.waiting, self.running, self.requests = deque(), [], {}
        self.current_step = self.num_waiting_for_streaming_input = 0
        self.num_sampled_tokens_per_step, self.num_spec_tokens = 1, 0
        layers = [Bag(layer_names=["1", "2"], kv_cache_spec=Bag(block_size=16, sliding_window=None))]
        self.kv_cache_config = Bag(kv_cache_groups=layers)
        self.kv_cache_manager = Bag(block_pool=Bag(num_gpu_blocks=33, get_num_free_blocks=lambda: 30))

    def add_request(self, request):
        self.waiting.append(request)
        self.requests[request.request_id] = request


def modules_of(scheduler, ahead):
    """vLLM's modules by name, with these classes."""
    core = "vllm.v1.core.sched"
    return {
        "vllm": {"__version__": "0.32.0"},
        "vllm.logger": {"init_logger": logging.getLogger},
        f"{core}.scheduler": {"Scheduler": scheduler},
        f"{core}.async_scheduler": {"AsyncScheduler": ahead},
        f"{core}.diffusion_scheduler": {"DiffusionScheduler": scheduler, "DiffusionAsyncScheduler": ahead},
    }


def config_of(spec, canvases, **settings):
    model = Bag(
        num_hidden_layers=2, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        intermediate_size=128, vocab_size=256, max_position_embeddings=4096, canvas_length=8,
    )  # fmt: skip
    usual: dict[str, object] = {"max_num_seqs": NUM, "max_num_batched_tokens": 8192, "long_prefill_token_threshold": 0}
    usual |= {"enable_chunked_prefill": True, "async_scheduling": True, "policy": "fcfs"}
    return Bag(
        model_config=Bag(
            hf_config=model, max_model_len=4096, served_model_name="tiny", enforce_eager=True, dtype="bfloat16",
            is_diffusion=canvases,
        ),
        cache_config=Bag(block_size=16, num_gpu_blocks=33, enable_prefix_caching=False),
        scheduler_config=Bag(**usual | settings), parallel_config=Bag(tensor_parallel_size=1),
        diffusion_config=Bag() if canvases else None, additional_config={"dsim_policy": spec},
    )  # fmt: skip


def main():
    for name, values in modules_of(Scheduler, Scheduler).items():
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(values)
    from dsim_hooks.vllm import policy_scheduler

    for policy in POLICIES:
        for num_running in (0, NUM // 2, NUM):
            canvases = policy in CAPPING
            preset = "vllm-diffusion" if canvases else "vllm-ar"
            scheduler = policy_scheduler(config_of(spec_of(policy, preset), canvases))
            for i in range(NUM):
                request = Request(
                    request_id=f"cmpl-{i}", num_prompt_tokens=100 + i, max_tokens=200 - i, arrival_time=time.time(),
                    priority=0, sampling_params=Bag(extra_args={"deadline": 9.0}), output=[], is_prefill_chunk=False,
                    next_decode_eligible_step=0,
                )  # fmt: skip
                scheduler.add_request(request)
            scheduler.running = [scheduler.waiting.popleft() for _ in range(num_running)]
            times = []
            for _ in range(2000):
                begin = time.thread_time_ns()
                scheduler.dsim.decide(NUM, 8192)
                times.append(time.thread_time_ns() - begin)
            assert scheduler.dsim.num_errors == 0
            print(f"{policy}, {NUM - num_running} wait, {num_running} run: {statistics.median(times) / 1e3:.0f} us")


if __name__ == "__main__":
    main()
