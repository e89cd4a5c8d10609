"""A plan's candidates: policies on the profiles that can run them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from ..engine.errors import DsimError, PolicyError
from ..engine.policy import PRESETS, name_of, parse, preset_of
from ..files.read import cut
from ..profiler.canvas_law import mean_forwards
from ..profiler.models import known_model
from ..profiler.placed import placed
from ..profiler.profile import Profile, as_run_by, load, shipped_for
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
        return f"{self.policy} on {self.place}" if self.place else self.policy

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
    Without policies: the shipped presets of a profile's family that a released engine has; with `research`, or if none
    of them can run, also those that no engine has. An engine's preset is left out on another engine's profile, unless
    named and without a profile of its own engine. as_given: search no settings. DsimError if no candidate remains.
    """
    if profiles is None and not name_their_profiles(policies):
        # A shipped profile of the one model that a log names; else the default.
        models = {known_model(name) for name in set(map(str, world.source().extras.get("model", ())))}
        model = models.pop() if len(models) == 1 else None
        profiles = [load([*(shipped_for(model.name) if model else []), World.profile][0])]
    policies_by_profile = _on_profiles(policies, profiles or ())
    devices = {profile.device.name for profile, _ in policies_by_profile}
    engines = {engine_of_profile(profile) for profile, _ in policies_by_profile}
    longest, code = world.longest(), world.allow_code
    shared_prefixes = not as_given and world.lengths is None and num_named(world.source()) > 0

    def considered(text: str, profile: Profile, place: str) -> tuple[PlanCandidate, str] | None:
        """The candidate, and why it is left out; None if that is not worth a row."""
        preset = preset_of(name_of(text), text, code)
        if not (policies or research or preset.engine):
            return None
        policy = replace(world, policy=text).parsed_policy()
        profile = heaviest_law_first(as_run_by(profile, policy))
        elsewhere = times_another(profile, preset)
        if elsewhere and engine_of_preset(preset) in engines:
            return None
        check = searchable(profile, world.workload, longest)
        specs = [] if as_given else settings_to_try(text, profile, check, code, shared_prefixes)
        refused = str(refusal(check, policy) or "").removeprefix(f"{cut(policy.name)}: ")
        spec, model = plain_spec(text, code) if text.endswith(".toml") else text, profile.model.name
        quality = quality_of(policy, model, quality_table)
        qualities = {setting: quality_of(parse(setting, code), model, quality_table) for setting in specs}
        settings = {setting: score for setting, score in qualities.items() if not score.shortfall(min_quality)}
        candidate = PlanCandidate(
            policy=spec, profile=profile, place=place, quality=quality, price=prices(profile),
            is_research=not (policies or preset.engine),
        )  # fmt: skip
        reason = not_served(preset, profile)
        if not reason and elsewhere and not policies:
            reason = f"{profile.name} has the step times of {cut(profile.implementation)}"
        if not reason and not specs:
            reason = refused
        if not reason and not settings and (specs or quality.shortfall(min_quality)):
            observed = f"unknown: {quality.notes[0]}" if quality.relative is None else str(quality)
            reason = f"quality {observed}, expected at least {100 * (min_quality or 0.0):g} %"
        if not reason and (len(settings) > 1 or refused):
            policy_of_best = next(iter(settings))
            candidate = replace(candidate, policy=policy_of_best, settings=settings, original=spec, refused=refused)
        return candidate, reason

    def consider_all() -> tuple[list[PlanCandidate], list[Fleet]]:
        candidates: list[PlanCandidate] = []
        left_out: list[Fleet] = []
        for profile, specs in policies_by_profile:
            place = ""
            if len(policies_by_profile) > 1:
                place = profile.device.name if len(devices) == len(policies_by_profile) else profile.name
            for text in specs:
                match considered(text, profile, place):
                    case (candidate, ""):
                        candidates.append(candidate)
                    case (candidate, reason):
                        left_out.append(replace(candidate.row(), dropped=reason))
        return candidates, left_out

    candidates, left_out = consider_all()
    if not (policies or research or candidates):
        research = True
        candidates, left_out = consider_all()
    if all(candidate.is_research for candidate in candidates):
        candidates = [replace(candidate, is_research=False) for candidate in candidates]
    if not candidates:
        reasons = dict.fromkeys(f"{row.name}: {row.dropped}" for row in left_out)
        raise DsimError("; ".join(reasons) or "no policy and no profile is given, expected one of each")
    return candidates, left_out


def heaviest_law_first(profile: Profile) -> Profile:
    """The profile with its counted laws of canvases first, by forwards; the first is the default."""
    if len([law for law in profile.canvas_laws if law.engine]) < 2:
        return profile
    laws = sorted(profile.canvas_laws, key=lambda law: -mean_forwards(law) if law.engine else 0.0)
    return replace(profile, canvas_laws=tuple(laws))


def name_their_profiles(policies: Sequence[str]) -> bool:
    return bool(policies) and all(placed(policy)[1] is not None for policy in policies)


def _on_profiles(policies: Sequence[str], profiles: Sequence[Profile]) -> list[tuple[Profile, list[str]]]:
    """Policies to try on each profile, including profiles named by policies."""
    by_name: dict[str, tuple[Profile, list[str]]] = {}
    for profile in profiles:
        if profile.name in by_name:
            raise DsimError(f"two profiles are named {profile.name}, expected a name of its own for each")
        presets = [name for name, preset in PRESETS.items() if preset.policy.family == profile.family]
        by_name[profile.name] = profile, [] if policies else presets
    for policy in policies:
        spec, home = placed(policy)
        for profile in profiles if home is None else [load(home)]:
            _, specs = by_name.setdefault(profile.name, (profile, []))
            if spec in specs:
                raise PolicyError(f"policy {spec} is given twice on {profile.name}, expected once")
            specs.append(spec)
    return [(profile, specs) for profile, specs in by_name.values() if specs]
