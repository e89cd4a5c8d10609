"""What a step yields: the commit model, a keyed chance for every masked position that a step computes.

A masked position at distance d from the frontier (the first mask of its block) passes the confidence threshold when
its draw u satisfies  odds[d] * theta * (1 - u) / u > 1 , that is with probability  odds * theta / (1 + odds * theta).
theta is the product of a factor of the request, of the block, of the step (all log-normal) and of how full the block
is. The left-hand side plays the confidence's part: when nothing passes, the greatest commits (at least one commit
whenever a mask is computed; LMDeploy's low_confidence_dynamic).
"""

from dataclasses import dataclass, replace

from .errors import ProfileError


@dataclass(frozen=True)
class CommitModel:
    """How likely computed masks commit, for one workload, checkpoint block size, threshold and temperature."""

    workload: str
    block_length: int
    threshold: float  # unmasking confidence
    temperature: float | None  # None: not stated by the source
    pass_probability: tuple[float, ...]  # [block_length], at distance d from the frontier, of a typical request
    request_spread: float = 0.0  # standard deviation of the log-odds between requests
    block_spread: float = 0.0  # ... between the blocks of a request
    step_spread: float = 0.0  # ... between the steps of a block
    stage_gain: float = 0.0  # log-odds gained from an empty to a full block
    padding_share: float = 0.0  # share of a request's blocks, its last, that are padding: each commits whole at once
    source: str = ""
    extrapolated_from: int | None = None  # the block size that was fitted, where it is another

    def for_block(self, block_length: int) -> "CommitModel":
        """The same model at another block size, marked as extrapolated: nothing was fitted there."""
        if block_length == self.block_length:
            return self
        known = self.pass_probability
        tail = known[-1] / known[-2] if len(known) > 1 and known[-2] > 0 else 1.0
        table = list(known[:block_length])
        while len(table) < block_length:
            table.append(table[-1] * tail)
        return replace(
            self, block_length=block_length, pass_probability=tuple(table), extrapolated_from=self.block_length
        )


def choose(
    models: tuple[CommitModel, ...],
    where: str,
    workload: str | None,
    block_length: int,
    threshold: float,
    temperature: float | None = None,
) -> CommitModel:
    """The profile's commit model for a run, or a ProfileError that lists what the profile holds."""
    if not models:
        raise ProfileError(f"{where} holds no commit model: it can run `ar` only")
    wanted = workload or models[0].workload
    of_workload = [m for m in models if m.workload == wanted]
    if not of_workload:
        names = ", ".join(dict.fromkeys(m.workload for m in models))
        raise ProfileError(f"{where} holds commit models for workloads {names}; this run asks for {wanted}")
    at_threshold = [m for m in of_workload if abs(m.threshold - threshold) < 1e-9]
    if not at_threshold:
        held = ", ".join(f"{t:.2f}" for t in sorted({m.threshold for m in of_workload}))
        raise ProfileError(
            f"{where} holds commit models for {wanted} at thresholds {held}; this run asks for {threshold:.2f}"
        )
    if temperature is not None:
        held = ", ".join(str(m.temperature) for m in at_threshold)
        at_threshold = [m for m in at_threshold if m.temperature == temperature]
        if not at_threshold:
            raise ProfileError(
                f"{where} holds commit models for {wanted} at temperatures {held}; this run asks for {temperature}"
            )
    exact = [m for m in at_threshold if m.block_length == block_length]
    if exact:
        return exact[0]
    # The nearest fitted block size, the larger of two equally near.
    nearest = min(at_threshold, key=lambda m: (abs(m.block_length - block_length), -m.block_length))
    return nearest.for_block(block_length)
