"""An environment of distributions for each test."""

from pathlib import Path

import pytest

from tests.integration.plugins.environments import Environment


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return Environment(tmp_path, is_warm=True)
