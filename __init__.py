"""dsim: which scheduler settings, on how many GPUs, meet a latency target for a diffusion language model's traffic."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .cli.python import capacity as capacity
    from .cli.python import compare as compare
    from .cli.python import follow as follow
    from .cli.python import import_run as import_run
    from .cli.python import load_profile as load_profile
    from .cli.python import load_run as load_run
    from .cli.python import load_trace as load_trace
    from .cli.python import parse_policy as parse_policy
    from .cli.python import plan as plan
    from .cli.python import profile as profile
    from .cli.python import replay as replay
    from .cli.python import run_live as run_live
    from .cli.python import sweep as sweep
    from .cli.python import tune as tune
    from .cli.python import validate as validate

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


def __getattr__(name: str) -> Any:
    """Load the functions when one is first asked for: the command line starts without them."""
    if name in __all__:
        return getattr(import_module(".cli.python", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
