"""Live runs of a few steps each, of many policies: their rules are not worth compiling."""

import pytest


@pytest.fixture(autouse=True)
def _rules_in_python(rules_in_python: None) -> None:
    pass
