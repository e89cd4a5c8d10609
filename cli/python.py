"""The functions of `import dsim`: the commands' questions, and four that read files (docs/python.md)."""

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

from ..engine.allowed_code import allowed
from ..engine.spec import Policy, parse
from ..profiler.profile import load as read_profile
from ..report.run_page import RunResult
from ..results.run import read_run
from ..results.world import named_code
from ..traces import load as read_trace
from .capacity_question import CapacityQuestion
from .compare_question import CompareQuestion
from .declared import asks, suggesting
from .follow_question import FollowQuestion
from .import_question import ImportQuestion
from .live_question import LiveQuestion
from .plan_question import PlanQuestion
from .profile_question import ProfileQuestion
from .replay_question import ReplayQuestion
from .sweep_question import SweepQuestion
from .tune_question import TuneQuestion
from .validate_question import ValidateQuestion

capacity = asks(CapacityQuestion, "capacity")
compare = asks(CompareQuestion, "compare")
follow = asks(FollowQuestion, "follow")
import_run = asks(ImportQuestion, "import_run")
plan = asks(PlanQuestion, "plan")
profile = asks(ProfileQuestion, "profile")
replay = asks(ReplayQuestion, "replay")
run_live = asks(LiveQuestion, "run_live")
sweep = asks(SweepQuestion, "sweep")
tune = asks(TuneQuestion, "tune")
validate = asks(ValidateQuestion, "validate")

load_trace = suggesting(read_trace, "load_trace")
load_profile = suggesting(read_profile, "load_profile")


@partial(suggesting, name="parse_policy")
def parse_policy(spec: str, allow_code: Sequence[str | Path] = ()) -> Policy:
    """Parse a policy's SPEC or TOML file; a code file in the SPEC is loaded. Raises DsimError.

    allow_code: files that a TOML file may name (docs/security.md).
    """
    return parse(spec, named_code([spec], allow_code))


@partial(suggesting, name="load_run")
def load_run(folder: str | Path, *, allow_code: Iterable[str | Path] = ()) -> RunResult:
    """The run in a folder of `dsim replay`, `dsim live` or `dsim import`. Raises DsimError."""
    run = read_run(folder, allowed(allow_code))
    return RunResult.from_info(run.info, open=lambda: run)
