"""One switch decides which path a kernel takes, and nothing is loaded before it is needed."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dsim
from dsim.kernels import path_for, taken, use


def test_a_tensor_on_the_cpu_takes_the_reference_unless_told_otherwise() -> None:
    assert path_for(torch.zeros(1)) == "reference"
    with use("triton"):
        assert path_for(torch.zeros(1)) == "triton"
        with use("auto"):
            assert path_for(torch.zeros(1)) == "reference"
        assert path_for(torch.zeros(1)) == "triton"
    assert path_for(torch.zeros(1)) == "reference"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_tensor_on_a_gpu_takes_the_kernel_unless_told_otherwise() -> None:
    assert path_for(torch.zeros(1, device="cuda")) == "triton"
    with use("reference"):
        assert path_for(torch.zeros(1, device="cuda")) == "reference"


def test_a_path_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="path is 'cuda', expected auto, reference or triton"), use("cuda"):  # type: ignore[arg-type]
        pass


def test_nothing_is_loaded_before_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import dsim, dsim.kernels, sys; print({'torch', 'triton'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
    monkeypatch.setattr(dsim, "kernels", dsim.kernels)  # which an import replaces
    for name in [name for name in sys.modules if name.startswith(("dsim.kernels", "triton"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton", None)  # an import fails
    fresh = importlib.import_module("dsim.kernels.confidence")
    fresh.confidence(torch.zeros(2, 3))
    with sys.modules["dsim.kernels"].use("triton"), pytest.raises(ModuleNotFoundError, match="triton"):
        fresh.confidence(torch.zeros(2, 3))


def test_the_example_of_the_document_runs_as_it_says() -> None:
    document = (Path(dsim.__file__).parent / "docs" / "kernels.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", document, flags=re.DOTALL)
    before = taken["confidence", "reference"]
    exec(example, {})
    assert taken["confidence", "reference"] == before + 2
