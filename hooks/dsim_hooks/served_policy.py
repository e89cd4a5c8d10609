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
from dsim.engine.records import table
from dsim.engine.spec import AXES, PRESETS, named_fields, named_files, parse, settings_of
from dsim.engine.view import RequestView, Snapshot, class_of

WHOLE = ("index", "slo_class", "priority", "prompt", "estimate")  # a request's numbers after arrival and deadline


def served_policy(spec, engine, header):
    """The engine's preset, as served, under the SPEC's discipline; PolicyError if the SPEC asks for anything else.

    header: the first line of a step log.
    """
    code = allowed(named_files(spec))
    policy = parse(spec, code)
    if "preset" not in header:
        raise PolicyError(f"policy {spec}: dsim has no preset of what {engine} serves here, expected one")
    preset = PRESETS[header["preset"]].policy
    for axis in AXES:
        part, kinds = getattr(policy, axis), {type(getattr(base, axis)) for base in (preset, Policy("usual"))}
        if axis != "discipline" and type(part) not in kinds:
            raise PolicyError(
                f"policy {spec}: {axis} is {type(part).__name__}, which {engine} does not do: expected a discipline, "
                f"alone or on {header['preset']}"
            )
    if not policy.discipline.questions:
        raise PolicyError(f"policy {spec}: it has no discipline, expected one that answers a question")
    served = {name: header[name] for name in ("page_size", "num_pages", "block_length", "threshold")}
    served |= header["settings"] | {"canvas_length": header["block_length"]}
    stated = settings_of(policy)
    for name in sorted(named_fields(spec, code) - vars(policy.discipline).keys()):
        if name not in served or stated[name] != served[name]:
            value = served.get(name, "its own settings")
            raise PolicyError(f"policy {spec}: {name} is {stated[name]}, and {engine} serves with {value}")
    parts = {axis: getattr(preset, axis) for axis in AXES}
    for axis, part in parts.items():
        names = {field.name for field in fields(part)} & served.keys()
        parts[axis] = replace(part, **{name: served[name] for name in names})
    return replace(preset, name=spec, **parts | {"discipline": policy.discipline})


class PolicyAsker:
    """Asks a policy's discipline for one scheduler; `num_emitted` of a subclass counts a request's tokens.

    The policy's errors are logged once and counted, and the engine's own rule decides.
    """

    def __init__(self, spec, engine, header, logger):
        self.policy = policy = served_policy(spec, engine, header)
        self.names = {"policy": spec, "dsim": __version__}  # for the step log
        self.num_errors = self._num_requests = 0
        self._engine, self._num_pages, self._logger = engine, header["num_pages"], logger
        self._fields, self._record = (table(array)[0] for array in (numbers_of(policy), record_of(policy)))
        self._ask_from = ask_from(policy.discipline)
        questions = ", ".join(sorted(policy.discipline.questions))
        logger.info("dsim %s: policy %s answers %s", __version__, spec, questions)

    def stated(self, extra, name, kind, usual):
        """A number that a request states in `extra`."""
        try:
            return kind(extra.get(name, usual))
        except Exception as error:
            self._count(error)
            return usual

    def note(self, request, extra, arrival, limit, priority, prompt):
        """Read what a new request states (README.md). arrival: s; limit, prompt: tokens."""
        deadline = arrival + self.stated(extra, "deadline", float, np.inf)
        estimate = self.stated(extra, "estimated_length", int, limit)
        slo_class = class_of(str(extra.get("slo_class", "")))
        request.dsim = (arrival, deadline, self._num_requests, slo_class, priority, prompt, estimate)
        self._num_requests += 1

    def _snapshot(self, now, waiting, running, pages_held):
        return Snapshot(
            now=now,
            num_waiting=len(waiting),
            num_running=len(running),
            num_rows=0,
            pages_held=pages_held,
            num_pages=self._num_pages,
            threshold=0,
            fields=self._fields.copy(),
            record=self._record,
            engine=tuple(functools.cache(functools.partial(self._view_of, rows, now)) for rows in (waiting, running)),
        )

    def _view_of(self, requests, now):
        numbers = np.array([request.dsim for request in requests], np.float64).reshape(-1, 2 + len(WHOLE)).T
        arrival, deadline = numbers[:2]
        whole = dict(zip(WHOLE, numbers[2:].astype(np.int64), strict=True))
        emitted = np.array([self.num_emitted(request) for request in requests], np.int64)
        return RequestView(arrival=arrival, age=now - arrival, deadline=deadline, emitted=emitted, **whole)

    def _count(self, error):
        self.num_errors += 1
        if self.num_errors == 1:
            text = "dsim: policy %s failed, and %s's own rule decides: %s"
            self._logger.error(text, self.policy.name, self._engine, error, exc_info=error)
