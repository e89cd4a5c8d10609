"""A fleet as an engine's launch command, compose file and Kubernetes manifest."""

import json
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..engine.allowed_code import NO_CODE, AllowedCode
from ..engine.part import Preset
from ..engine.policy import name_of, parse, preset_of, settings_of
from ..profiler.models import BYTES, CHECKPOINTS
from ..profiler.profile import Profile
from ..report.digits import counted

IN_FILE, IN_JSON = "config:", "json:"  # flag prefixes: a key of the engine's file, or of a JSON object
CONFIG = "dllm.yaml"
HOST_GPUS = 8  # of a compose file's host
FREE, ALL = "free", "all"  # shares of memory without weights, or of all


@dataclass(frozen=True)
class Engine:
    """How an engine's release starts a replica."""

    name: str
    version: str
    image: str
    command: tuple[str, ...]  # before the model's name
    port: str  # flag, like the next ones
    memory: str
    memory_of: str  # FREE or ALL
    weights: Mapping[str, str]  # the profile's weights -> arguments
    config: str = ""  # flag of CONFIG
    everywhere: str = ""  # arguments to listen outside the container


ENGINES = {
    "vllm": Engine(
        "vLLM", "0.32.0", "vllm/vllm-openai:v0.32.0", ("vllm", "serve"), "--port", "--gpu-memory-utilization", ALL,
        {"bf16": "--dtype bfloat16", "fp8": "--dtype bfloat16 --quantization fp8"},
    ),
    "sglang": Engine(
        "SGLang", "0.5.23", "lmsysorg/sglang:v0.5.23", ("python3", "-m", "sglang.launch_server", "--model-path"),
        "--port", "--mem-fraction-static", ALL,
        {"bf16": "--dtype bfloat16", "fp8": "--dtype bfloat16 --quantization fp8"}, "--dllm-algorithm-config",
        "--host 0.0.0.0",
    ),
    "lmdeploy": Engine(
        "LMDeploy", "0.18.0", "openmmlab/lmdeploy:v0.18.0", ("lmdeploy", "serve", "api_server"), "--server-port",
        "--cache-max-entry-count", FREE, {"bf16": "--dtype bfloat16"},
    ),
    # The last release before 0.12.0, which dropped frozen groups.
    "lmdeploy-0.11": Engine(
        "LMDeploy", "0.11.1", "openmmlab/lmdeploy:v0.11.1", ("lmdeploy", "serve", "api_server"), "--server-port",
        "--cache-max-entry-count", FREE, {"bf16": "--dtype bfloat16"},
    ),
}  # fmt: skip


def engine_of_preset(preset: Preset) -> str:
    """A preset's engine, of any release; empty: none."""
    return preset.engine.partition("-")[0]


def engine_of_profile(profile: Profile) -> str:
    """The engine behind a profile's step times; empty: another implementation."""
    first = profile.implementation.partition(" ")[0].strip(",").lower()
    return first if first in ENGINES else ""


def times_another(profile: Profile, preset: Preset) -> bool:
    """Whether preset and step times are of different engines."""
    mine, timed = engine_of_preset(preset), engine_of_profile(profile)
    return bool(mine and timed) and mine != timed


@dataclass(frozen=True)
class Deployment:
    """Equal replicas of an engine, and their start command."""

    engine: str  # and version
    image: str
    model: str  # on Hugging Face
    weights: str  # bf16, fp8, or bytes per parameter
    replicas: int  # with spare
    gpus: int  # of a replica
    command: tuple[str, ...]  # without the port
    port_flag: str
    everywhere: str
    config: Mapping[str, Any]  # of CONFIG; empty: no file
    unsaid: tuple[str, ...]  # fields without a flag
    spare: int = 0
    untested: tuple[str, ...] = ()  # settings beyond what the engine is tested with

    @property
    def shell(self) -> str:
        return shlex.join([*self.command, self.port_flag, "8000"])

    @property
    def in_container(self) -> list[str]:
        return [*self.command, *self.everywhere.split(), self.port_flag, "8000"]

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "command": list(self.command), "unsaid": list(self.unsaid), "shell": self.shell}

    def files(self) -> dict[str, str]:
        """By name: script, compose file, manifest, and the engine's file, if any."""
        found = {"launch.sh": self._script(), "compose.yaml": self._compose(), "kubernetes.yaml": self._kubernetes()}
        return found | ({CONFIG: self._config()} if self.config else {})

    def toml(self) -> str:
        """For plan.toml."""
        values = {
            "engine": self.engine, "image": self.image, "model": self.model, "weights": self.weights,
            "gpus_per_replica": self.gpus, "command": self.shell,
        }  # fmt: skip
        lines = [f"{name} = {json.dumps(value)}" for name, value in values.items()]
        lines += [f"config = {json.dumps(self._config())}"] if self.config else []
        return "\n".join(["", "[deploy]", *lines, f"unsaid = {json.dumps(list(self.unsaid))}", ""])

    def _config(self) -> str:
        return "".join(f"{name}: {_yaml(value)}\n" for name, value in self.config.items())

    def _head(self) -> str:
        fleet = f"{counted(self.replicas, 'replica')} of {counted(self.gpus, 'GPU')}"
        lines = [f"{self.engine}, {self.model} ({self.weights}): {fleet}"]
        lines += [f"spare replicas: {self.spare}; the SLOs are met without them"] if self.spare else []
        lines += [*self.untested, *(f"no flag sets: {text}" for text in self.unsaid)]
        # One line each: these files are executed, and model names may hold line breaks.
        return "".join(f"# {' '.join(line.split())}\n" for line in lines)

    def _script(self) -> str:
        last = self.gpus - 1
        words = shlex.join([*self.command, self.port_flag])
        return (
            f"#!/bin/sh\n{self._head()}"
            "# One replica: `sh launch.sh 0` on the first GPUs of a host, `sh launch.sh 1` on the next ones, ...\n"
            "set -eu\n"
            'cd "$(dirname "$0")"\n'
            "replica=${1:-0}\n"
            f"first=$((replica * {self.gpus}))\n"
            f'export CUDA_VISIBLE_DEVICES="$(seq -s, "$first" "$((first + {last}))")"\n'
            f'exec {words} "$((8000 + replica))"\n'
        )

    def _compose(self) -> str:
        on_host = max(1, min(self.replicas, HOST_GPUS // self.gpus))
        hosts = -(-self.replicas // on_host)
        lines = [self._head().rstrip()]
        if hosts > 1:
            lines.append(
                f"# For a host of {on_host * self.gpus} GPUs; {hosts} such hosts hold the {self.replicas} replicas."
            )
        lines.append("services:")
        for i in range(on_host):
            devices = [str(i * self.gpus + k) for k in range(self.gpus)]
            lines += [
                f"  replica-{i}:",
                f"    image: {json.dumps(self.image)}",
                f"    entrypoint: {json.dumps(self.in_container)}",
                "    working_dir: /deploy",
                f"    ports: [{json.dumps(f'{8000 + i}:8000')}]",
                "    ipc: host",
                '    volumes: ["./:/deploy:ro", "huggingface:/root/.cache/huggingface"]',
                "    deploy:",
                "      resources:",
                "        reservations:",
                f"          devices: [{{driver: nvidia, device_ids: {json.dumps(devices)}, capabilities: [gpu]}}]",
            ]
        return "\n".join([*lines, "volumes:", "  huggingface: {}", ""])

    def _kubernetes(self) -> str:
        name = "dsim-plan"
        volumes = ["{name: shm, emptyDir: {medium: Memory}}", "{name: cache, emptyDir: {}}"]
        mounts = ["{name: shm, mountPath: /dev/shm}", "{name: cache, mountPath: /root/.cache/huggingface}"]
        parts = []
        if self.config:
            volumes.append(f"{{name: config, configMap: {{name: {name}}}}}")
            mounts.append("{name: config, mountPath: /deploy}")
            parts.append(
                f"apiVersion: v1\nkind: ConfigMap\nmetadata: {{name: {name}}}\n"
                f"data:\n  {CONFIG}: {json.dumps(self._config())}\n"
            )
        parts.append(
            f"""apiVersion: apps/v1
kind: Deployment
metadata: {{name: {name}}}
spec:
  replicas: {self.replicas}
  selector: {{matchLabels: {{app: {name}}}}}
  template:
    metadata: {{labels: {{app: {name}}}}}
    spec:
      containers:
        - name: engine
          image: {json.dumps(self.image)}
          command: {json.dumps(self.in_container)}
{"          workingDir: /deploy" + chr(10) if self.config else ""}\
          ports: [{{containerPort: 8000}}]
          readinessProbe: {{httpGet: {{path: /health, port: 8000}}, periodSeconds: 10, failureThreshold: 180}}
          resources: {{limits: {{nvidia.com/gpu: {self.gpus}}}}}
          volumeMounts: [{", ".join(mounts)}]
      volumes: [{", ".join(volumes)}]
"""
        )
        parts.append(
            f"apiVersion: v1\nkind: Service\nmetadata: {{name: {name}}}\n"
            f"spec: {{selector: {{app: {name}}}, ports: [{{port: 80, targetPort: 8000}}]}}\n"
        )
        return self._head() + "---\n".join(parts)


def deployment_of(
    spec: str,
    profile: Profile,
    replicas: int = 1,
    router: str = "",
    allow_code: AllowedCode = NO_CODE,
    spare: int = 0,
    untested: tuple[str, ...] = (),
) -> Deployment | None:
    """The launch of a SPEC's policy on a profile's device; None if no released engine is known to serve it.

    Fields without a value keep the engine's default. spare: standby replicas.
    """
    preset = preset_of(name_of(spec), spec, allow_code)
    engine = ENGINES.get(preset.engine)  # a preset from outside may name any engine
    if engine is None:
        return None
    words, config, unsaid = _arguments(preset, settings_of(parse(spec, allow_code)), profile.device.count)
    model = CHECKPOINTS.get(profile.model.name)
    if model is None:
        unsaid.append(f"the checkpoint of {profile.model.name}: replace MODEL by its name or path")
    weights = weights_of(profile)
    if weights in engine.weights:
        words += engine.weights[weights].split()
    else:
        unsaid.append(f"weights of {weights}, for which no flag of {engine.name} {engine.version} is known")
    if profile.memory.fixed_num_pages is None:
        words += [engine.memory, f"{_share(profile, engine.memory_of):.2g}"]
    if config:
        words += [engine.config, CONFIG]
    if "drafter" in preset.flags and settings_of(parse(spec, allow_code))["drafter"] != "ngram":
        unsaid.append("the draft model: `model` of --speculative-config")
    if router not in ("", "random") and replicas > 1:
        unsaid.append(f"the router in front of the replicas: the plan uses {router}")
    return Deployment(
        f"{engine.name} {engine.version}", engine.image, model or "MODEL", weights, replicas, profile.device.count,
        (*engine.command, model or "MODEL", *preset.serve.split(), *words), engine.port, engine.everywhere, config,
        tuple(unsaid), spare, untested,
    )  # fmt: skip


def weights_of(profile: Profile) -> str:
    """bf16, fp8, or bytes per parameter."""
    of_a_parameter = profile.memory.weight_bytes / profile.model.total_params
    for name, num_bytes in (("bf16", BYTES), ("fp8", 1)):
        if abs(of_a_parameter / num_bytes - 1) < 0.02:
            return name
    return f"{of_a_parameter:.2g} bytes a parameter"


def _share(profile: Profile, of: str) -> float:
    """The memory share, as the engine's flag means it."""
    m = profile.memory
    if of == ALL:
        return m.utilisation
    free = m.capacity_bytes - m.weight_bytes
    return max(0.01, (m.capacity_bytes * m.utilisation - m.weight_bytes - m.workspace_bytes) / free)


def _arguments(preset: Preset, chosen: Mapping[str, Any], gpus: int) -> tuple[list[str], dict[str, Any], list[str]]:
    """Arguments, the engine's file, fields without a flag."""
    usual = settings_of(preset.policy)
    words: list[str] = []
    config: dict[str, Any] = {}
    objects: dict[str, dict[str, Any]] = {}
    for name, flag in preset.flags.items():
        value = gpus if name == "gpus" else chosen.get(name)
        if value is None:
            continue
        if flag.startswith(IN_FILE):
            config[flag.removeprefix(IN_FILE)] = value
        elif flag.startswith(IN_JSON):
            option, _, key = flag.removeprefix(IN_JSON).partition(".")
            objects.setdefault(option, {})[key] = value
        elif isinstance(value, bool):
            yes, _, no = flag.partition("/")
            words += [yes if value else no] if (yes if value else no) else []
        else:
            words += [flag, str(value)]
    for option, values in objects.items():
        words += [option, json.dumps(values)]
    unsaid = [f"{n}={_yaml(v)}" for n, v in chosen.items() if n not in preset.flags and v != usual[n]]
    return words, config, unsaid


def _yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
