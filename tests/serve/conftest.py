"""The twin that most tests of the server serve."""

from collections.abc import Callable
from pathlib import Path

import pytest

from dsim.serve.open import Behind

from .twins import opener


@pytest.fixture
def twin(tmp_path: Path) -> Callable[..., Behind]:
    """Opens a twin of a toy, ready to serve."""
    return opener(tmp_path)
