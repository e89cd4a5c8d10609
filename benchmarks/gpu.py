"""The stages of benchmarks/gpu.sh, which explains them, OUT, SECONDS and the environment.

    python benchmarks/gpu.py STAGE[+STAGE ...] OUT SECONDS

A stage is a list of parts, each a command with a limit in seconds. Parts that measure no time run in parallel; a part
that measures runs alone. If a part fails or runs out of time, the next still starts. The rules by which a stage's parts
plan steps are compiled before its clock starts.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib import metadata, util
from pathlib import Path
from typing import Any

from dsim.profiler.clocks import clocks_by

ROOT = Path(__file__).resolve().parents[1]
NEEDED = ("torch", "simpy", "plotly", "optuna", "numba", "pyarrow", "safetensors", "typer")
CORES = os.cpu_count() or 1
PLAIN = {"NUMBA_DISABLE_JIT": "1"}  # compiling a policy's rules takes ten seconds, too long for a few requests
SHORT = "--lengths fixed:40,8"  # of a pretended request
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # threads that wait for each other cost most of a toy step: 94 s instead of 9
PRETENDING = PLAIN | ONE_THREAD
SHOWN = 48  # lines of a part's output on the terminal
GRACE = 12.0  # s for a part to write its files after Ctrl-C
LEAST = 5.0  # s: with less left no part starts
LEFT = re.compile(r"--seconds \S+ left out|Left out")
BUDGET = "the time left"  # in a command: the seconds left when it starts, as in 90s
PRETEND = bool(os.environ.get("PRETEND"))
PYTHON = sys.executable


@dataclass(frozen=True)
class Part:
    """A command of a stage; its output is STAGE/NAME.txt of its results."""

    name: str
    command: list[str]
    seconds: float  # limit; none in a pretended run
    cores: int = CORES  # that it may use; with all of them it runs alone
    after: tuple[str, ...] = ()  # parts that must succeed first
    shown: bool = False  # the end of its output is a result
    fine: tuple[int, ...] = (0,)  # exit codes
    environment: dict[str, str] = field(default_factory=dict)


@dataclass
class Ended:
    """How a part ended."""

    part: Part
    how: str
    seconds: float = 0.0
    code: int | None = None
    left: list[str] = field(default_factory=list)  # lines that say what it left out

    @property
    def well(self) -> bool:
        return self.how == "ok"


@dataclass(frozen=True)
class Place:
    """Where a stage works, on what, and its time limit."""

    out: Path
    stage: str
    seconds: float
    name: str  # of the profile

    @property
    def folder(self) -> Path:
        return self.out / self.stage

    def timed(self, name: str, script: list[str], seconds: float) -> "Part":
        """A script that leaves out what it cannot begin in time; its figures are STAGE/NAME.json."""
        within = ["--seconds", f"{0.75 * seconds:.0f}", "--json", str(self.folder / f"{name}.json")]
        return Part(name, [*script, *within], seconds, shown=True)

    @property
    def profile(self) -> Path:
        return Path(os.environ.get("PROFILE") or self.out / f"{self.name}.json")

    @property
    def device(self) -> str:
        return "cpu" if PRETEND else "cuda"

    @property
    def model(self) -> list[str]:
        named = os.environ.get("MODEL")
        return ["--model", named or "sdar-8b"] if named or not PRETEND else ["--random-weights", "tiny"]


def either(on_a_gpu: Any, pretending: Any) -> Any:
    return pretending if PRETEND else on_a_gpu


def words(text: str) -> list[str]:
    return text.split()


def dsim(*arguments: object) -> list[str]:
    return [PYTHON, "-m", "dsim", *map(str, arguments)]


def script(name: str, *arguments: object) -> list[str]:
    return [PYTHON, str(ROOT / "benchmarks" / name), *map(str, arguments)]


def pytest(*arguments: object) -> list[str]:
    words = ["-m", "pytest", "-m", "", *map(str, arguments), "--rootdir", str(ROOT), "-p", "no:cacheprovider"]
    return [PYTHON, *words]  # of both lanes, unless arguments choose


# ---- the stages -----------------------------------------------------------------------------------------------

BLOCKS = ("lmdeploy-bd32", "sglang-fdfo", "chunk:8", "delayed-cache-plus", "focus")
WHOLE = ("vanilla", "fast-dllm", "sparse-dllm", "maskkv", "dllm-serve")
LATE = """
import json, sys
late = {}
for folder in sys.argv[1:]:
    counts = json.load(open(f"{folder}/run.json"))["live"]["made_ready"]
    late |= {f"{folder.split('/')[-1]} {policy}": n for policy, n in counts.items() if n}
print("kernels compiled or graphs captured in measured steps:", late or "none")
sys.exit(bool(late))
"""

COMPILE = """
import sys
from dsim.live.cache import PagedCache
from dsim.live.forward import Forward
from dsim.engine.latency import LatencyModel
from dsim.benchmarks.step_shapes import Shape, measure
from dsim.profiler.measure import measure_eviction, measure_steps, open_any
loaded = open_any("tiny", "cpu")
weight = loaded.model.embedding.weight
forward = Forward(loaded.model, PagedCache(loaded.model.config, 16, 64, "cpu", weight.dtype))
if sys.argv[1] == "journal":
    measure_steps(loaded, 1.0, [], max_batch=2)
elif sys.argv[1] == "evicting":
    measure_eviction(loaded, LatencyModel(((0.0, 0.0),), 0.0), 1.0)
else:
    measure(forward, Shape(1, int(sys.argv[1]), 64), 32, 3)
"""
MEASURE = """
import json, sys
from dsim import profile
budget, samples, options = sys.argv[1:]
measured = profile(budget=float(budget.removesuffix("s")), force=True, **json.loads(options))
measured.to_frame().to_csv(samples, index=False)
print(measured)
print(*(f"Not valid: {doubt}" for doubt in measured.doubts), sep="\\n")
"""
POLICIES = ("ar", "lmdeploy-bd32", "chunk:8", "optimus", "focus")  # to validate


def measuring_rules(at: Place) -> list[Part]:
    """Compile the rules that plan a profile's steps, in parallel: one by one takes a minute."""
    return [
        Part(f"compile-{what}", [PYTHON, "-c", COMPILE, what], 90, 1, environment=ONE_THREAD)
        for what in ("1", "8", "32", "journal", "evicting")
    ]


def validated_rules(at: Place) -> list[Part]:
    """The same for the validated policies, in the twin and on a device."""
    few = words("azure-conv --arrival poisson --rate 20 --lengths lognormal:96,48,64,32 --num-requests 4 --policy")
    made = at.folder / "tiny.json"  # its draws decide what commits, and optimus chooses positions by its prices
    tiny = words("--random-weights tiny --device cpu")
    profile = dsim("profile", *tiny, *words("--budget 8s --max-batch 8 --yields a100-sdar-8b --force -o"), made)
    live = dsim("live", *tiny, "--profile", made)
    parts = [
        Part("tiny-profile", profile, 90, 1, fine=(0, 1)),
        *(Part(f"compile-twin-{policy}", dsim("replay", *few, policy), 90, 1) for policy in POLICIES),
        *(Part(f"compile-live-{policy}", [*live, *few, policy], 90, 1, ("tiny-profile",)) for policy in POLICIES),
    ]
    return [replace(part, environment=ONE_THREAD) for part in parts]


def smoke(at: Place) -> list[Part]:
    """Every path, in parallel: kernels compile longest, and no time is measured."""
    few = ["azure-conv", *words("--arrival poisson --rate 20 --force --device"), at.device]
    few += words(either("--lengths lognormal:96,48,64,32 --num-requests 12", f"{SHORT} --num-requests 2"))
    # On a GPU kernels compile in parallel; on a CPU a process takes longer to start than to serve.
    whole = either([(policy,) for policy in WHOLE], [WHOLE])
    executor = ROOT / either("tests/live/test_gpu.py", "tests/kernels/test_in_the_executor.py")
    once = either(["-m", "gpu"], ["-k", "forwards"])  # under Triton's interpreter

    def served(name: str, seconds: float, policies: tuple[str, ...], *options: str, model: str = "tiny") -> Part:
        chosen = [word for policy in policies for word in ("--policy", policy)]
        command = dsim("live", *few, "--model", model, *options, *chosen, "-o", at.folder / name)
        return Part(name, command, seconds, 1, environment=PLAIN)

    runs = [
        served("graphs", 120, (*BLOCKS[:4], "ar"), "--graphs"),
        served("graphs-evicting", 120, BLOCKS[4:], "--graphs"),
        served("eager", 120, (*BLOCKS, "ar"), "--no-graphs"),
        *(served(f"whole-{policies[0]}", 150, policies, model="tiny-both-ways") for policies in whole),
    ]
    made = at.folder / "profile.json"
    tiny = [either("--model", "--random-weights"), "tiny", "--device", at.device]
    borrowed = ["--yields", "a100-sdar-8b"]  # so short a profile may not see enough masks for FOCUS
    # With so short a budget a profile doubts itself, and dsim profile ends with 1.
    budget = ["--budget", either("20s", "6s")]
    profile = dsim("profile", *tiny, *budget, *borrowed, *words("--max-batch 8 --force -o"), made)
    within = either("--budget 20s --lengths lognormal:96,48,64,32", f"--budget 1h --seconds 1 {SHORT}")
    validate = dsim(
        "validate", *tiny, "--profile", made, *words(within),
        *words("--policy lmdeploy-bd32 --policy focus --load 0.5 --seed 1"),
        "-o", at.folder / "validation",
    )  # fmt: skip
    ready = [PYTHON, "-c", LATE, *(str(at.folder / run.name) for run in runs)]
    return [
        Part("executor", pytest(executor, *once), 150, 1),
        Part("profile", profile, 120, 1, fine=(0, 1)),
        *runs,
        Part("validate", validate, 120, 1, ("profile",)),
        Part("ready", ready, 20, 1, tuple(run.name for run in runs), shown=True),
    ]


def tests(at: Place) -> list[Part]:
    """Kernels against their references and the executor on the device, then kernels under compute-sanitizer."""
    beside = ["-n", str(min(8, CORES)), "--dist", "worksteal"] if CORES > 2 and util.find_spec("xdist") else []
    asked = either([ROOT / "tests/kernels", ROOT / "tests/live"], [ROOT / "tests/kernels/test_read_logits.py"])
    names = either(("confidence", "qk_norm_rope", "read_logits", "grouped_experts"), ("read_logits",))
    files = [ROOT / f"tests/kernels/test_{name}.py" for name in names]
    # Memory straight from the driver: a read past a tensor is then past an allocation.
    alone = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}

    def under(tool: str) -> list[str]:
        watched = pytest(*files, "-x", *either(["-m", "gpu", "-k", "not any_"], []))
        return [*words(f"compute-sanitizer --tool {tool} --target-processes all --error-exitcode 9"), *watched]

    sanitized = [Part(tool, under(tool), 110, 2, shown=True, environment=alone) for tool in ("memcheck", "racecheck")]
    return [Part("tests", pytest(*asked, *either(["-m", "gpu"], []), *beside), 300, shown=True), *either(sanitized, [])]


def kernels(at: Place) -> list[Part]:
    """Those that no device ran come first; then whole steps."""
    tune = words(os.environ.get("TUNE", ""))
    small = either([], ["--smoke", "--only", "elementwise"])
    return [
        at.timed("kernels", script("kernel_ceilings.py", *tune, *small), 180),
        at.timed("steps", script("step_floors.py", *at.model), 90),
    ]


def profile(at: Place) -> list[Part]:
    [option, model] = at.model
    chosen: dict[str, Any] = {"random_weights" if option == "--random-weights" else "model": model, "device": at.device}
    graphs = {"--graphs": True, "--no-graphs": False, "": None}[os.environ.get("GRAPHS", "")]
    chosen |= {"graphs": graphs, "yields": "a100-sdar-8b", "max_batch": either(256, 8), "out": str(at.profile)}
    command = [
        PYTHON, "-c", MEASURE, either(BUDGET, "6s"), str(at.folder / "steps.csv"), json.dumps(chosen),
    ]  # fmt: skip
    return [Part("profile", command, at.seconds, shown=True)]


def validate(at: Place) -> list[Part]:
    """With other traffic than the profile's: a trace's lengths, and another seed."""
    asked = [word for policy in POLICIES for word in ("--policy", policy)]
    few = words(f"{SHORT} --policy lmdeploy-bd32 --policy focus --load 4 --load 0.5 --seconds 0")
    command = dsim(
        "validate", *at.model, "--device", at.device, "--profile", at.profile,
        "--budget", either(BUDGET, "1h"), *words(os.environ.get("GRAPHS", "")),
        *words("--trace azure-conv --seed 1 --bound e2el=3% --bound tpot=3%"),
        *either(["--bound", "ttft=10%", "--lengths", "sharegpt", *asked], few), "-o", at.folder / "validation",
    )  # fmt: skip
    return [Part("validate", command, at.seconds, shown=True, fine=(0, 1))]


def breakdown(at: Place) -> list[Part]:
    return [at.timed("breakdown", script("breakdown.py", *at.model), 80)]


def canvases(at: Place) -> list[Part]:
    """Steps with random weights: canvases, and experts."""
    mini = either(["--random-weights", "llada2-mini"], [])
    return [
        at.timed("canvas", script("canvas_step.py"), 110),
        at.timed("llada2-mini", script("step_floors.py", *mini), 80),
        at.timed("mini-breakdown", script("breakdown.py", *mini), 60),
    ]


def caches(at: Place) -> list[Part]:
    loads = either(
        "--lengths lognormal:400,200,96,32 --policy fast-dllm --policy sparse-dllm --policy maskkv "
        "--policy dllm-serve,max_batch=16 --load 0.4 --load 0.7",
        "--lengths lognormal:96,48,64,32 --policy fast-dllm --load 0.5",
    )
    command = dsim(
        "validate", *at.model, "--device", at.device, "--budget", either(BUDGET, "60s"),
        "--seed", 1, *words(loads), "-o", at.folder / "caches",
    )  # fmt: skip
    return [Part("caches", command, at.seconds, shown=True, fine=(0, 1))]


STAGES: dict[str, Callable[[Place], list[Part]]] = {
    "smoke": smoke, "tests": tests, "breakdown": breakdown, "profile": profile, "validate": validate,
    "kernels": kernels, "canvases": canvases, "caches": caches,
}  # fmt: skip
RULES: dict[str, Callable[[Place], list[Part]]] = {"profile": measuring_rules, "validate": validated_rules}


# ---- running them ---------------------------------------------------------------------------------------------


class Running:
    """A part that has started."""

    def __init__(self, part: Part, folder: Path, limit: float | None) -> None:
        self.part, self.begin, self.limit = part, time.monotonic(), limit
        self.path = folder / f"{part.name}.txt"
        self._file = self.path.open("wb")
        left = f"{max(LEAST, (limit or 0.0) - GRACE):.0f}s"
        command = [left if word == BUDGET else word for word in part.command]
        self._process = subprocess.Popen(
            command, stdout=self._file, stderr=subprocess.STDOUT, start_new_session=True,
            env=os.environ | (PRETENDING if PRETEND else {}) | part.environment,
        )  # fmt: skip
        self._interrupted = False

    def ended(self) -> Ended | None:
        """How it ended, if it did; out of time it is interrupted, then killed."""
        code, took = self._process.poll(), time.monotonic() - self.begin
        if code is None:
            if self.limit is not None and took > self.limit and not self._interrupted:
                self._interrupted = True
                self.end(signal.SIGINT)
            elif self.limit is not None and took > self.limit + GRACE:
                self.end(signal.SIGKILL)
            return None
        self._file.close()
        how = "out of time" if self._interrupted else "ok" if code in self.part.fine else "FAILED"
        said = self.path.read_text(errors="replace").splitlines()
        return Ended(self.part, how, took, code, [line for line in said if LEFT.match(line)])

    def end(self, kind: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, kind)  # and its children: it leads its session

    def tail(self, count: int) -> str:
        return "\n".join(self.path.read_text(errors="replace").splitlines()[-count:])


def run(parts: list[Part], place: Place) -> list[Ended]:
    """Run a stage's parts in order, in parallel where cores suffice."""
    deadline = time.monotonic() + place.seconds - GRACE
    waiting, running, ended = list(parts), list[Running](), dict[str, Ended]()
    try:
        _run(waiting, running, ended, place, deadline)
    finally:  # also on Ctrl-C
        for left in running:
            left.end(signal.SIGKILL)
    return [ended[part.name] for part in parts]


def _run(
    waiting: list[Part], running: list[Running], ended: dict[str, Ended], place: Place, deadline: float
) -> None:  # fmt: skip
    while waiting or running:
        for now in list(running):
            if (how := now.ended()) is not None:
                running.remove(now)
                ended[now.part.name] = how
                print(f"{now.part.name}: {how.how}, {how.seconds:.0f} s", flush=True)
                if not how.well or now.part.shown:
                    print(now.tail(SHOWN if now.part.shown else 8), flush=True)
        for part in list(waiting):
            before = [ended.get(name) for name in part.after]
            left = deadline - time.monotonic()
            if any(how is not None and not how.well for how in before):
                ended[part.name] = Ended(part, "not run")
            elif not PRETEND and left < LEAST:
                ended[part.name] = Ended(part, "no time left")
            elif None in before:
                continue
            elif running and sum(r.part.cores for r in running) + part.cores > CORES:
                break
            else:
                running.append(Running(part, place.folder, None if PRETEND else min(part.seconds, left)))
            waiting.remove(part)
        time.sleep(0.1)


def driver() -> dict[str, str]:
    """As reported by nvidia-smi."""
    try:
        asked = ["nvidia-smi", "--query-gpu=name,driver_version,power.limit,clocks.max.sm", "--format=csv,noheader"]
        line = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=30).stdout.splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return {"device": "none" if PRETEND else "unknown"}
    return dict(
        zip(
            ("device", "driver", "power_limit", "clock_limit"), (word.strip() for word in line.split(",")), strict=False
        )
    )


def about() -> dict[str, Any]:
    """The machine and its software versions."""
    versions = {name: metadata.version(name) for name in ("torch", "triton", "numpy") if util.find_spec(name)}
    return {**driver(), "cores": CORES, "python": sys.version.split()[0], **versions}


def short_name(device: str) -> str:
    """A profile's name for a device: "h100" for "NVIDIA H100 80GB HBM3"."""
    found = re.search(r"\b([A-Z]+\d+[A-Z]*)\b", device)
    return (found[1] if found else "gpu").lower()


def of_parts() -> float:
    """Processor time (s) of the parts that ended, with their children."""
    found = os.times()
    return found.children_user + found.children_system


def of_part(how: Ended) -> dict[str, Any]:
    """As in a stage's record. left: the lines that say what a part left out."""
    return {
        "name": how.part.name, "ended": how.how, "seconds": round(how.seconds, 1), "code": how.code, "left": how.left,
    }  # fmt: skip


def pack(place: Place, record: dict[str, Any]) -> None:
    """Put a stage's results into one file, without the pages that its runs' files can be made into again."""
    (place.folder / "stage.json").write_text(json.dumps(record, indent=1) + "\n")
    with tarfile.open(place.out / f"{place.stage}.tar.gz", "w:gz") as packed:
        packed.add(place.folder, place.stage, filter=lambda member: None if member.name.endswith(".html") else member)
    shutil.rmtree(place.folder)


def table(ended: list[Ended]) -> str:
    width = max(len(how.part.name) for how in ended)
    return "\n".join(f"{how.part.name:{width}}  {how.how:12} {how.seconds:6.0f} s" for how in ended)


def main() -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # `timeout` then acts as Ctrl-C does
    if len(sys.argv) != 4 or not set(sys.argv[1].split("+")) <= set(STAGES):
        print(
            f"expected STAGE OUT SECONDS, STAGE of {', '.join(STAGES)} joined by +; found {sys.argv[1:]}",
            file=sys.stderr,
        )
        return 2
    missing = [module for module in NEEDED if not util.find_spec(module)]
    if missing:
        print(f"not installed: {', '.join(missing)} (put their wheels into a folder and set WHEELS)", file=sys.stderr)
        return 2
    stages, out, seconds = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])
    begin, where = time.monotonic(), about()
    print("Pretending: no figure of this stage means anything" if PRETEND else where, flush=True)
    name = os.environ.get("NAME") or f"{short_name(where['device'])}-sdar-8b-measured"
    clocks, over = clocks_by(lambda nvml: nvml.nvmlDeviceGetHandleByIndex(0)), threading.Event()

    def watch() -> None:
        while not over.wait(0.25):
            clocks.sample()

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    failed = []
    for stage in stages.split("+"):
        place = Place(out, stage, seconds, name)
        place.folder.mkdir(parents=True, exist_ok=True)
        # A pretended stage runs its rules as Python.
        rules = RULES[stage](place) if stage in RULES and not PRETEND else []
        compiled = run(rules, replace(place, seconds=seconds - (time.monotonic() - begin)))
        place = replace(place, seconds=seconds - (time.monotonic() - begin))
        first, started, spent = len(clocks.samples), time.monotonic(), of_parts()
        ended = run(STAGES[stage](place), place)
        found = {
            "schema": 1, "stage": stage, "pretended": PRETEND, **where, "seconds": round(time.monotonic() - started, 1),
            "cpu_seconds": round(of_parts() - spent, 1), "state": clocks.state(first),
            "rules": list(map(of_part, compiled)), "parts": list(map(of_part, ended)),
        }  # fmt: skip
        pack(place, found)
        failed += [how for how in (*compiled, *ended) if not how.well]
        print(table([*compiled, *ended]))
        print(f"{stage}: {found['seconds']:.0f} s, {found['cpu_seconds']:.0f} s of processors")
        print(f"{where['device']}: {clocks}" if clocks.samples else where["device"], flush=True)
    over.set()
    print(f"Wrote {out}/")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
