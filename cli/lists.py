"""dsim policies and profiles: what there is."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from . import questions as q
from .answer import Answer
from .declared import Question, Watch


@dataclass(frozen=True, kw_only=True)
class PoliciesQuestion(q.Coded, Question[None]):
    """List the policies' presets and the fields that a SPEC can set.

    dsim policies
    dsim policies optimus

    Arguments:
      spec [SPEC]: Show this policy's fields: default, allowed values, meaning.
    Policy and profile:
      --allow-code FILE.py: With SPEC: a code file that it may load; repeat (docs/security.md).
    """

    spec: str | None = None

    def answer(self, watch: Watch) -> Answer[None]:
        if self.spec is not None:
            return _fields(self.spec, self.allow_code)
        from ..engine.spec import PRESETS, describe, settings_of

        summaries = {f"{name}[:{preset.main}]": preset.summary for name, preset in PRESETS.items()}
        width = max(map(len, summaries))
        names = dict.fromkeys(field for preset in PRESETS.values() for field in settings_of(preset.policy))
        lines = [f"{name:<{width}}  {summary}" for name, summary in summaries.items()]
        lines.append(f"\nA SPEC is name[:value][,field=value...]; the fields are {', '.join(names)}.")
        json = {name: describe(preset.policy) for name, preset in PRESETS.items()}
        return Answer(value=None, json=json, lines=lines)


def _fields(spec: str, allow_code: Sequence[Any]) -> Answer[None]:
    """By axis, with values and the paper or file that the policy follows."""
    from ..engine.part import AXES, fields_of
    from ..engine.spec import name_of, parse, preset_of
    from ..planner.candidate import spelt
    from ..results.world import named_code

    code = named_code([spec], allow_code)
    policy, preset = parse(spec, code), preset_of(name_of(spec), spec, code)
    axes = {axis: fields_of(getattr(policy, axis)) for axis in AXES}
    listed = [{"axis": axis, **asdict(field)} for axis, fields in axes.items() for field in fields]
    about = {"name": policy.name, "summary": preset.summary, "citation": preset.citation, "main": preset.main}
    lines = [": ".join(filter(None, [policy.name, preset.summary]))]
    lines += [f"Source: {preset.citation}"] * bool(preset.citation)
    lines += [f"{name_of(spec)}:VALUE sets {preset.main}."] * bool(preset.main)
    for axis, fields in axes.items():
        lines += [f"\n{axis} ({type(getattr(policy, axis)).__name__})"] * bool(fields)
        for field in fields:
            meaning = f"{field.meaning or 'no meaning given'} [{field.bounds}]"
            lines.append(f"  {field.name} = {spelt(field.default)}: {meaning}")
    return Answer(value=None, json={**about, "fields": listed}, lines=lines)


@dataclass(frozen=True, kw_only=True)
class ProfilesQuestion(Question[None]):
    """List the shipped profiles.

    dsim profiles
    dsim profiles --json
    """

    def answer(self, watch: Watch) -> Answer[None]:
        from ..profiler.known import default_said
        from ..profiler.profile import load, shipped

        profiles = shipped()
        width = max(map(len, profiles), default=0)
        lines = [f"{name:{width}}  {text}; {default_said(load(name))}" for name, text in profiles.items()]
        return Answer(value=None, json=profiles, lines=lines)
