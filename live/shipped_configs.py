"""config.json of published checkpoints that dsim runs with random weights, by name, in shipped_configs.json.

Sources: block-diffusion.md 3, production-dllm-serving.md 1.1. SDAR's block of 32 is that of published throughput.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..files.read import read_json

CONFIGS: Mapping[str, Any] = read_json(Path(__file__).with_name("shipped_configs.json"))
