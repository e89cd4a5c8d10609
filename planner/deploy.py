"""A fleet as an engine's launch command, compose file and Kubernetes manifest."""

import json
import math
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import yaml

from ..engine.allowed_code import NO_CODE, AllowedCode
from ..engine.part import Preset
from ..engine.policy import name_of, named_fields, parse, preset_of, settings_of
from ..profiler.hardware import product_of
from ..profiler.models import CHECKPOINTS
from ..profiler.precision import BITS, Precision
from ..profiler.profile import Device, Profile
from ..report.table import counted

IN_FILE, IN_JSON = "config:", "json:"  # flag prefixes: a key of the engine's file, or of a JSON object
CONFIG = "dllm.yaml"
UNROUTED = "random"  # router of the written files: a Kubernetes Service draws a replica for each connection
CLOSE = 0.04  # relative, of weights' bytes
HOST_GPUS = 8  # of a compose file's host
# Published checkpoints, by model and weights (precisions-and-cards.md 1.2).
QUANTISED = {
    ("DiffusionGemma-26B-A4B", "fp8"): "RedHatAI/diffusiongemma-26B-A4B-it-FP8-dynamic",
    ("DiffusionGemma-26B-A4B", "nvfp4"): "nvidia/diffusiongemma-26B-A4B-it-NVFP4",
}
FREE, ALL = "free", "all"  # shares of memory without weights, or of all


class _Plain(yaml.SafeDumper):
    """Writes an object in full wherever it occurs."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


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
    context: str  # flag of a request's most tokens
    keys: str  # arguments for keys and values of 8 bits
    attention: str  # for heads of 512 where FlashAttention 4 does not run (precisions-and-cards.md 3.2)
    share: float  # of `memory`, by default; 0: chosen by the engine
    defaults: Mapping[str, Any] = field(default_factory=dict)  # the release's, where a preset has others
    config: str = ""  # flag of CONFIG
    everywhere: str = ""  # arguments to listen outside the container
    defaults_known: bool = True  # False: every flag is said


ENGINES = {
    "vllm": Engine(
        "vLLM", "0.33.0", "vllm/vllm-openai:v0.33.0", ("vllm", "serve"), "--port", "--gpu-memory-utilization", ALL,
        {"bf16": "", "fp8": "--quantization fp8"}, "--max-model-len",
        "--kv-cache-dtype fp8", "--attention-backend TRITON_ATTN", 0.92, {"prefix_caching": True},
    ),
    "sglang": Engine(
        "SGLang", "0.5.23", "lmsysorg/sglang:v0.5.23", ("python3", "-m", "sglang.launch_server", "--model-path"),
        "--port", "--mem-fraction-static", ALL, {"bf16": "", "fp8": "--quantization fp8"}, "--context-length",
        "--kv-cache-dtype fp8_e4m3", "--attention-backend triton", 0.0, {"prefix_caching": True, "dllm_fdfo": True},
        "--dllm-algorithm-config", "--host 0.0.0.0",
    ),
    "lmdeploy": Engine(
        "LMDeploy", "0.18.0", "openmmlab/lmdeploy:v0.18.0", ("lmdeploy", "serve", "api_server"), "--server-port",
        "--cache-max-entry-count", FREE, {"bf16": ""}, "--session-len", "--quant-policy 8", "", 0.8,
    ),
    # The last release before 0.12.0, which dropped frozen groups.
    "lmdeploy-0.11": Engine(
        "LMDeploy", "0.11.1", "openmmlab/lmdeploy:v0.11.1", ("lmdeploy", "serve", "api_server"), "--server-port",
        "--cache-max-entry-count", FREE, {"bf16": ""}, "--session-len", "--quant-policy 8", "", 0.8,
        defaults_known=False,
    ),
}  # fmt: skip


def not_served(preset: Preset, profile: Profile) -> str:
    """Why no released image of a preset's engine runs a profile's model and device; empty: one does."""
    engine, device = ENGINES.get(preset.engine), profile.device
    if engine is not None and device.compute_capability.startswith("gfx"):
        return f"no image of {engine.name} {engine.version} for AMD's {device.name} is known"
    # gemma4_renoise.py:95 of 0.5.23
    if preset.engine == "sglang" and profile.family == "canvas" and weights_of(profile) != "bf16":
        return f"SGLang 0.5.23 refuses a quantised DiffusionGemma, and {profile.name} has {weights_of(profile)} weights"
    return ""


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
    differs: tuple[tuple[str, str], ...] = ()  # flags other than the release's defaults, and why
    product: str = ""  # a node's label of the GPU; empty: unknown
    spare: int = 0
    untested: tuple[str, ...] = ()  # settings beyond what the engine is tested with

    @property
    def shell(self) -> str:
        return shlex.join([*self.command, self.port_flag, "8000"])

    @property
    def in_container(self) -> list[str]:
        return [*self.command, *self.everywhere.split(), self.port_flag, "8000"]

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "shell": self.shell}

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
        lines += [*self.untested, *(f"{flag}: {why}" for flag, why in self.differs)]
        lines += [f"no flag sets: {text}" for text in self.unsaid]
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
        labels = {"app": name}
        pod: dict[str, Any] = {
            "containers": [self._container()],
            "volumes": [
                {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"}},
                {"name": "cache", "persistentVolumeClaim": {"claimName": f"{name}-models"}},
                *([{"name": "config", "configMap": {"name": name}}] if self.config else []),
            ],
        }
        if self.product:
            pod["nodeSelector"] = {"nvidia.com/gpu.product": self.product}
        # The nodes have GPUs for these replicas only: a new one starts once an old one has ended.
        strategy = {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 1, "maxSurge": 0}}
        spec = {
            "replicas": self.replicas, "strategy": strategy, "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        }  # fmt: skip
        claim = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "200Gi"}}}
        service = {"selector": labels, "ports": [{"port": 80, "targetPort": 8000}]}
        parts: list[tuple[str, str, str, dict[str, Any]]] = [
            ("v1", "PersistentVolumeClaim", f"{name}-models", {"spec": claim}),
            ("apps/v1", "Deployment", name, {"spec": spec}),
            ("v1", "Service", name, {"spec": service}),
        ]
        if self.config:
            parts.insert(0, ("v1", "ConfigMap", name, {"data": {CONFIG: self._config()}}))
        objects = [
            {"apiVersion": version, "kind": kind, "metadata": {"name": own}, **body}
            for version, kind, own, body in parts
        ]
        secret = "# A token for Hugging Face: kubectl create secret generic hf --from-literal token=...\n"
        return self._head() + secret + yaml.dump_all(objects, Dumper=_Plain, sort_keys=False, width=120)

    def _container(self) -> dict[str, Any]:
        """The engine's, which loads weights for up to an hour before it is asked whether it is alive."""
        health = {"httpGet": {"path": "/health", "port": 8000}, "periodSeconds": 10}
        size = {"nvidia.com/gpu": self.gpus, "cpu": str(8 * self.gpus), "memory": f"{64 * self.gpus}Gi"}
        mounts = [
            {"name": "shm", "mountPath": "/dev/shm"},
            {"name": "cache", "mountPath": "/root/.cache/huggingface"},
            *([{"name": "config", "mountPath": "/deploy"}] if self.config else []),
        ]
        token = {"secretKeyRef": {"name": "hf", "key": "token", "optional": True}}
        return {
            "name": "engine", "image": self.image, "command": self.in_container,
            **({"workingDir": "/deploy"} if self.config else {}),
            "env": [{"name": "HF_TOKEN", "valueFrom": token}],
            "ports": [{"containerPort": 8000}],
            "startupProbe": {**health, "failureThreshold": 360}, "readinessProbe": health,
            "livenessProbe": {**health, "failureThreshold": 6, "timeoutSeconds": 5},
            "resources": {"requests": size, "limits": size}, "volumeMounts": mounts,
        }  # fmt: skip


def deployment_of(
    spec: str,
    profile: Profile,
    replicas: int = 1,
    *,
    router: str = "",
    allow_code: AllowedCode = NO_CODE,
    spare: int = 0,
    untested: tuple[str, ...] = (),
    context: int | None = None,
) -> Deployment | None:
    """The launch of a SPEC's policy on a profile's device; None if no released engine is known to serve it.

    Only what differs from the release's defaults has a flag. spare: standby replicas. context: a request's most tokens.
    """
    preset = preset_of(name_of(spec), spec, allow_code)
    engine = ENGINES.get(preset.engine)  # a preset from outside may name any engine
    if engine is None or not_served(preset, profile):
        return None
    chosen, flags = settings_of(parse(spec, allow_code)), _Flags(engine, preset, profile.device)
    for name, flag in preset.flags.items():
        if name == "prefix_caching" and not chosen[name] and name not in named_fields(spec, allow_code):
            if engine.defaults.get(name):
                flags.differs.append(("prefix caching", "stays on, as in the release; the plan counted no hits"))
            continue
        flags.add(name, flag, profile.device.count if name == "gpus" else chosen.get(name))
    for option, held in flags.objects.items():
        flags.words += [option, json.dumps(held)]
        flags.differs.append((f"{option} {json.dumps(held)}", "as replayed; not the release's"))
    usual = settings_of(preset.policy)
    flags.unsaid += [f"{n}={_yaml(v)}" for n, v in chosen.items() if n not in preset.flags and v != usual[n]]
    weights = weights_of(profile)
    model = QUANTISED.get((profile.model.name, weights), CHECKPOINTS.get(profile.model.name))
    if model is None:
        flags.unsaid.append(f"the checkpoint of {profile.model.name}: replace MODEL by its name or path")
    elif (profile.model.name, weights) in QUANTISED:
        flags.differs.append((model, f"a checkpoint of {weights} weights, as the plan has them"))
    elif weights in engine.weights:
        flags.say(engine.weights[weights], "the weights that the plan has")
    else:
        flags.unsaid.append(f"weights of {weights}, for which no flag of {engine.name} {engine.version} is known")
    copies = max(1, profile.device.count // profile.model.kv_heads)
    if profile.memory.kv_bytes_per_token < copies * profile.model.kv_bytes_per_token:
        flags.say(engine.keys, "keys and values of 8 bits, as the plan has them")
    if profile.memory.fixed_num_pages is None and (share := _share(profile, engine.memory_of)) != engine.share:
        usual_share = f"; default {engine.share:g}" if engine.share else ""
        flags.say(f"{engine.memory} {share:.2g}", f"the profile's share of memory{usual_share}")
    if context is not None:
        most = min(profile.model.context_limit or math.inf, -(-context // 1024) * 1024)
        flags.say(f"{engine.context} {most:.0f}", f"the longest request of the traffic has {context:,} tokens")
    if preset.policy.family == "canvas" and not profile.device.compute_capability.startswith("9."):
        flags.say(engine.attention, "the engine's recipe, for heads of 512 on this GPU")
    if flags.config:
        flags.say(f"{engine.config} {CONFIG}", "the algorithm's settings, as replayed")
    if "drafter" in preset.flags and chosen["drafter"] != "ngram":
        flags.unsaid.append("the draft model: `model` of --speculative-config")
    if router not in ("", UNROUTED) and replicas > 1:
        flags.unsaid.append(f"the router in front of the replicas: the plan uses {router}")
    return Deployment(
        f"{engine.name} {engine.version}", engine.image, model or "MODEL", weights, replicas, profile.device.count,
        (*engine.command, model or "MODEL", *preset.serve.split(), *flags.words), engine.port, engine.everywhere,
        flags.config, tuple(flags.unsaid), tuple(flags.differs), product_of(profile.device.name), spare, untested,
    )  # fmt: skip


class _Flags:
    """What a launch says beyond the release's defaults."""

    def __init__(self, engine: Engine, preset: Preset, device: Device) -> None:
        self.words: list[str] = []
        self.config: dict[str, Any] = {}  # of CONFIG
        self.objects: dict[str, dict[str, Any]] = {}  # by flag, in JSON
        self.unsaid: list[str] = []
        self.differs: list[tuple[str, str]] = []  # flag, why
        on_card = replace(preset.policy, batching=preset.policy.batching.on(device))
        self._defaults = {**settings_of(on_card), "gpus": 1, **engine.defaults}
        self._defaults_known = engine.defaults_known

    def say(self, flag: str, why: str) -> None:
        if flag:
            self.words += flag.split()
            self.differs.append((flag, why))

    def add(self, name: str, flag: str, value: Any) -> None:
        """A field's flag, unless the release has the value by default."""
        default = self._defaults.get(name)
        if value is None:
            return
        if flag.startswith(IN_FILE):
            self.config[flag.removeprefix(IN_FILE)] = value
        elif flag.startswith(IN_JSON):
            option, _, key = flag.removeprefix(IN_JSON).partition(".")
            if value != default or option == "--speculative-config":
                self.objects.setdefault(option, {})[key] = value
        elif value != default or not self._defaults_known:
            yes, _, no = flag.partition("/")
            text = f"{flag} {value}" if not isinstance(value, bool) else yes if value else no
            why = f"as replayed; default {_yaml(default)}"
            if name == "gpus":
                why = "GPUs of a replica"
            elif not self._defaults_known:
                why = "as replayed; this release's default was not read"
            self.say(text, why)


def weights_of(profile: Profile) -> str:
    """By the profile's bytes: a name of BITS, or bytes a parameter."""
    model, held = profile.model, profile.memory.weight_bytes
    off = {name: abs(held / Precision(name).weight_bytes(model) - 1) for name in BITS}
    nearest = min(off, key=lambda name: off[name])
    return nearest if off[nearest] < CLOSE else f"{held / model.total_params:.2g} bytes a parameter"


def _share(profile: Profile, of: str) -> float:
    """The memory share, as the engine's flag means it."""
    m = profile.memory
    if of == ALL:
        return m.utilisation
    free = m.capacity_bytes - m.weight_bytes
    return max(0.01, (m.capacity_bytes * m.utilisation - m.weight_bytes - m.workspace_bytes) / free)


def _yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
