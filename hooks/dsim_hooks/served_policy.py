"""A dsim policy inside an engine's scheduler: read as served, asked with what requests state, its errors counted."""

import functools
from dataclasses import fields, replace

import numpy as np

from dsim import __version__
from dsim.engine.allowed_code import allowed
from dsim.engine.discipline import ask_from
from dsim.engine.engine import record_of
from dsim.engine.errors import PolicyError
from dsim.engine.part import Policy, numbers_of
from dsim.engine.policy import AXES, PRESETS, named_fields, named_files, parse, settings_of
from dsim.engine.records import table
from dsim.engine.view import RequestView, Snapshot, class_of

LOGGED = 64  # requests of an answer


def served_policy(spec, engine, preset_name, served):
    """An engine's preset, as served, under the SPEC's discipline; PolicyError if the SPEC asks for anything else.

    served: the engine's settings by the policy's fields.
    """
    code = allowed(named_files(spec))
    policy = parse(spec, code)
    if preset_name not in PRESETS:
        raise PolicyError(f"policy {spec}: {engine} serves a model without a preset, expected one that dsim replays")
    preset = PRESETS[preset_name].policy
    for axis in AXES:
        part, kinds = getattr(policy, axis), {type(getattr(base, axis)) for base in (preset, Policy("usual"))}
        if axis != "discipline" and type(part) not in kinds:
            raise PolicyError(
                f"policy {spec}: {axis} is {type(part).__name__}, which {engine} does not do: expected a discipline, "
                f"alone or on {preset_name}"
            )
    if not policy.discipline.questions:
        raise PolicyError(f"policy {spec}: it has no discipline, expected one that answers a question")
    stated = settings_of(policy)
    for name in sorted(named_fields(spec, code) - vars(policy.discipline).keys()):
        if name not in served or stated[name] != served[name]:
            value = served.get(name, "its own settings")
            raise PolicyError(f"policy {spec}: {name} is {stated[name]}, and {engine} serves with {value}")
    parts = {axis: as_served(getattr(preset, axis), served) for axis in AXES}
    return replace(preset, name=spec, **parts | {"discipline": policy.discipline})


def as_served(part, served):
    """A part of a policy with the served fields."""
    return replace(part, **{field.name: served[field.name] for field in fields(part) if field.name in served})


class PolicyAsker:
    """Asks a policy's discipline for one scheduler.

    The policy's errors are logged once and counted, and the engine's own rule decides. A subclass has `view_of`, which
    returns the view of a list of the engine's requests at a time, in s.
    """

    def __init__(self, policy, engine, logger):
        self.policy, self._engine, self._logger = policy, engine, logger
        self.names = {"policy": policy.name, "dsim": __version__}  # for the step log
        self.num_errors = self._num_requests = 0
        self._fields, self._record = (table(array)[0] for array in (numbers_of(policy), record_of(policy)))
        self._ask_from = ask_from(policy.discipline)
        questions = ", ".join(sorted(policy.discipline.questions))
        logger.info("dsim %s: policy %s answers %s", __version__, policy.name, questions)

    def numbers(self, extra, arrival, limit, priority, prompt):
        """A new request's numbers for `columns`.

        extra: what it states (README.md); arrival: s; limit, prompt: tokens.
        """
        deadline, slo_class, estimate = np.inf, 0, limit
        try:
            slo_class = class_of(str(extra.get("slo_class", "")))
            estimate = int(extra.get("estimated_length", estimate))
            deadline = arrival + float(extra.get("deadline", deadline))
        except Exception as error:
            self._count(error)
        self._num_requests += 1
        return self._num_requests - 1, arrival, deadline, slo_class, priority, prompt, estimate

    def _snapshot(self, now, waiting, running, **pages):
        """What the discipline sees; pages: `pages_held` and `num_pages`."""
        return Snapshot(
            now=now,
            num_waiting=len(waiting),
            num_running=len(running),
            num_rows=0,
            threshold=0,
            fields=self._fields.copy(),
            record=self._record,
            engine=tuple(functools.cache(functools.partial(self.view_of, rows, now)) for rows in (waiting, running)),
            **pages,
        )

    def _count(self, error):
        self.num_errors += 1
        if self.num_errors == 1:
            text = "dsim: policy %s failed, and %s's own rule decides: %s"
            self._logger.error(text, self.policy.name, self._engine, error, exc_info=error)


def columns(numbers, emitted, now):
    """The view of requests; numbers: those of each, [requests]; emitted: their tokens, [requests]."""
    rows = np.array(numbers, np.float64).reshape(-1, 7).T
    index, arrival, deadline, slo_class, priority, prompt, estimate = rows
    return RequestView(
        index=index.astype(np.int64),
        arrival=arrival,
        age=now - arrival,
        slo_class=slo_class.astype(np.int64),
        deadline=deadline,
        priority=priority.astype(np.int64),
        prompt=prompt.astype(np.int64),
        estimate=estimate.astype(np.int64),
        emitted=np.array(emitted, np.int64),
    )
