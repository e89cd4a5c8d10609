"""Pages of metrics as the releases write them, and a server that shows them."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest

from dsim.following.exported import Collector
from dsim.following.follower import Follower


def exposition(follower: Follower, now: float) -> str:
    """The text of a follower's metrics."""
    registry = CollectorRegistry()
    registry.register(Collector(follower, lambda: now))
    return generate_latest(registry).decode()


def _histogram(name: str, label: str, counts: dict[str, int], total: float) -> str:
    lines = [f"# TYPE {name} histogram"]
    lines += [f'{name}_bucket{{{label},le="{end}"}} {count}' for end, count in counts.items()]
    return "\n".join([*lines, f"{name}_sum{{{label}}} {total}", f"{name}_count{{{label}}} {counts['+Inf']}"]) + "\n"


def vllm(requests: int = 10, running: int = 2) -> str:
    """vLLM 0.33 with two engines behind one page."""
    each = f"""# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="m"}} {running}
vllm:num_requests_running{{engine="1",model_name="m"}} {running}
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{{engine="0",model_name="m"}} 1
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{{engine="0",model_name="m"}} 0.25
vllm:kv_cache_usage_perc{{engine="1",model_name="m"}} 0.75
# TYPE vllm:request_success counter
vllm:request_success_total{{engine="0",finished_reason="stop",model_name="m"}} {requests - 3}
vllm:request_success_total{{engine="0",finished_reason="length",model_name="m"}} 3
# TYPE vllm:prompt_tokens counter
vllm:prompt_tokens_total{{engine="0",model_name="m"}} {100 * requests}
# TYPE vllm:generation_tokens counter
vllm:generation_tokens_total{{engine="0",model_name="m"}} {50 * requests}
# TYPE vllm:diffusion_num_denoising_steps counter
vllm:diffusion_num_denoising_steps_total{{engine="0",model_name="m"}} {20 * requests}
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{{block_size="16",engine="0",num_gpu_blocks="1000"}} 1
"""
    label = 'engine="0",model_name="m"'
    for name, ends in (
        ("time_to_first_token_seconds", ("0.1", "1.0")),
        ("e2e_request_latency_seconds", ("0.3", "5.0")),
    ):
        each += _histogram(f"vllm:{name}", label, {ends[0]: 1, ends[1]: requests - 1, "+Inf": requests}, 0.5 * requests)
    return each


SGLANG = """# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{model_name="m"} 3
# TYPE sglang:num_queue_reqs gauge
sglang:num_queue_reqs{model_name="m"} 0
# TYPE sglang:num_requests counter
sglang:num_requests_total{model_name="m"} 7
# TYPE sglang:generation_tokens counter
sglang:generation_tokens_total{model_name="m"} 700
# TYPE sglang:forward_execution_seconds counter
sglang:forward_execution_seconds_total{category="prefill"} 1.5
sglang:forward_execution_seconds_total{category="decode"} 2.5
# TYPE sglang:cuda_graph_passes counter
sglang:cuda_graph_passes_total{mode="decode_cuda_graph"} 90
sglang:cuda_graph_passes_total{mode="none"} 10
""" + _histogram("sglang:time_to_first_token_seconds", 'model_name="m"', {"0.1": 2, "+Inf": 7}, 3.0) + _histogram(
    "sglang:e2e_request_latency_seconds", 'model_name="m"', {"1": 2, "+Inf": 7}, 9.0
)  # fmt: skip

LMDEPLOY = """# TYPE lmdeploy:num_requests_running gauge
lmdeploy:num_requests_running{engine="0"} 3
# TYPE lmdeploy:num_requests_waiting gauge
lmdeploy:num_requests_waiting{engine="0"} 4
# TYPE lmdeploy:num_api_requests_waiting gauge
lmdeploy:num_api_requests_waiting{engine="0"} 2
# TYPE lmdeploy:generation_tokens counter
lmdeploy:generation_tokens_total{engine="0"} 70
""" + _histogram("lmdeploy:time_to_first_token_seconds", 'engine="0"', {"0.1": 2, "+Inf": 6}, 3.0) + _histogram(
    "lmdeploy:e2e_request_latency_seconds", 'engine="0"', {"1": 2, "+Inf": 6}, 9.0
)  # fmt: skip


@contextmanager
def showing(page: list[str], status: int = 200) -> Iterator[tuple[str, list[dict[str, str]]]]:
    """A server whose every path shows page[0]; its address, and the headers of the requests that came."""
    asked: list[dict[str, str]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append({**dict(self.headers), "path": self.path})
            self.send_response(status)
            if status == 302:
                self.send_header("location", "http://127.0.0.1:9/elsewhere")
            self.end_headers()
            self.wfile.write(page[0].encode())

        def log_message(self, *of: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()
