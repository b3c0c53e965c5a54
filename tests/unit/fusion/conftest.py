"""The cpu backend, from counts of zero."""

import pytest
import torch

import anychip


@pytest.fixture(autouse=True)
def cpu() -> None:
    anychip.use("cpu")
    anychip.provenance(reset=True)
    torch.manual_seed(0)
