"""A plan's GPUs and their prices, from the command line."""

import math
from collections.abc import Callable, Mapping, Sequence

from ..engine.errors import DsimError
from ..files.read import float_of
from ..profiler import hardware, models
from ..profiler.precision import precision
from ..profiler.profile import Profile, load
from ..profiler.roofline import roofline


def from_sheets(
    gpus: Sequence[str], model: str, tp: int, yields: str | None, weights: str | None = None, keys: str | None = None
) -> list[Profile]:
    """A model's profiles on GPUs, from data sheets."""
    if not gpus:
        return []
    shape, kind = models.model(model), models.family(models.model(model), models.architecture_of(model))
    commits = load(yields).commits if yields else ()
    formats = precision(model, weights, keys)
    profiles = [
        roofline(hardware.gpu(name), shape, tp, generates=kind, yields=commits, precision=formats) for name in gpus
    ]
    if kind == "block-diffusion" and not profiles[0].commits:
        raise DsimError(
            f"no yields of {shape.name} are published, expected --yields P: a profile with commit models, such as "
            "a100-sdar-8b"
        )
    return profiles


def prices(price: float | str | Mapping[str, float] | None) -> Callable[[Profile], float | None]:
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
