"""dsim: which scheduler settings, on how many GPUs, meet a latency target for a diffusion language model's traffic."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api.follow import follow as follow
    from .api.live import run_live as run_live
    from .api.measured import compare as compare
    from .api.measured import import_run as import_run
    from .api.profiled import profile as profile
    from .api.runs import load_profile as load_profile
    from .api.runs import load_run as load_run
    from .api.runs import load_trace as load_trace
    from .api.runs import parse_policy as parse_policy
    from .api.runs import replay as replay
    from .api.searches import capacity as capacity
    from .api.searches import plan as plan
    from .api.searches import sweep as sweep
    from .api.searches import tune as tune
    from .api.validation import validate as validate

__version__ = "0.1.0"
__all__ = [
    "__version__",
    "capacity",
    "compare",
    "follow",
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
_HOMES = {  # modules of api; the other names are in its runs
    "capacity": "searches", "plan": "searches", "sweep": "searches", "tune": "searches", "run_live": "live",
    "profile": "profiled", "compare": "measured", "import_run": "measured", "validate": "validation",
    "follow": "follow",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Load a function when it is first asked for: the command line starts without them."""
    if name in __all__:
        return getattr(import_module(f".api.{_HOMES.get(name, 'runs')}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
