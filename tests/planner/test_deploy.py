"""A plan's fleet in its engine's own words: a command, and the files that start it."""

import json
import shlex
import subprocess
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml

from dsim.engine.allowed_code import allowed
from dsim.engine.part import AXES
from dsim.engine.spec import PRESETS, parse, preset_of, settings_of
from dsim.planner.candidates import candidates_of
from dsim.planner.deploy import ENGINES, Deployment, deployment_of, not_served
from dsim.profiler.hardware import gpu
from dsim.profiler.models import model
from dsim.profiler.precision import Precision
from dsim.profiler.profile import Profile, load
from dsim.profiler.roofline import roofline
from dsim.results.world import World
from dsim.sim.setting import Setting

from ..checks import cases, refused

SERVED = [name for name, preset in PRESETS.items() if preset.engine]
VLLM, FP8, SDAR = load("h200x2-diffusiongemma/vllm"), load("h100-diffusiongemma-fp8"), load("a100-sdar-8b")
QWEN, LLADA2_2 = load("h100-qwen3-8b-ar"), roofline(gpu("H100"), model("LLaDA2.2-mini"))


def deployed(spec: str, profile: Any = SDAR, replicas: int = 1, **how: Any) -> Deployment:
    return deployment_of(spec, profile, replicas, **how)


def test_a_policy_of_no_known_engine_has_no_command() -> None:
    assert deployment_of("optimus", SDAR) is None
    file = Path("mine.py")
    file.write_text('from dsim.engine.spec import Policy, Preset\nPOLICY = Preset(Policy("mine"), engine="ours")\n')
    assert deployment_of(f"{file}:POLICY", SDAR, allow_code=allowed([str(file)])) is None


def test_a_discipline_goes_with_the_command_and_its_file_with_the_folder(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "policies" / "dws.py"
    code = allowed([str(example)])
    spec = f"vllm-ar:64,discipline={example}:POLICY,patience=0.5"
    found = deployed(spec, QWEN, 2, allow_code=code)
    assert found.start[0] == "pip install . ./hooks"
    assert found.start[1] == (
        "vllm serve Qwen/Qwen3-8B --max-num-seqs 64 --gpu-memory-utilization 0.9 --scheduler-cls "
        "dsim_hooks.vllm.policy_scheduler --additional-config "
        """'{"dsim_policy": "vllm-ar,discipline=./dws.py:POLICY,patience=0.5"}' --port 8000"""
    )
    files = found.files()
    assert files["dws.py"] == example.read_text()
    config, *_ = yaml.safe_load_all(files["kubernetes.yaml"])
    assert config["data"] == {"dws.py": example.read_text()}
    assert "patience" not in " ".join(found.unset)
    named = f"lmdeploy-bd32,discipline={example}:POLICY"
    assert deployment_of(named, SDAR, allow_code=code) is None
    found = deployed(f"sglang-fdfo:8,discipline={example}:POLICY,patience=0.5", allow_code=code)
    launch = "exec env DSIM_POLICY=sglang-fdfo,discipline=./dws.py:POLICY,patience=0.5 python3 -m sglang.launch_server "
    assert launch in found.files()["launch.sh"]
    assert found.files()["dws.py"] == example.read_text()
    two_gpus = replace(SDAR, device=replace(SDAR.device, count=2))
    reason = not_served(preset_of(f"sglang-fdfo,discipline={example}:POLICY", allow_code=code), two_gpus)
    assert reason == "SGLang 0.5.23 takes a discipline on one GPU, and the profile has 2"


def test_a_command_is_whole_and_has_only_what_differs_from_the_defaults() -> None:
    found = deployed("vllm-diffusion,max_num_seqs=24", VLLM, 4, context=6300)
    assert found.shell == (
        "vllm serve google/diffusiongemma-26B-A4B-it --generation-config vllm --enable-auto-tool-choice "
        "--tool-call-parser gemma4 --reasoning-parser gemma4 --tensor-parallel-size 2 --max-num-seqs 24 "
        "--gpu-memory-utilization 0.9 --max-model-len 7168 --port 8000"
    )
    assert found.differs == {
        "--tensor-parallel-size 2": "GPUs of a replica",
        "--max-num-seqs 24": "as replayed; default 8",
        "--gpu-memory-utilization 0.9": "the profile's share of memory; default 0.92",
        "--max-model-len 7168": "the longest request of the traffic has 6,300 tokens",
        "prefix caching": "stays on, as in the release; the plan counted no hits",
    }
    for flag, why in found.differs.items():
        assert f"# {flag}: {why}\n" in found.files()["launch.sh"]
    narrow = deployed("vllm-diffusion,canvas_length=128", VLLM)
    assert '--diffusion-config {"canvas_length": 128}' in narrow.differs


def test_a_default_is_the_card_s_in_the_twin_and_in_the_launch() -> None:
    def card(name: str) -> Profile:
        sheet = gpu(name)
        own = {"memory_bytes": sheet.memory_bytes, "compute_capability": sheet.compute_capability}
        return replace(VLLM, device=replace(VLLM.device, name=name, **own))

    def on(name: str) -> str:
        return deployed("vllm-diffusion", card(name)).shell

    budgets = {"H200": 8192, "B200": 16384, "L40S": 2048, "GB10": 2048, "A100-80GB": 2048, "RTX-PRO-6000": 8192}
    for name, tokens in budgets.items():
        assert Setting(parse("vllm-diffusion"), card(name)).policy.batching.most_tokens == tokens
    named = parse("vllm-diffusion,max_num_batched_tokens=4096")
    assert Setting(named, card("L40S")).policy.batching.most_tokens == 4096
    assert "--max-num-batched-tokens" not in on("H200") + on("B200") + on("L40S")
    assert {name: "TRITON_ATTN" in on(name) for name in ("H200", "B200", "L40S")} == {
        "H200": False, "B200": True, "L40S": True
    }  # fmt: skip


def test_an_engine_without_an_image_for_a_gpu_is_left_out_with_that_reason() -> None:
    sheet = roofline(gpu("MI300X"), model("SDAR-8B"))
    assert deployment_of("lmdeploy-0.18", sheet) is None
    with refused(r"no image of LMDeploy 0\.18\.0 for AMD's MI300X is known"):
        candidates_of(World("azure-conv"), ["lmdeploy-0.18"], [sheet], lambda profile: None)


def test_weights_are_those_of_the_profile() -> None:
    fp8, bf16 = deployed("vllm-diffusion", FP8), deployed("vllm-diffusion", VLLM)
    assert (fp8.weights, bf16.weights) == ("fp8", "bf16")
    assert "RedHatAI/diffusiongemma-26B-A4B-it-FP8-dynamic" in fp8.shell  # which needs no --quantization
    assert "--quantization fp8" in deployed("vllm-ar", replace(QWEN, memory=replace(
        QWEN.memory, weight_bytes=Precision("fp8").weight_bytes(QWEN.model)))).shell  # fmt: skip
    assert "--quantization" not in bf16.shell
    strange = replace(VLLM, memory=replace(VLLM.memory, weight_bytes=VLLM.memory.weight_bytes // 4))
    unset = deployed("vllm-diffusion", strange).unset
    assert any(text.startswith("weights of 0.5 bytes a parameter") for text in unset)


def test_the_share_of_memory_is_what_the_engines_flag_means() -> None:
    m = SDAR.memory
    pages = m.capacity_bytes * m.utilisation - m.weight_bytes - m.workspace_bytes
    share = pages / (m.capacity_bytes - m.weight_bytes)  # LMDeploy's is of what the weights leave free
    assert f"--cache-max-entry-count {share:.2g} " in deployed("lmdeploy-0.18").shell


def test_caching_stays_as_the_engine_has_it_unless_it_is_named() -> None:
    assert "prefix-caching" not in deployed("vllm-ar", VLLM).shell
    assert "--no-enable-prefix-caching" in deployed("vllm-ar,prefix_caching=false", VLLM).shell
    assert "prefix-caching" not in deployed("vllm-ar,prefix_caching=true", VLLM).shell
    assert "--disable-radix-cache" not in deployed("sglang-fdfo").shell
    assert "--disable-radix-cache" in deployed("sglang-fdfo,prefix_caching=false").shell


def test_what_no_flag_says_is_named() -> None:
    assert deployed("lmdeploy-bd32,num_loops=4").unset == ("num_loops=4",)


def test_a_truth_is_one_flag_or_the_other_and_a_file_holds_what_has_none() -> None:
    sync, free = deployed("sglang-sync,max_running_requests=16"), deployed("sglang-fdfo")
    assert " --no-dllm-fdfo" in sync.shell
    assert " --max-running-requests 16" in sync.shell
    assert free.differs["--max-running-requests 64"] == "as replayed; default 1"
    assert "dllm-fdfo" not in free.shell  # the release's default
    assert sync.config == {"block_size": 32, "threshold": 0.95}
    joint = deployed("sglang-joint,edit_threshold=0.2")
    assert joint.config == {"block_size": 32, "threshold": 0.5, "edit_threshold": 0.2, "max_post_edit_steps": 16}
    assert yaml.safe_load(joint.files()["dllm.yaml"]) == joint.config
    indel = deployed("sglang-indel", LLADA2_2)
    assert "inclusionAI/LLaDA2.2-mini --trust-remote-code --dllm-algorithm JointThresholdInDel" in indel.shell
    assert indel.config == {**joint.config, "edit_threshold": 0.0}
    earlier = roofline(gpu("H100"), model("LLaDA2.1-mini"))
    with refused("SGLang 0.5.23 serves sglang-indel only with tokens to delete and insert"):
        candidates_of(World("azure-conv"), ["sglang-indel"], [earlier], lambda profile: None)


@cases("name", *SERVED)
def test_every_flag_is_of_a_field_that_the_policy_has(name: str) -> None:
    preset = PRESETS[name]
    known = {f.name for axis in AXES for f in fields(getattr(preset.policy, axis))} | {"gpus"}
    assert set(preset.flags) <= known
    assert set(settings_of(preset.policy)) & set(preset.flags)
    assert preset.engine in ENGINES


@cases("name", *SERVED)
def test_every_option_is_one_of_the_engines_release(name: str) -> None:
    """benchmarks/launch.py reads the options in the releases; those of LMDeploy 0.11 were not read."""
    known = json.loads(Path(__file__).with_name("launch_options.json").read_text())
    engine = PRESETS[name].engine.partition("-")[0]
    launch = deployed(name, LLADA2_2 if name == "sglang-indel" else SDAR)
    words = [*launch.command, launch.port_flag, *launch.everywhere.split()]
    assert [word for word in words if word.startswith("--") and word not in known[engine]["options"]] == []
    assert known[engine]["version"] == ENGINES[engine].version


def test_kubernetes_takes_the_manifest_and_no_gpu_more_than_planned() -> None:
    parts = list(yaml.safe_load_all(deployed("sglang-fdfo", SDAR, 3).files()["kubernetes.yaml"]))
    for part in parts:
        kubernetes_validate.validate(part, "1.30", strict=True)
    config, claim, deployment, service = parts
    spec, pod = deployment["spec"], deployment["spec"]["template"]["spec"]
    [engine] = pod["containers"]
    assert spec["replicas"] == 3
    assert spec["strategy"]["rollingUpdate"] == {"maxUnavailable": 1, "maxSurge": 0}
    assert engine["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert engine["resources"]["requests"] == engine["resources"]["limits"]
    assert {"startupProbe", "readinessProbe", "livenessProbe"} <= engine.keys()
    assert "0.0.0.0" in engine["command"]  # SGLang listens to its own host alone otherwise
    assert pod["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB"}
    assert claim["metadata"]["name"] in str(pod["volumes"])
    assert yaml.safe_load(config["data"]["dllm.yaml"]) == deployed("sglang-fdfo").config
    assert service["spec"]["selector"] == spec["template"]["metadata"]["labels"]


def test_the_script_starts_a_replica_on_gpus_of_its_own() -> None:
    script = deployed("vllm-diffusion", VLLM, 2).files()["launch.sh"]
    Path("vllm").write_text('#!/bin/sh\necho "$CUDA_VISIBLE_DEVICES" "$@"\n')
    Path("vllm").chmod(0o755)
    Path("launch.sh").write_text(script)
    done = subprocess.run(
        ["sh", "launch.sh", "1"], env={"PATH": f"{Path.cwd()}:/usr/bin:/bin"}, capture_output=True, text=True
    )  # fmt: skip
    said = shlex.split(done.stdout)
    assert (said[:2], said[-1]) == (["2,3", "serve"], "8001")


def test_a_profiles_words_cannot_become_commands() -> None:
    """A profile may be a stranger's, and the files are run."""
    name = "x\nrm -rf important\n$(touch y)"
    for text in deployed("vllm-diffusion", replace(VLLM, model=replace(VLLM.model, name=name))).files().values():
        assert not any(line.startswith(("rm", "$")) for line in text.splitlines())


def test_the_files_start_the_spare_replicas_too_and_say_that_they_are_spare() -> None:
    files = deployed("vllm-diffusion", VLLM, 5, spare=1).files()
    assert all("# spare replicas: 1; the SLOs are met without them\n" in text for text in files.values())
    assert "  replicas: 5\n" in files["kubernetes.yaml"]
    assert "spare" not in "".join(deployed("vllm-diffusion", VLLM, 5).files().values())
