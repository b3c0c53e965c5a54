"""The cpu backend, from counts of zero."""

from __future__ import annotations

import pytest
import torch

import anychip


@pytest.fixture(autouse=True)
def cpu() -> None:
    anychip.use("cpu")
    anychip.provenance(reset=True)
    torch.manual_seed(0)
