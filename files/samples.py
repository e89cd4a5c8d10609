"""The samples of a server's page of metrics (Prometheus text)."""

import math
import re
from collections import defaultdict
from pathlib import Path

from ..engine.errors import DsimError
from .read import cut, quoted, read_text

# Of one engine's ranks but the first, which speaks for all.
RANK = re.compile(r'^.*[{,](?:tp|pp|moe_ep)_rank="[^0].*\n', re.MULTILINE)
_SAMPLE = re.compile(r"([A-Za-z_:][A-Za-z0-9_:]*)(?:\{.*\})?\s+(\S+)(?:\s+-?\d+)?(?:\s+# .*)?")


def read_samples(path: str | Path) -> dict[str, float]:
    """One model's samples summed over labels; DsimError names file and line."""
    text = RANK.sub("", read_text(path))
    if len(models := set(re.findall(r'[{,]model_name="([^"]*)"', text))) > 1:
        raise DsimError(
            f"{path}: holds the metrics of {len(models)} models ({cut(', '.join(sorted(models)))}), expected one"
        )
    samples: dict[str, float] = defaultdict(float)
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        sample = _SAMPLE.fullmatch(line.strip())
        try:
            value = float(sample[2]) if sample else math.nan
        except ValueError:
            value, sample = math.nan, None
        if sample is None:
            raise DsimError(f"{path}:{number}: is {quoted(line)}, expected a Prometheus sample: name{{labels}} value")
        samples[sample[1]] += value
    if not any(":" in name for name in samples):
        raise DsimError(f"{path}: holds no metrics of an engine, expected vllm:*, sglang:* or lmdeploy:*")
    return dict(samples)
