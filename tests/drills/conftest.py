"""A drill per test."""

import pytest
from drilled import Drill


@pytest.fixture
def drill(tmp_path):
    return Drill(tmp_path)
