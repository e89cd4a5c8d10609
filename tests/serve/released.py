"""Record the metrics that releases of vLLM, SGLang and LMDeploy publish, in data/*.json.

    pip download --no-deps vllm==0.33.0 sglang==0.5.23 lmdeploy==0.18.0
    python -m dsim.tests.serve.released vllm-*.whl sglang-*.whl lmdeploy-*.whl

The sources are parsed and never run: a call of a Prometheus constructor gives a name, a type, the labels that it
adds to the engine's, and bucket edges. "1-2-5": 1, 2, 5, 10 ... up to the context's length. null: set at run time.
"""

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zipfile import ZipFile

DATA = Path(__file__).parent / "data"
SOURCES = {
    "vllm": (
        "vllm/v1/metrics/buckets.py", "vllm/v1/metrics/loggers.py", "vllm/v1/spec_decode/metrics.py",
        "vllm/v1/metrics/perf.py",
    ),
    "sglang": (
        "sglang/srt/observability/metrics_collector.py", "sglang/srt/observability/http_request_metrics.py",
        "sglang/srt/observability/cpu_monitor.py",
    ),
    "lmdeploy": ("lmdeploy/metrics/loggers.py",),
}  # fmt: skip
KINDS = ("gauge", "counter", "histogram", "summary", "info")


def released(engine: str, sources: list[str]) -> dict[str, Any]:
    """The metrics of a release's sources, by name."""
    found: dict[str, Any] = {}
    known: dict[str, Any] = {}
    for source in sources:
        tree = ast.parse(source)
        known |= dict(_assigned(tree, known))
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and (name := _name(node, engine)) is not None:
                found[name] = _metric(node, known)
            elif isinstance(node, ast.Tuple) and len(node.elts) == 2:  # vLLM's tables of name and text
                first = node.elts[0]
                if isinstance(first, ast.Constant) and str(first.value).startswith(f"{engine}:"):
                    found[first.value] = {"type": "counter", "labels": []}
        if engine == "vllm":
            for name in ("vllm:cache_config_info",):
                found.setdefault(name, {"type": "gauge", "labels": None})
    return dict(sorted(found.items()))


def _name(node: ast.Call, engine: str) -> str | None:
    given = next((k.value for k in node.keywords if k.arg == "name"), None)
    if isinstance(given, ast.Constant) and isinstance(given.value, str) and given.value.startswith(f"{engine}:"):
        return given.value
    return None


def _metric(node: ast.Call, known: dict[str, Any]) -> dict[str, Any]:
    kind = ast.unparse(node.func).rpartition(".")[2].lower()
    given = {k.arg: k.value for k in node.keywords}
    metric: dict[str, Any] = {
        "type": next(k for k in KINDS if k in kind),
        "labels": [c.value for c in ast.walk(given["labelnames"]) if isinstance(c, ast.Constant)]
        if "labelnames" in given else [],
    }  # fmt: skip
    if metric["type"] == "histogram" and "gauge" not in kind:
        metric["edges"] = _value(given.get("buckets"), known)
    return metric


def _assigned(tree: ast.AST, known: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The lists of numbers that a source names, the later ones by the earlier ones."""
    names = dict(known)
    for node in ast.walk(tree):
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and (value := _value(getattr(node, "value", None), names)) is not None:
            names[target.id] = value
            yield target.id, value


def _value(node: ast.AST | None, known: dict[str, Any]) -> Any:
    """A list of edges, or None where it is not in the source."""
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if isinstance(node, ast.Call):
        called = ast.unparse(node.func)
        if called == "histogram_buckets":
            family = str(ast.literal_eval(node.args[0]))
            return "1-2-5" if family == "request_tokens" else known.get(f"{family.upper()}_BUCKETS")
        if called == "build_1_2_5_buckets":
            return "1-2-5"
        if called == "generate_buckets":  # (of the options, default)
            return _value(node.args[1], known)
        if called == "exponential_buckets":
            given = {str(k.arg): ast.literal_eval(k.value) for k in node.keywords}
            return [given["start"] * given["width"] ** i for i in range(given["length"])]
        return None
    if isinstance(node, ast.Tuple | ast.List):
        try:
            values = ast.literal_eval(node)
        except ValueError:
            return None
        return list(values) if values and all(isinstance(v, int | float) for v in values) else None
    return None


def main(wheels: list[str]) -> None:
    """Write the record of each wheel."""
    for wheel in wheels:
        engine, version = Path(wheel).name.split("-")[:2]
        with ZipFile(wheel) as packed:
            metrics = released(engine, [packed.read(name).decode() for name in SOURCES[engine]])
        record = {"engine": engine, "version": version, "sources": SOURCES[engine], "metrics": metrics}
        path = DATA / f"{engine}.json"
        lines = [f"  {json.dumps(name)}: {json.dumps(metric)}" for name, metric in record.pop("metrics").items()]
        path.write_text(json.dumps(record)[:-1] + ', "metrics": {\n' + ",\n".join(lines) + "\n}}\n")
        print(f"{path}: {len(lines)} metrics")


if __name__ == "__main__":
    main(sys.argv[1:])
