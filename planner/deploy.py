"""A fleet as an engine's launch command and Kubernetes manifest."""

import json
import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..engine.allowed_code import NO_CODE, AllowedCode
from ..engine.part import Preset
from ..engine.policies.sglang_0_5 import JointThresholdInDel
from ..engine.spec import files_of, name_of, named_fields, parse, preset_of, settings_of, with_files
from ..files.read import read_text, read_toml
from ..profiler.hardware import product_of
from ..profiler.models import CHECKPOINTS
from ..profiler.profile import Device, Profile, weights_of
from ..report.table import counted
from ..sim.setting import refused
from .candidate import beyond_tested, spelt, with_fields

IN_FILE, IN_JSON = "config:", "json:"  # flag prefixes: a key of the engine's file, or of a JSON object
CONFIG = "dllm.yaml"
UNROUTED = "random"  # router of the written files: a Kubernetes Service draws a replica for each connection
DRAFTS = "--speculative-config"
DRAFT_MODEL = "DRAFT_MODEL"
LAUNCH_FILES = ("launch.sh", "kubernetes.yaml")
PIP = "pip install . ./hooks"  # in a clone of dsim, into the engine's environment or image
# Published checkpoints, by model and weights (precisions-and-cards.md 1.2).
QUANTISED = {
    ("DiffusionGemma-26B-A4B", "fp8"): "RedHatAI/diffusiongemma-26B-A4B-it-FP8-dynamic",
    ("DiffusionGemma-26B-A4B", "nvfp4"): "nvidia/diffusiongemma-26B-A4B-it-NVFP4",
}


@dataclass(frozen=True, kw_only=True)
class Engine:
    """How an engine's release starts a replica (engines.toml)."""

    name: str
    version: str
    image: str
    command: list[str]  # before the model's name
    port: str  # flag, like the next one
    memory: str
    memory_of: str  # `share` is of all memory, or of what weights leave free
    weights: Mapping[str, str]  # the profile's weights -> arguments
    context: str  # flag of a request's most tokens
    keys: str  # arguments for keys and values of 8 bits
    share: float  # of `memory`, by default; 0: chosen by the engine
    discipline: str = (
        ""  # arguments before the JSON that names a policy's discipline, or VARIABLE=; empty: it takes none
    )
    attention: str = ""  # for heads of 512 where FlashAttention 4 does not run (precisions-and-cards.md 3.2)
    defaults: Mapping[str, Any] = field(default_factory=dict)  # the release's, where a preset has others
    config: str = ""  # flag of CONFIG
    everywhere: str = ""  # arguments to listen outside the container
    defaults_known: bool = True  # False: every flag is written

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


ENGINES = {name: Engine(**row) for name, row in read_toml(Path(__file__).with_name("engines.toml")).items()}


def not_served(preset: Preset, profile: Profile) -> str:
    """Why no released image of a preset's engine runs a profile's model and device; empty: one does."""
    engine, device = ENGINES.get(preset.engine), profile.device
    if engine is not None and device.compute_capability.startswith("gfx"):
        return f"no image of {engine} for AMD's {device.name} is known"
    if engine is not None and preset.policy.discipline.questions:
        if not engine.discipline:
            return f"{engine} takes no discipline from outside"
        if engine.discipline.endswith("=") and device.count > 1:
            return f"{engine} takes a discipline on one GPU, and the profile has {device.count}"
    shifts = isinstance(preset.policy.unmasking, JointThresholdInDel)
    if shifts and (profile.model.experts is None or profile.model.experts.by_block is None):
        return f"{engine} serves {preset.policy.name} only with tokens to delete and insert, as LLaDA2.2 has them"
    return refused(preset.policy, profile)


def engine_of_preset(preset: Preset) -> str:
    """A preset's engine, of any release; empty: none."""
    return preset.engine.partition("-")[0]


def engine_of_profile(profile: Profile) -> str:
    """The engine behind a profile's step times; empty: another implementation."""
    first = profile.implementation.partition(" ")[0].strip(",").lower()
    return first * (first in ENGINES)


def times_another(profile: Profile, preset: Preset) -> bool:
    """Whether preset and step times are of different engines."""
    engine, timed = engine_of_preset(preset), engine_of_profile(profile)
    return bool(engine and timed) and engine != timed


@dataclass(frozen=True, kw_only=True)
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
    unset: tuple[str, ...]  # fields without a flag
    differs: Mapping[str, str]  # flags other than the release's defaults, and why
    product: str  # a node's label of the GPU; empty: unknown
    spare: int
    untested: tuple[str, ...]  # settings beyond what the engine is tested with
    code: Mapping[str, str]  # a discipline's file, by name

    @property
    def shell(self) -> str:
        return shlex.join([*self.command, self.port_flag, "8000"])

    @property
    def start(self) -> tuple[str, ...]:
        """Lines for a shell: what a discipline needs first, and the command."""
        return (*[PIP] * bool(self.code), self.shell)

    @property
    def beside(self) -> dict[str, str]:
        """Files in the folder that the engine starts in."""
        config = "".join(f"{name}: {spelt(value)}\n" for name, value in self.config.items())
        return {**({CONFIG: config} if config else {}), **self.code}

    def files(self) -> dict[str, str]:
        """By name: script, manifest, and the engine's file, if any."""
        import jinja2  # only launch files and pages need it

        command = [*self.command, *self.everywhere.split(), self.port_flag, "8000"]
        words = shlex.join([*self.command, self.port_flag])
        values = {**vars(self), "head": self._head(), "words": words, "beside": self.beside, "command": command}
        loader = jinja2.FileSystemLoader(Path(__file__).with_name("deploy_templates"))
        environment = jinja2.Environment(loader=loader, trim_blocks=True, keep_trailing_newline=True)
        environment.undefined = jinja2.StrictUndefined
        environment.filters["json"] = json.dumps
        texts = {name: environment.get_template(name).render(values) for name in LAUNCH_FILES}
        return {**texts, **self.beside}

    def _head(self) -> str:
        fleet = f"{counted(self.replicas, 'replica')} of {counted(self.gpus, 'GPU')}"
        lines = [f"{self.engine}, {self.model} ({self.weights}): {fleet}"]
        if self.spare:
            lines.append(f"spare replicas: {self.spare}; the SLOs are met without them")
        lines += [*self.untested, *(f"{flag}: {reason}" for flag, reason in self.differs.items())]
        lines += [f"no flag sets: {text}" for text in self.unset]
        lines += [f"first, in the engine's environment or image, from a clone of dsim: {PIP}"] * bool(self.code)
        # One line each: these files are executed, and model names may hold line breaks.
        return "\n".join(f"# {' '.join(line.split())}" for line in lines)


def deployment_of(
    spec: str,
    profile: Profile,
    replicas: int = 1,
    *,
    allow_code: AllowedCode = NO_CODE,
    spare: int = 0,
    context: int | None = None,
) -> Deployment | None:
    """The launch of a SPEC's policy on a profile's device; None if no released engine is known to serve it.

    Only what differs from the release's defaults has a flag. spare: standby replicas. context: a request's most tokens.
    """
    preset = preset_of(name_of(spec), spec, allow_code)
    engine = ENGINES.get(preset.engine)  # a preset from outside may name any engine
    if engine is None or not_served(preset, profile):
        return None
    flags, device, weights = _Flags(engine, preset, profile.device), profile.device, weights_of(profile)
    flags.add_settings(spec, allow_code, device.count)
    key = profile.model.name, weights
    model = QUANTISED.get(key, CHECKPOINTS.get(profile.model.name))
    if model is None:
        flags.unset.append(f"the checkpoint of {profile.model.name}: replace MODEL by its name or path")
    elif key in QUANTISED:
        flags.differs[model] = f"a checkpoint of {weights} weights, as the plan has them"
    elif weights in engine.weights:
        flags.write(engine.weights[weights], "the weights that the plan has")
    else:
        flags.unset.append(f"weights of {weights}, for which no flag of {engine} is known")
    copies = max(1, device.count // profile.model.kv_heads)
    if profile.memory.kv_bytes_per_token < copies * profile.model.kv_bytes_per_token:
        flags.write(engine.keys, "keys and values of 8 bits, as the plan has them")
    share = _share(profile, engine.memory_of)
    if profile.memory.fixed_num_pages is None and share != engine.share:
        usual_share = f"; default {engine.share:g}" if engine.share else ""
        flags.write(f"{engine.memory} {share:.2g}", f"the profile's share of memory{usual_share}")
    if context is not None:
        limit = min(profile.model.context_limit or math.inf, -(-context // 1024) * 1024)
        flags.write(f"{engine.context} {limit:.0f}", f"the longest request of the traffic has {context:,} tokens")
    if preset.policy.family == "canvas" and not device.compute_capability.startswith("9."):
        flags.write(engine.attention, "the engine's recipe, for heads of 512 on this GPU")
    if flags.config:
        flags.write(f"{engine.config} {CONFIG}", "the algorithm's settings, as replayed")
    code = {}
    if preset.policy.discipline.questions:
        flags.add_discipline(spec, allow_code)
        code = {Path(path).name: read_text(path) for path in files_of(spec)}
    if flags.drafts_by_model:
        flags.unset.append(f"the drafter's checkpoint: replace {DRAFT_MODEL} by its name or path")
    return Deployment(
        engine=str(engine),
        image=engine.image,
        model=model or "MODEL",
        weights=weights,
        replicas=replicas,
        gpus=device.count,
        command=(*flags.before, *engine.command, model or "MODEL", *preset.serve.split(), *flags.words),
        port_flag=engine.port,
        everywhere=engine.everywhere,
        config=flags.config,
        unset=tuple(flags.unset),
        differs=flags.differs,
        product=product_of(device.name),
        spare=spare,
        untested=beyond_tested(spec, allow_code),
        code=code,
    )


class _Flags:
    """What a launch sets beyond the release's defaults."""

    def __init__(self, engine: Engine, preset: Preset, device: Device) -> None:
        self.before: list[str] = []  # the engine's command
        self.words: list[str] = []
        self.config: dict[str, Any] = {}  # of CONFIG
        self.unset: list[str] = []
        self.differs: dict[str, str] = {}  # flag -> why
        self.drafts_by_model = False
        self._engine, self._preset = engine, preset
        on_card = replace(preset.policy, batching=preset.policy.batching.on(device))
        self._defaults = {**settings_of(on_card), "gpus": 1, **engine.defaults}

    def write(self, flag: str, reason: str) -> None:
        if flag:
            self.words += flag.split()
            self.differs[flag] = reason

    def add_settings(self, spec: str, allow_code: AllowedCode, gpus: int) -> None:
        """A SPEC's fields, but those that the release has by default."""
        policy, preset = parse(spec, allow_code), self._preset
        settings = {**settings_of(policy), "gpus": gpus}
        objects: dict[str, dict[str, Any]] = {}  # by flag, in JSON
        for name, flag in preset.flags.items():
            value, default = settings.get(name), self._defaults.get(name)
            if name == "prefix_caching" and not value and name not in named_fields(spec, allow_code):
                if self._engine.defaults.get(name):
                    self.differs["prefix caching"] = "stays on, as in the release; the plan counted no hits"
            elif value is None:
                continue
            elif flag.startswith(IN_FILE):
                self.config[flag.removeprefix(IN_FILE)] = value
            elif flag.startswith(IN_JSON):
                option, _, key = flag.removeprefix(IN_JSON).partition(".")
                if value != default and option != DRAFTS:
                    objects.setdefault(option, {})[key] = value
            elif value != default or not self._engine.defaults_known:
                if isinstance(value, bool):
                    on_flag, _, off_flag = flag.partition("/")
                    words = on_flag if value else off_flag
                else:
                    words = f"{flag} {value}"
                self.write(words, self._reason(name, default))
        if drafts := (policy.width - 1) * (policy.commits_by == "acceptance"):
            self.drafts_by_model = settings["drafter"] != "ngram"
            named = {"model": DRAFT_MODEL} if self.drafts_by_model else {}
            objects[DRAFTS] = {"method": settings["drafter"], **named, "num_speculative_tokens": drafts}
            if settings["adaptive_verification"]:
                objects[DRAFTS]["enable_adaptive_verification"] = True
        for option, values in objects.items():
            self.words += [option, json.dumps(values)]
            self.differs[f"{option} {json.dumps(values)}"] = "as replayed; not the release's"
        for name, usual in settings_of(preset.policy).items():
            if name not in {*preset.flags, *vars(preset.policy.discipline)} and settings[name] != usual:
                self.unset.append(f"{name}={spelt(settings[name])}")

    def add_discipline(self, spec: str, allow_code: AllowedCode) -> None:
        """The discipline's file, which lies beside the engine, and its fields."""
        fields = vars(parse(spec, allow_code).discipline)
        usual = vars(self._preset.policy.discipline)
        changed = {name: value for name, value in fields.items() if value != usual[name]}
        policy = with_fields(with_files(name_of(spec), lambda path: f"./{Path(path).name}"), changed)
        words = self._engine.discipline.split()
        if self._engine.discipline.endswith("="):
            self.before = ["env", f"{words[0]}{policy}"]
        else:
            self.words += [*words, json.dumps({"dsim_policy": policy})]
        self.differs[" ".join(words[:2])] = "the policy's own order, limits and caps, inside the engine"

    def _reason(self, name: str, default: Any) -> str:
        if name == "gpus":
            return "GPUs of a replica"
        if not self._engine.defaults_known:
            return "as replayed; this release's default was not read"
        return f"as replayed; default {spelt(default)}"


def _share(profile: Profile, memory_of: str) -> float:
    """The memory share, as the engine's flag means it."""
    memory = profile.memory
    if memory_of == "all":
        return memory.utilisation
    free = memory.capacity_bytes - memory.weight_bytes
    pages = memory.capacity_bytes * memory.utilisation - memory.weight_bytes - memory.workspace_bytes
    return max(0.01, pages / free)
