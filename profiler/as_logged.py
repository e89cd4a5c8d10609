"""The policy of a step log: its header's preset and settings."""

from ..engine.errors import ProfileError
from ..engine.part import fields_of
from ..engine.policy import PRESETS, parse
from ..files.read import cut
from .profile import Setting
from .steplog import Header


def policy_of(header: Header) -> tuple[str, list[str]]:
    """The SPEC, and logged settings that its preset lacks. ProfileError: unknown preset."""
    if header.preset is None or header.preset not in PRESETS:
        named = "null" if header.preset is None else cut(header.preset)
        raise ProfileError(f"the log's header has preset {named}, expected one of {', '.join(PRESETS)}")
    policy = PRESETS[header.preset].policy
    usual = {field.name: field.default for part in policy.parts() for field in fields_of(part)}
    stated: dict[str, Setting] = dict(header.settings)
    stated["page_size"] = header.page_size
    if header.num_pages is not None:
        stated["num_pages"] = header.num_pages
    if header.block_length > 1:
        stated["canvas_length" if "canvas_length" in usual else "block_length"] = header.block_length
        if policy.unmasking.strategy == "low_confidence_dynamic":
            stated["threshold"] = header.threshold
    changes = [f"{name}={_spelled(value)}" for name, value in stated.items()
             if name in usual and value is not None and value != usual[name]]  # fmt: skip
    spec = ",".join([header.preset, *changes])
    parse(spec)
    return spec, [name for name in stated if name not in usual]


def _spelled(value: Setting) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
