"""On a GPU: the executor's kernels say what the references say, and a run's journal replays."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dsim.kernels import taken
from dsim.live.cache import PagedCache
from dsim.live.config import ModelConfig
from dsim.live.forward import Forward
from dsim.live.graphs import CudaRecorder
from dsim.live.weights import random_model
from dsim.research.tiny.saved import save_model
from dsim.results.run import read_run

from ..checks import cases
from ..cli.command import succeed
from .dense import batch_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and PyTorch finds none"),
]
WIDE = ModelConfig("wide", 3, 512, 8, 2, 64, 1024, 3001, 4096, 32, 3000)


@pytest.mark.parametrize("page_size", [16, 64])
def test_a_forward_on_the_gpu_says_what_one_on_the_cpu_says(page_size: int) -> None:
    # A prefill, a whole block, a few scattered positions of one, and a single position.
    windows = [np.arange(96), 512 + np.arange(32), 64 + np.array([3, 7, 8, 31]), np.array([992 + 5])]
    asked = batch_of(np.random.default_rng(0), [96, 512, 64, 992], windows, 32, page=page_size, vocab=3000)
    models = {device: random_model(WIDE, "cpu", torch.float32, seed=2).to(device) for device in ("cpu", "cuda")}
    models["cuda"].frequencies = models["cuda"].frequencies.to("cuda")
    said = {}
    before = taken["ragged_paged_attention", "triton"]
    for device, model in models.items():
        cache = PagedCache(WIDE, int(asked.page_table.max()) + 1, page_size, device, torch.float32)
        said[device] = Forward(model, cache).run(asked)
    assert taken["ragged_paged_attention", "triton"] == before + WIDE.layers
    np.testing.assert_allclose(said["cuda"].confidence, said["cpu"].confidence, rtol=2e-2, atol=1e-5)
    assert (said["cuda"].tokens == said["cpu"].tokens).mean() > 0.95  # near ties of random weights
    assert said["cuda"].device > 0


@cases(
    "config specs",
        (WIDE, ("lmdeploy-bd32", "chunk:8", "focus", "ar")),
        (
            replace(WIDE, both_ways=True, architecture="TinyBothWaysLM"),
            ("vanilla", "fast-dllm", "sparse-dllm:0.3", "dllm-serve:0.3", "maskkv:40,page_size=128"),
        ),
)  # fmt: skip
def test_a_live_run_on_the_gpu_is_served_whole_and_timed_by_the_device(
    config: ModelConfig, specs: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_model(random_model(config, "cpu", torch.float32), Path("model"), torch.float32)
    rows = [{"timestamp": 20 * i, "input_length": 40 + 9 * i, "output_length": 33} for i in range(12)]
    Path("t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("ids.jsonl").write_text(json.dumps(list(range(2000))) + "\n")
    policies = [word for spec in specs for word in ("--policy", spec)]
    asked = ("live", "t.jsonl", "--model", "model", "--device", "cuda", "--prompts", "ids.jsonl", "-o", "run")
    succeed(*asked, *policies)
    run = read_run("run")
    for policy in run.policies:
        assert (run.requests(policy)["status"] == 0).all()
        steps = run.steps(policy)
        assert (steps["device"] > 0).all()
        assert (steps["device"] <= steps["latency"]).all()


def test_a_graph_is_captured_after_all_earlier_ones_were_dropped() -> None:
    record, number = CudaRecorder(), torch.zeros(1, device="cuda")
    for _ in range(3):
        replay, (answer,) = record(lambda: (number + 1,))
        replay()
        assert answer.item() == 1
        del replay, answer
