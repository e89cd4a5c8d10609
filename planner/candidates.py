"""A plan's candidates: policies on the profiles that can run them, and GPUs and their prices."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..engine.errors import DsimError, PolicyError
from ..engine.spec import PRESETS, name_of, parse, preset_of
from ..files.read import FilePath, cut, float_of
from ..profiler import hardware, models
from ..profiler.placed import placed
from ..profiler.precision import precision
from ..profiler.profile import Profile, as_run_by, load, shipped_for
from ..profiler.roofline import roofline
from ..results.world import World
from ..traces.prefixes import num_named
from .candidate import plain_spec, refusal
from .deploy import engine_of_preset, engine_of_profile, not_served, times_another
from .plan_result import Fleet
from .quality import Quality, QualityTable, quality_of
from .settings import settings_to_try
from .space import searchable

Prices = Callable[[Profile], float | None]  # of a GPU per hour


@dataclass(frozen=True)
class PlanCandidate:
    """A policy on a profile, with its cost."""

    policy: str  # SPEC
    profile: Profile
    place: str  # as in Fleet
    quality: Quality
    price: float | None  # of a GPU per hour
    settings: dict[str, Quality] = field(default_factory=dict)  # SPECs to try, by rising number of changes
    original: str = ""  # the SPEC as named, where `policy` is one of `settings`
    refused: str = ""  # why `original` cannot run
    is_research: bool = False  # of no released engine, and not named by the user

    def __str__(self) -> str:
        return " on ".join(filter(None, (self.policy, self.place)))

    @property
    def gpus(self) -> int:
        return self.profile.device.count

    @property
    def weight(self) -> float:
        """Ranks fleets, per replica: price, or GPUs without prices."""
        return self.gpus * (1.0 if self.price is None else self.price)

    def row(self) -> Fleet:
        """Without its size."""
        profile = self.profile
        return Fleet(
            policy=self.policy,
            place=self.place,
            profile=profile.name,
            device=profile.device.name,
            model=profile.model.name,
            implementation=profile.implementation,
            estimated=profile.is_estimate,
            quality=self.quality,
            gpus_per_replica=self.gpus,
            price=self.price,
        )


def candidates_of(
    world: World,
    policies: Sequence[str],
    profiles: Sequence[Profile] | None,
    prices: Prices,
    *,
    min_quality: float | None = None,
    quality_table: QualityTable | None = None,
    as_given: bool = False,
    research: bool = False,
) -> tuple[list[PlanCandidate], list[Fleet]]:
    """Policies on the profiles that can run them, and policies left out, with reasons.

    POLICY@PROFILE runs on that profile only. profiles: by default one of the log's model, or the commands' default.
    Without policies: the shipped presets of a profile's family that a released engine has; if none of those can run,
    all; with `research` all. An engine's preset is left out on another engine's profile, unless named and without a
    profile of its own engine. as_given: search no settings. DsimError if no candidate remains.
    """
    if profiles is None and not name_their_profiles(policies):
        # A shipped profile of the one model that a log names; else the default.
        names = [models.known_model(name) for name in set(map(str, world.source().extras.get("model", ())))]
        shipped = [name for model in names[:1] if model and len(set(names)) == 1 for name in shipped_for(model.name)]
        profiles = [load([*shipped, World.profile][0])]
    policies_by_profile = _on_profiles(policies, profiles or (), research)
    devices = {profile.device.name for profile, _ in policies_by_profile}
    engines = {engine_of_profile(profile) for profile, _ in policies_by_profile}
    longest, code = world.longest(), world.allow_code
    shared_prefixes = world.lengths is None and num_named(world.source()) > 0
    candidates: list[PlanCandidate] = []
    left_out: list[Fleet] = []
    for file_profile, specs in policies_by_profile:
        place = file_profile.name
        if len(devices) == len(policies_by_profile):
            place = file_profile.device.name * (len(devices) > 1)
        for text in specs:
            preset = preset_of(name_of(text), text, code)
            policy = replace(world, policy=text).parsed_policy()
            profile = as_run_by(file_profile, policy)
            elsewhere = times_another(profile, preset)
            if elsewhere and engine_of_preset(preset) in engines:
                continue
            check = searchable(profile, world.workload, longest)
            settings: dict[str, Quality] = {}
            for spec in () if as_given else settings_to_try(text, profile, check, code, shared_prefixes):
                settings[spec] = quality_of(parse(spec, code), profile.model.name, quality_table)
            refused = str(refusal(check, policy) or "").removeprefix(f"{cut(policy.name)}: ")
            quality = quality_of(policy, profile.model.name, quality_table)
            good = {spec: score for spec, score in settings.items() if not score.shortfall(min_quality)}
            candidate = PlanCandidate(
                policy=plain_spec(text, code) if text.endswith(".toml") else text,
                profile=profile,
                place=place,
                quality=quality,
                price=prices(profile),
                is_research=research and not (policies or preset.engine),
            )
            reason = not_served(preset, profile)
            if elsewhere and not policies:
                reason = reason or f"{profile.name} has the step times of {cut(profile.implementation)}"
            if not settings:
                reason = reason or refused
            if not good and (settings or quality.shortfall(min_quality)):
                reason = reason or f"quality {quality.shortfall(min_quality)}"
            if reason:
                left_out.append(replace(candidate.row(), dropped=reason))
                continue
            if len(good) > 1 or refused:
                original, best = candidate.policy, next(iter(good))
                candidate = replace(candidate, policy=best, settings=good, original=original, refused=refused)
            candidates.append(candidate)
    if all(candidate.is_research for candidate in candidates):
        candidates = [replace(candidate, is_research=False) for candidate in candidates]
    if not candidates:
        reasons = dict.fromkeys(f"{row.name}: {row.dropped}" for row in left_out)
        raise DsimError("; ".join(reasons) or "no policy and no profile is given, expected one of each")
    return candidates, left_out


def name_their_profiles(policies: Sequence[str]) -> bool:
    return bool(policies) and all(placed(policy)[1] is not None for policy in policies)


def _on_profiles(
    policies: Sequence[str], profiles: Sequence[Profile], research: bool
) -> list[tuple[Profile, list[str]]]:
    """Policies to try on each profile, including profiles named by policies."""
    by_name: dict[str, tuple[Profile, list[str]]] = {}
    for profile in profiles:
        if profile.name in by_name:
            raise DsimError(f"two profiles are named {profile.name}, expected a name of its own for each")
        by_name[profile.name] = profile, []
        if not policies:
            presets = [name for name, preset in PRESETS.items() if preset.policy.family == profile.family]
            of_engines = [name for name in presets if PRESETS[name].engine]
            if research or all(times_another(profile, PRESETS[name]) for name in of_engines):
                of_engines = presets
            by_name[profile.name] = profile, of_engines
    for policy in policies:
        spec, home = placed(policy)
        for profile in [load(home)] if home else profiles:
            _, specs = by_name.setdefault(profile.name, (profile, []))
            if spec in specs:
                raise PolicyError(f"policy {spec} is given twice on {profile.name}, expected once")
            specs.append(spec)
    return [(profile, specs) for profile, specs in by_name.values() if specs]


def from_sheets(
    gpus: Sequence[str],
    model: str,
    tp: int,
    yields: FilePath | None,
    *,
    weights: str | None = None,
    kv: str | None = None,
    **options: Any,
) -> list[Profile]:
    """A model's profiles on GPUs, from data sheets. options: of `roofline`."""
    if not gpus:
        return []
    shape, formats = models.model(model), precision(model, weights, kv)
    kind = models.family(shape, models.architecture_of(model))
    commits = load(yields).commits if yields else ()
    options |= {"generates": kind, "yields": commits, "precision": formats}
    return [roofline(hardware.gpu(name), shape, tp, **options) for name in gpus]


def prices(price: float | str | Mapping[str, float] | None) -> Prices:
    """A GPU's price per hour: one for all, or by the start of its name; a mapping's by a profile's whole name."""
    if price is None:
        return lambda profile: None
    if isinstance(price, Mapping):
        return lambda profile: price.get(profile.name)
    text = str(price)
    by_name: dict[str, float] = {}
    for item in text.split(","):
        name, equals, amount = item.rpartition("=")
        value = float_of(amount)
        if not 0 < value < math.inf or (equals and not name.strip()) or (not equals and "," in text):
            raise DsimError(
                f"--gpu-hour is {text}, expected a price above 0, or one for each GPU such as a100=2,h100=3.5"
            )
        by_name[name.strip().lower()] = value

    def price_of(profile: Profile) -> float:
        names = (profile.device.name.lower(), profile.name.lower())
        for name in sorted(by_name, key=len, reverse=True):
            if any(full.startswith(name) for full in names):
                return by_name[name]
        raise DsimError(f"--gpu-hour is {text}, which has no price for {profile.device.name}")

    return price_of
