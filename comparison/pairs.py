"""A pair of runs, predicted and measured: where their numbers come from, and which requests they share."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..engine.errors import DsimError, PolicyError
from ..files.read import cut
from ..results.metrics import CANCELLED, COMPLETED, Floats
from ..results.run import Columns, Run
from .error_parts import per_request
from .steps import Ints

UNKNOWN = "unknown"
SAME_ARRIVAL = 1e-6  # s: smaller differences are rounding
CLOSE = {"arrival": 0.01}  # s: a smaller difference is a note, a larger an error


@dataclass(frozen=True)
class Side:
    """Where a run's numbers come from."""

    folder: str
    driver: str  # twin, live or client
    device: str
    model: str  # and its weights, if derived
    profile: str  # empty: a live run without one
    estimated: bool  # the profile is not measured
    doubts: tuple[str, ...]  # of the profile: failed checks and doubted kinds of steps
    commits: str  # twin: the profile's draws; model: the weights; server: unknown
    interrupted: bool

    @classmethod
    def of(cls, run: Run) -> "Side":
        info = run.info
        machine = info.live or info.profile
        device, model, profile = UNKNOWN, UNKNOWN, ""
        if machine is not None:
            device, model = machine.device, machine.model
        if info.live is not None and info.live.weights:
            model += f" ({info.live.weights})"
        if info.profile is not None:
            profile = info.profile.name
        return cls(
            folder=str(run.folder),
            driver=info.driver,
            device=device,
            model=model,
            profile=profile,
            estimated=info.profile is None or info.profile.estimated,
            doubts=tuple(f"DOUBTED: {line}" for line in info.doubted),
            commits=info.commits,
            interrupted=info.interrupted,
        )

    @property
    def kind(self) -> str:
        return {"live": "a live run", "client": "a client's"}.get(self.driver, "a twin's")


@dataclass(frozen=True)
class Pair:
    predicted: Side
    measured: Side

    @classmethod
    def of(cls, predicted: Run, measured: Run) -> "Pair":
        return cls(Side.of(predicted), Side.of(measured))


@dataclass(frozen=True, eq=False)
class PolicyRuns:
    """A policy's requests in both runs of a pair; DsimError if they differ."""

    policy: str
    predicted: Run
    measured: Run

    @property
    def both(self) -> tuple[Run, Run]:
        return self.predicted, self.measured

    @cached_property
    def requests(self) -> tuple[Columns, Columns]:
        return self.predicted.requests(self.policy), self.measured.requests(self.policy)

    @property
    def index(self) -> Ints:
        """The common requests."""
        return self._common[0]

    @cached_property
    def _common(self) -> tuple[Ints, Columns, Columns]:
        """The common requests, and their columns in both runs."""
        p, m = self.requests
        index, i, j = np.intersect1d(p["request"], m["request"], return_indices=True)
        return (
            index.astype(np.int64),
            {name: column[i] for name, column in p.items()},
            {name: column[j] for name, column in m.items()},
        )

    @cached_property
    def values(self) -> dict[str, tuple[Floats, Floats]]:
        """Latencies (s) of the common requests by metric; NaN if not completed."""
        p, m = (per_request(columns, self.index) for columns in self.requests)
        return {name: (p[name], m[name]) for name in p}

    @property
    def left_out(self) -> dict[str, int]:
        """Requests by reason."""
        index, p, m = self._common
        done = (p["status"] == COMPLETED) & (m["status"] == COMPLETED)
        total = sum(len(columns["request"]) for columns in self.requests)
        return {"not completed in both": int((~done).sum()), "not arrived in both": total - 2 * len(index)}

    @property
    def differences(self) -> list[str]:
        """A note on differences of arrivals that clocks explain; DsimError for others."""
        p_run, m_run = self.both
        lengths = [len(columns["request"]) for columns in self.requests]
        clients = any(map(is_client, self.both))
        partial = clients or any(run.info.interrupted for run in self.both)
        if lengths[0] != lengths[1] and not partial:
            raise DsimError(
                f"{p_run.folder} holds {lengths[0]} requests of {cut(self.policy)}, {m_run.folder} holds {lengths[1]}: "
                "expected two runs of the same trace"
            )
        index, p, m = self._common
        if not len(index):
            raise DsimError(f"{p_run.folder} and {m_run.folder} share no request of {cut(self.policy)}")
        # A live request's limit, which an EOS may undercut.
        tokens = np.minimum(np.abs(p["output_length"] - m["output_length"]), np.abs(_returned(p) - _returned(m)))
        distances = {"output_length": tokens}
        if not clients:  # a server may count otherwise; the import warns
            distances |= {name: np.abs(p[name] - m[name]) for name in ("input_length", "max_tokens")}
        if not p_run.info.closed_loop:  # there arrivals follow from latencies
            late = p["arrival"] - m["arrival"]
            distances["arrival"] = np.abs(late - clients * late[0])  # a client's clock has no zero
        for name, distance in distances.items():
            different = np.flatnonzero(distance > CLOSE.get(name, 0))
            if len(different):
                k = different[0]
                raise DsimError(
                    f"request {index[k]} has {name} {p[name][k]:g} in {p_run.folder} and {m[name][k]:g} in "
                    f"{m_run.folder}: expected two runs of the same trace (dsim import FILE --trace T)"
                )
        off = distances.get("arrival", np.zeros(1))
        num = int((off > SAME_ARRIVAL).sum())
        if not num:
            return []
        distance = f"by at most {1e3 * off.max():.3g} ms"
        return [f"{self.policy}: {num} of {len(index)} arrivals differ in the two runs, {distance}"]

    @property
    def unpaired(self) -> str:
        """Why commits differ by chance, so that requests are not paired; empty if they are drawn alike."""
        if _commits_tokens(self.predicted, self.policy):
            return ""
        for run in self.both:
            if is_client(run):
                return f"it is unknown what decided the commits of {run.folder}"
            if run.info.commits == "model":
                return f"the weights decided the commits of {run.folder}"
        p_seed, m_seed = (run.info.seed for run in self.both)
        if p_seed == m_seed:
            return ""
        return f"commits were drawn with seed {p_seed} and with seed {m_seed}"

    @property
    def no_parts(self) -> str:
        """Why the error cannot be decomposed, or empty."""
        predicted = Side.of(self.predicted)
        if predicted.driver != "twin":
            return f"{predicted.folder} is {predicted.kind}: there is no prediction to take apart"
        if self.predicted.policy(self.policy).eviction.by_importance:
            return "re-runs do not evict tokens, as its policy does"
        for run, requests in zip(self.both, self.requests, strict=True):
            if not self.has_steps(run):
                return f"{run.folder} has no step journal"
            if (requests["status"] == CANCELLED).any():
                return f"clients of {run.folder} cancelled requests, and re-runs serve all of them"
        if self.predicted.info.closed_loop:
            return "in a closed loop arrivals follow from latencies"
        return ""

    def has_steps(self, run: Run) -> bool:
        return next(run.step_batches(self.policy, ["step"]), None) is not None


def _returned(requests: Columns) -> Floats:
    """Tokens returned by each request; if it is unfinished, requested."""
    done = requests["status"] == COMPLETED
    return np.asarray(np.where(done, requests["num_tokens"], requests["output_length"]), np.float64)


def _commits_tokens(run: Run, policy: str) -> bool:
    """Whether a policy commits next tokens; False for a client's unknown one."""
    try:
        return run.policy(policy).rows.commits == "tokens"
    except PolicyError:
        return False


def is_client(run: Run) -> bool:
    return run.info.driver == "client"


def check_pair(p: Run, m: Run) -> None:
    """DsimError unless the runs can be of the same requests, model and device."""
    sides = Pair.of(p, m)
    if sides.predicted.driver != "twin" and sides.measured.driver == "twin":
        raise DsimError(
            f"{p.folder} is {sides.predicted.kind} and {m.folder} a twin's: expected PREDICTED before MEASURED"
        )
    if not set(p.policies) & set(m.policies):
        raise DsimError(
            f"{p.folder} holds policies {cut(', '.join(p.policies))}, {m.folder} holds {cut(', '.join(m.policies))}: "
            "expected at least one in both"
        )
    # Random weights take the time of the model's own.
    same = {
        "model": [side.model.partition(" (random")[0] for side in vars(sides).values()],
        "device": [sides.predicted.device, sides.measured.device],
    }
    options = ["closed_loop"]
    if not (is_client(p) or is_client(m)):  # a server's are unknown
        options += ["emit", "replicas"]
    same |= {name: [getattr(run.info, name) for run in (p, m)] for name in options}
    for name, (x, y) in same.items():
        if x != y and UNKNOWN not in (x, y):
            raise DsimError(f"{name} is {cut(x)} in {p.folder} and {cut(y)} in {m.folder}: expected the same")
