"""dLLM-Cache: prompt and response, each refreshed at its own period."""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np

from ..hooks import head_rows, held, work
from ..jit import rule
from ..part import Preset, Range
from ..state import FULL, PARTIAL, REFRESH_PROMPT, REFRESH_RESPONSE
from .llada import NoCache, script

RUN = 16  # keys; heads that keep different keys store runs


@rule
def runs(tokens: int) -> int:
    """Tokens, rounded up to whole runs."""
    return -(-tokens // RUN) * RUN


@rule
def periodic(
    prompt: int, length: int, start: int, step: int, block_step: int, block: int, fields: Any
) -> tuple[int, int, int]:
    """Prompt and response, each whole when due; else the response's most changed tokens."""
    response = length - prompt
    changed = int(np.floor(fields.transfer * response))
    keys = prompt
    if fields.prompt_keys >= 0:
        keys = min(prompt, int(fields.prompt_keys))
    if step % fields.prompt_refresh == 0:
        if step % fields.response_refresh == 0:
            return FULL, length, length
        return REFRESH_PROMPT, prompt + changed, length
    if step % fields.response_refresh == 0:
        return REFRESH_RESPONSE, response, keys + response
    return PARTIAL, changed, keys + response


@rule
def rows_of_response(prompt: int, length: int, start: int, tokens: int, block: int, fields: Any) -> int:
    """All positions in the published code; in MaskKV from the current block on."""
    if fields.all_logits:
        return length
    return length - start


@rule
def outputs_held(prompt: int, length: int, state: int, fields: Any) -> int:
    """Keys, values, outputs of attention and feed-forward."""
    return runs(prompt) + runs(length - prompt) + runs(state * length)


@dataclass(frozen=True)
class PeriodicCache(NoCache):
    """dLLM-Cache: refresh periods of prompt and response; other steps take the most changed `transfer` share (3.1).

    New values of the whole response show the changes; that projection is not counted, nor the first layer's extra work
    (latency.LatencyModel).
    """

    prompt_refresh: Annotated[int, Range(1), "steps between refreshes of the prompt, K_p"] = 50
    response_refresh: Annotated[int, Range(1), "steps between refreshes of the response, K_r"] = 7
    transfer: Annotated[float, Range(0, 1), "share of the response refreshed in between, rho"] = 0.25

    first_layer_whole = True  # as in the published code
    in_place = True
    keeps_outputs = True
    rules: ClassVar[dict[Any, Any]] = {work: periodic, head_rows: rows_of_response, held: outputs_held}
    prompt_keys = -1  # prompt keys seen by steps between refreshes; -1: all

    def numbers(self, policy: Any) -> dict[str, bool | int | float]:
        numbers = {"prompt_keys": self.prompt_keys, "first_layer_whole": self.first_layer_whole}
        return {**super().numbers(policy), "transfer": float(self.transfer), **numbers}


PRESETS = {
    "dllm-cache": Preset(
        script("dllm-cache", PeriodicCache(), "dllm-cache"),
        "prompt_refresh",
        "full-sequence: dLLM-Cache, prompt and response refreshed at their own periods",
        "dLLM-Cache (full-sequence-diffusion.md 3.1)",
    )
}
