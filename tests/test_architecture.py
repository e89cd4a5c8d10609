"""The house's table of who may import whom, held against every import statement in the tree."""

import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import dsim

from .checks import cases

ROOT = Path(dsim.__file__).parent
# Folder: the folders it may import besides itself. The top of the package is __version__ alone.
ALLOWED = """
engine     -
files      engine
traces     engine files
kernels    -
profiler   engine files
sim        engine files profiler traces
live       engine files kernels
results    engine files live profiler sim traces
report     engine files profiler results
comparison engine files profiler report results sim traces
planner    comparison engine files profiler report results sim traces
following  engine files planner profiler report results sim traces
serve      engine files live planner profiler report results sim traces
"""
MAY_IMPORT = {folder: {*others} - {"-"} for folder, *others in map(str.split, ALLOWED.strip().splitlines())}
MAY_IMPORT["cli"] = {*MAY_IMPORT}
# Modules with a licence of their own: the one that measures a device, and those that run and validate on it.
EXCEPTIONS = {"profiler.measure": {"live"}}
ONLY_IN = {
    "simpy": {"sim"}, "torch": {"live", "kernels"}, "triton": {"live", "kernels"}, "typer": {"cli"},
    "rich": {"cli", "report"}, "plotly": {"report"}, "starlette": {"serve"}, "uvicorn": {"serve"},
    "prometheus_client": {"files", "following", "serve"},
}  # fmt: skip
# What would bring a clock, a device, the environment or hidden randomness into the engine.
NOT_IN_ENGINE = {
    "asyncio", "datetime", "multiprocessing", "os", "random", "secrets", "socket", "subprocess", "threading", "time",
    "uuid",
}  # fmt: skip


def modules() -> dict[str, Path]:
    """Every module of the folders above, by its dotted name."""
    found = {}
    for folder in MAY_IMPORT:
        for path in sorted((ROOT / folder).rglob("*.py")):
            found[".".join(path.relative_to(ROOT).with_suffix("").parts)] = path
    return found


MODULES = modules()


@cache
def tree(module: str) -> ast.Module:
    """What a module says."""
    return ast.parse(MODULES[module].read_text())


def imports(module: str) -> Iterator[str]:
    """The absolute names that a module imports, wherever it does: `dsim.engine.engine`, `numpy.typing` ...

    A page's function names the type of its result, which is made above it: imports for type checkers do not count.
    """
    package = ["dsim", *module.split(".")[:-1]]
    for_types = {id(node) for block in ast.walk(tree(module)) for node in _for_types(block)}
    for node in ast.walk(tree(module)):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            yield from (".".join([*base, *filter(None, [node.module]), alias.name]) for alias in node.names)


def _for_types(block: ast.AST) -> list[ast.stmt]:
    """What an `if TYPE_CHECKING` holds."""
    is_for_types = isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
    return block.body if isinstance(block, ast.If) and is_for_types else []


def folders(module: str) -> set[str]:
    """The folders of ours that a module imports from, its own left out."""
    found = {name.split(".")[1] for name in imports(module) if name.startswith("dsim.")}
    return found - {module.split(".")[0], "__version__"}


def test_the_table_speaks_of_every_folder_and_file_there_is() -> None:
    assert ({path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests"}) <= set(MAY_IMPORT)


def test_an_installation_has_every_package() -> None:
    folders = {path.parent for folder in MAY_IMPORT for path in (ROOT / folder).rglob("__init__.py")} | {ROOT}
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    # The others hold data.
    listed = [name for name in listed if ROOT.joinpath(*name.split(".")[1:], "__init__.py").is_file()]
    assert sorted(listed) == sorted(".".join(("dsim", *folder.relative_to(ROOT).parts)) for folder in folders)
    assert {path.name for path in ROOT.glob("*.py")} == {"__init__.py", "__main__.py", "fleet.py", "policy.py"}
    assert {"engine.engine", "sim.twin", "live.device_loop", "cli.replay_question"} <= set(MODULES)


def test_imports_are_read_as_python_reads_them() -> None:
    assert {"dsim.engine.engine.Engine", "simpy", "dsim.sim.clock.Clock"} <= set(imports("sim.replica"))
    assert "dsim.results.run_folder.RunWriter" in set(imports("planner.record"))  # inside a function
    assert folders("sim.setting") == {"engine", "profiler", "traces"}


@cases("folder", *MAY_IMPORT)
def test_a_folder_imports_only_what_the_table_allows(folder: str) -> None:
    for module in MODULES:
        if module.split(".")[0] == folder:
            extra = folders(module) - MAY_IMPORT[folder] - EXCEPTIONS.get(module, set())
            assert not extra, f"{module} imports {', '.join(extra)}"


def test_no_files_import_each_other_in_a_circle_and_a_name_stands_once() -> None:
    TopologicalSorter({name: _files(name) for name in MODULES}).prepare()
    names = Counter(path.name for path in MODULES.values() if path.name != "__init__.py")
    assert [name for name, num in names.items() if num > 1] == []


def _files(module: str) -> set[str]:
    """The files that a module imports."""
    places = {name.removeprefix("dsim.") for name in imports(module)}
    return {place if place in MODULES else place.rpartition(".")[0] for place in places} & set(MODULES) - {module}


def test_devices_simulation_and_screens_stay_in_their_folders() -> None:
    for module in MODULES:
        for name in imports(module):
            homes = ONLY_IN.get(name.split(".")[0])
            if homes is not None and module not in EXCEPTIONS:
                assert module.split(".")[0] in homes, f"{module} imports {name}"


def test_the_engine_has_no_clock_no_device_and_no_hidden_randomness_and_needs_only_what_is_standard() -> None:
    allowed = {"dsim", "numpy", "numba"} | set(sys.stdlib_module_names) - NOT_IN_ENGINE
    for module in MODULES:
        if not module.startswith("engine."):
            continue
        named = {name.split(".")[0] for name in imports(module)}
        assert named <= allowed, f"{module} imports {named - allowed}"
        for node in ast.walk(tree(module)):
            # numpy.random by way of np.
            assert not (isinstance(node, ast.Attribute) and node.attr == "random"), f"{module}:{node.lineno}"


@cases(
    "imported never",
    ("dsim.serve.app, dsim.serve.open", ["torch", "triton", "plotly"]),
    ("dsim.live.device_loop", ["simpy", "dsim.sim", "pandas"]),
    ("dsim.engine.engine", ["simpy", "pandas", "scipy.stats", "dsim.traces", "dsim.profiler"]),
    (
        "dsim.sim.twin, dsim.planner.record",
        ["torch", "triton", "dsim.live", "plotly", "scipy.special", "scipy.stats", "scipy.optimize"],
    ),
)
def test_importing_a_part_does_not_load_what_it_must_not(imported: str, never: list[str]) -> None:
    code = f"import {imported}, sys; print(' '.join(n for n in {never} if n in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


SYSTEMS = re.compile(r"lmdeploy|sglang|optimus|focus|fast_?dllm|dllm_?(cache|serve)|sparse_?dllm|mask_?kv|vllm", re.I)
KNOW_NO_SYSTEM = (
    *(p for p in (ROOT / "engine").glob("*.py")), *(ROOT / "sim").glob("*.py"), ROOT / "planner/space.py",
    ROOT / "planner/quality.py", ROOT / "planner/tune.py", ROOT / "profiler/measure.py",
    ROOT / "live/session.py",
)  # fmt: skip
# A key of the profile's file.
NAMED_BY_FILES = {"focus"}


@pytest.mark.parametrize("path", KNOW_NO_SYSTEM, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_a_system_is_named_in_its_own_policy_file_alone(path: Path) -> None:
    tree = ast.parse(path.read_text())
    names = [n.id for n in ast.walk(tree) if isinstance(n, ast.Name)]
    names += [n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names += [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.append(node.name)
    docs = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
    words = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)
             and id(n) not in docs and " " not in n.value]  # fmt: skip
    assert [n for n in [*names, *words] if SYSTEMS.search(n) and n not in NAMED_BY_FILES] == []


# Who reads files without files/read.py, and why each may.
READ_BY_THEMSELVES = {
    "engine.jit": "our own sources",
    "engine.spec": "the engine imports nothing; it asks for a file first",
    "report.html": "our own templates",
}


def test_what_users_name_is_read_by_one_module() -> None:
    found = set()
    for module in MODULES:
        calls = [node for node in ast.walk(tree(module)) if isinstance(node, ast.Call)]
        if {call.func.attr for call in calls if isinstance(call.func, ast.Attribute)} & {"read_text", "read_bytes"}:
            found.add(module)
    assert found - {"files.read"} == {*READ_BY_THEMSELVES}


# Modules that run what they read or name, and other names of the same.
RUN_DATA = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "runpy", "yaml"}
RUN_TEXT = {"eval", "exec", "__import__"}
# Who loads modules by name or path, and why each may.
LOAD_CODE = {
    "engine.part": "our own policies",
    "engine.outside": "the one place that runs a file of the user's: policies, routers, scalers",
    "engine.spec": "our own policies",
    "kernels.operation": "our own kernels",
    "planner.backend": "an installed package",
}
LOADERS = {"import_module", "exec_module", "load_module", "spec_from_file_location", "module_from_spec", "find_spec"}


def test_no_data_is_run() -> None:
    loading = set()
    for module in MODULES:
        assert not {part for name in imports(module) for part in name.split(".")} & RUN_DATA, module
        for call in (node for node in ast.walk(tree(module)) if isinstance(node, ast.Call)):
            keywords = {word.arg: ast.unparse(word.value) for word in call.keywords}
            function = ast.unparse(call.func)
            where = f"{module}:{call.lineno}: {function}"
            assert function not in RUN_TEXT, where
            assert not {"allow_pickle", "trust_remote_code"} & keywords.keys(), where
            assert not function.endswith(("read_pickle", "to_pickle", "load_library", "joblib.load")), where
            if function == "torch.load":
                assert keywords.get("weights_only") == "True", where
            if function.rpartition(".")[2] in LOADERS:
                loading.add(module)
    assert loading == {*LOAD_CODE}


CONTRIBUTING = ROOT / "CONTRIBUTING.md"


def picture() -> str:
    """The packages in layers, drawn from the import statements: a package imports from lines further down alone."""
    used = {a: set[str]() for a in MAY_IMPORT}
    for module in MODULES:
        used[module.split(".")[0]] |= folders(module) & MAY_IMPORT.keys()
    height: dict[str, int] = {}
    while len(height) < len(used):
        ready = [a for a in used if a not in height and used[a] <= height.keys()]
        assert ready, f"a circle of imports among {sorted(used.keys() - height.keys())}"
        height |= {a: 1 + max((height[b] for b in used[a]), default=-1) for a in ready}
    rows = sorted(used, key=lambda a: (-height[a], a))
    return "\n".join(f"{height[a]:>2}  {a:<10} {' '.join(sorted(used[a])) or '-'}" for a in rows)


def with_picture(text: str) -> str:
    """CONTRIBUTING.md with the picture of today."""
    start = text.index("```text\n", text.index("<!-- drawn by tests/test_architecture.py -->")) + len("```text\n")
    return text[:start] + picture() + text[text.index("\n```", start) :]


def test_contributing_shows_the_packages_as_the_code_imports_them() -> None:
    text = CONTRIBUTING.read_text()
    assert with_picture(text) == text, "run `python -m dsim.tests.test_architecture`"


if __name__ == "__main__":
    CONTRIBUTING.write_text(with_picture(CONTRIBUTING.read_text()))
