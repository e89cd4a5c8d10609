"""A plan's fleet in its engine's own words: a command, and the files that start it."""

import json
import shlex
import subprocess
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from dsim.engine.allowed_code import allowed
from dsim.engine.part import AXES
from dsim.engine.policy import PRESETS, settings_of
from dsim.planner.deploy import ENGINES, Deployment, deployment_of
from dsim.profiler.profile import load

SERVED = [name for name, preset in PRESETS.items() if preset.engine]
VLLM, FP8, SDAR = load("h200x2-diffusiongemma-vllm"), load("h100-diffusiongemma-fp8"), load("a100-sdar-8b")


def deployed(spec: str, profile: Any = SDAR, replicas: int = 1, router: str = "") -> Deployment:
    found = deployment_of(spec, profile, replicas, router)
    assert found is not None
    return found


def test_a_policy_that_no_engine_serves_has_no_command() -> None:
    assert deployment_of("optimus", SDAR) is None


def test_an_engine_that_is_not_known_has_no_command(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text('from dsim.engine.policy import Policy, Preset\nPOLICY = Preset(Policy("mine"), engine="ours")\n')
    assert deployment_of(f"{file}:POLICY", SDAR, allow_code=allowed([str(file)])) is None


def test_a_command_is_whole() -> None:
    assert deployed("vllm-diffusion,max_num_seqs=24", VLLM, 4).shell == (
        "vllm serve google/diffusiongemma-26B-A4B-it --generation-config vllm --tensor-parallel-size 2 "
        "--max-num-seqs 24 --max-num-batched-tokens 8192 --block-size 16 --long-prefill-token-threshold 0 "
        "--enable-chunked-prefill --prefill-schedule-interval 1 --async-scheduling --no-enable-prefix-caching "
        "--prefix-cache-retention-interval 0 "
        """--diffusion-config '{"canvas_length": 256}' --dtype bfloat16 --gpu-memory-utilization 0.9 --port 8000"""
    )


def test_weights_are_those_of_the_profile() -> None:
    fp8, bf16 = deployed("vllm-diffusion", FP8), deployed("vllm-diffusion", VLLM)
    assert (fp8.weights, bf16.weights) == ("fp8", "bf16")
    assert "--quantization fp8" in fp8.shell
    assert "--quantization" not in bf16.shell
    strange = replace(VLLM, memory=replace(VLLM.memory, weight_bytes=VLLM.memory.weight_bytes // 4))
    assert any(
        text.startswith("weights of 0.5 bytes a parameter") for text in deployed("vllm-diffusion", strange).unsaid
    )


def test_the_share_of_memory_is_what_the_engines_flag_means() -> None:
    m = SDAR.memory
    pages = m.capacity_bytes * m.utilisation - m.weight_bytes - m.workspace_bytes
    share = pages / (m.capacity_bytes - m.weight_bytes)  # LMDeploy's is of what the weights leave free
    assert f"--cache-max-entry-count {share:.2g} " in deployed("lmdeploy-0.18").shell


def test_caching_is_said_as_it_was_simulated() -> None:
    assert "--no-enable-prefix-caching" in deployed("vllm-ar", VLLM).shell
    assert " --enable-prefix-caching" in deployed("vllm-ar,prefix_caching=true", VLLM).shell
    assert "--disable-radix-cache" in deployed("sglang-fdfo").shell
    assert "--disable-radix-cache" not in deployed("sglang-fdfo,prefix_caching=true").shell


def test_what_no_flag_says_is_named() -> None:
    assert deployed("lmdeploy-bd32,num_loops=4").unsaid == ("num_loops=4",)
    (router,) = deployed("lmdeploy-0.18", SDAR, 2, "least-tokens").unsaid
    assert router.endswith("uses least-tokens")


def test_a_truth_is_one_flag_or_the_other_and_a_file_holds_what_has_none() -> None:
    sync, free = deployed("sglang-sync,max_running_requests=16"), deployed("sglang-fdfo")
    assert " --no-dllm-fdfo" in sync.shell
    assert " --max-running-requests 16" in sync.shell
    assert " --dllm-fdfo" in free.shell
    assert sync.config == {"block_size": 32, "threshold": 0.95}
    joint = deployed("sglang-joint,edit_threshold=0.2")
    assert joint.config == {"block_size": 32, "threshold": 0.5, "edit_threshold": 0.2, "max_post_edit_steps": 16}
    assert yaml.safe_load(joint.files()["dllm.yaml"]) == joint.config


@pytest.mark.parametrize("name", SERVED)
def test_every_flag_is_of_a_field_that_the_policy_has(name: str) -> None:
    preset = PRESETS[name]
    known = {f.name for axis in AXES for f in fields(getattr(preset.policy, axis))} | {"gpus"}
    assert set(preset.flags) <= known
    assert set(settings_of(preset.policy)) & set(preset.flags)
    assert preset.engine in ENGINES


@pytest.mark.parametrize("name", SERVED)
def test_every_option_is_one_of_the_engines_release(name: str) -> None:
    """benchmarks/launch.py reads the options in the releases; those of LMDeploy 0.11 were not read."""
    known = json.loads(Path(__file__).with_name("launch_options.json").read_text(encoding="utf-8"))
    engine = PRESETS[name].engine.partition("-")[0]
    words = [*deployed(name).command, deployed(name).port_flag, *deployed(name).everywhere.split()]
    assert [word for word in words if word.startswith("--") and word not in known[engine]["options"]] == []
    assert known[engine]["version"] == ENGINES[engine].version


def test_compose_has_a_service_for_each_replica_of_a_host_with_gpus_of_its_own() -> None:
    made = yaml.safe_load(deployed("vllm-diffusion", VLLM, 5).files()["compose.yaml"])["services"]
    assert list(made) == [f"replica-{i}" for i in range(4)]  # eight GPUs
    devices = [s["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"] for s in made.values()]
    assert devices == [["0", "1"], ["2", "3"], ["4", "5"], ["6", "7"]]
    assert [s["ports"] for s in made.values()] == [[f"{8000 + i}:8000"] for i in range(4)]
    assert made["replica-0"]["entrypoint"][:3] == ["vllm", "serve", "google/diffusiongemma-26B-A4B-it"]
    assert "2 such hosts hold the 5 replicas" in deployed("vllm-diffusion", VLLM, 5).files()["compose.yaml"]


def test_kubernetes_asks_for_the_replicas_their_gpus_and_the_engines_file() -> None:
    config, deployment, service = yaml.safe_load_all(deployed("sglang-fdfo", SDAR, 3).files()["kubernetes.yaml"])
    pod = deployment["spec"]["template"]["spec"]
    assert deployment["spec"]["replicas"] == 3
    assert pod["containers"][0]["resources"] == {"limits": {"nvidia.com/gpu": 1}}
    assert "0.0.0.0" in pod["containers"][0]["command"]  # SGLang listens to its own host alone otherwise
    assert yaml.safe_load(config["data"]["dllm.yaml"]) == deployed("sglang-fdfo").config
    assert service["spec"]["selector"] == deployment["spec"]["template"]["metadata"]["labels"]


def test_the_script_starts_a_replica_on_gpus_of_its_own(tmp_path: Path) -> None:
    script = deployed("vllm-diffusion", VLLM, 2).files()["launch.sh"]
    (tmp_path / "vllm").write_text('#!/bin/sh\necho "$CUDA_VISIBLE_DEVICES" "$@"\n')
    (tmp_path / "vllm").chmod(0o755)
    (tmp_path / "launch.sh").write_text(script)
    done = subprocess.run(
        ["sh", tmp_path / "launch.sh", "1"], env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, capture_output=True, text=True
    )  # fmt: skip
    said = shlex.split(done.stdout)
    assert said[:2] == ["2,3", "serve"]
    assert said[-1] == "8001"


def test_a_profiles_words_cannot_become_commands() -> None:
    """A profile may be a stranger's, and the files are run."""
    name = "x\nrm -rf important\n$(touch y)"
    for text in deployed("vllm-diffusion", replace(VLLM, model=replace(VLLM.model, name=name))).files().values():
        assert not any(line.startswith(("rm", "$")) for line in text.splitlines())


def test_the_files_start_the_spare_replicas_too_and_say_that_they_are_spare() -> None:
    found = deployment_of("vllm-diffusion", load("h200x2-diffusiongemma-vllm"), 5, spare=1)
    assert found is not None
    for name, text in found.files().items():
        assert "# spare replicas: 1; the SLOs are met without them\n" in text, name
    assert "  replicas: 5\n" in found.files()["kubernetes.yaml"]
    plain = deployment_of("vllm-diffusion", load("h200x2-diffusiongemma-vllm"), 5)
    assert plain is not None
    assert "spare" not in "".join(plain.files().values())
