"""The Dockerfile builds an image whose `dsim` works: as another user, without a network, on a read-only file system."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsim.engine.core import MANY_REQUESTS

ROOT = Path(__file__).parents[1]
TAG = "dsim-of-the-tests"


def docker(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(["docker", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def image() -> Iterator[str]:
    if shutil.which("docker") is None or docker("info").returncode:
        pytest.skip("no Docker daemon answers here")
    built = docker("build", "--tag", TAG, ".")
    assert built.returncode == 0, built.stderr
    yield TAG
    docker("image", "rm", "--force", TAG)


def run(image: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return docker("run", "--rm", "--network", "none", "--read-only", "--user", "12345", image, *arguments)


def test_the_image_is_built_with_a_run_that_compiles() -> None:
    found = re.search(r"dsim replay .*--num-requests (\d+)", (ROOT / "Dockerfile").read_text())
    assert int(found[1]) >= MANY_REQUESTS


@pytest.mark.slow
def test_the_image_answers_help(image: str) -> None:
    done = run(image)
    assert (done.returncode, done.stderr) == (0, "")
    assert " replay " in done.stdout


@pytest.mark.slow
def test_the_image_replays_a_shipped_trace(image: str) -> None:
    done = run(image, "replay", "azure-conv", "--num-requests", "50", "--policy", "optimus", "--json")
    assert done.returncode == 0, done.stderr
    assert '"completed": 50' in done.stdout
