"""`dsim replay --as-logged`: policy, settings and profile of a step log."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..engine.errors import DsimError, cut
from ..files.read import printable

if TYPE_CHECKING:
    from .declared import Watch
    from .replay_question import ReplayQuestion

# They would change the logged traffic.
OTHER = ("arrival", "rate", "lengths", "concurrency", "num_requests")


def as_logged(question: "ReplayQuestion", watch: "Watch") -> "tuple[ReplayQuestion, dict[str, Any]]":
    """With a step log's settings, which options override, and the run's fields that name them."""
    from ..profiler.profile import to_json
    from ..profiler.steplog import policy_of, profile_of_log, read_log
    from ..results.run_info import LoggedInfo
    from .objects import profile_name

    for name in filter(question.sets, OTHER):
        raise DsimError(f"--{name.replace('_', '-')} and --as-logged are given: expected one of them")
    if not isinstance(question.trace, str | Path):
        raise DsimError("--as-logged is given and the trace is an object, expected the file of a step log")
    log = str(question.trace)
    steps, name = read_log(log), printable(Path(log).stem)
    specs, left_out = question.specs, list[str]()
    if not specs:
        spec, left_out = policy_of(steps.header)
        specs = [spec]
        if (inside := steps.header.settings.get("policy")) is not None:
            watch.say(f"Inside the engine: {cut(inside)}; --policy replays it")
    watch.say(f"As logged: {', '.join(specs)}" + " (given; not the log's own)" * bool(question.policy))
    watch.say(*(f"Not in the policy: the log's {field}" for field in left_out))
    replayed = replace(question, policy=specs, frontend=0.0)
    if question.sets("profile"):
        watch.say(f"Profile: {question.profile}, given")
        return replayed, {"as_logged": LoggedInfo(Path(log).name, "given")}
    fitted = profile_of_log(steps, name, log)
    watch.say(f"Profile: fitted to the same log, so step prices are not a prediction ({name})")
    watch.say(*(f"The fit may be wrong: {line}" for line in fitted.doubts))
    source = LoggedInfo(Path(log).name, "fitted to the same log")
    return replace(replayed, profile=profile_name(fitted)), {"as_logged": source, "fitted_profile": to_json(fitted)}
