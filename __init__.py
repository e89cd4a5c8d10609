"""dsim: which scheduler settings, on how many GPUs, meet a latency target for a diffusion language model's traffic."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .planner.api import capacity as capacity
    from .planner.api import compare as compare
    from .planner.api import import_run as import_run
    from .planner.api import load_profile as load_profile
    from .planner.api import load_run as load_run
    from .planner.api import load_trace as load_trace
    from .planner.api import parse_policy as parse_policy
    from .planner.api import plan as plan
    from .planner.api import profile as profile
    from .planner.api import replay as replay
    from .planner.api import run_live as run_live
    from .planner.api import sweep as sweep
    from .planner.api import tune as tune
    from .planner.api import validate as validate

__version__ = "0.1.0"
__all__ = [
    "__version__",
    "capacity",
    "compare",
    "import_run",
    "load_profile",
    "load_run",
    "load_trace",
    "parse_policy",
    "plan",
    "profile",
    "replay",
    "run_live",
    "sweep",
    "tune",
    "validate",
]


def __getattr__(name: str) -> Any:
    """Loaded when they are first asked for: the command line starts without them."""
    if name in __all__:
        return getattr(import_module(".planner.api", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
