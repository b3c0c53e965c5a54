"""What every test of training runs on."""

import pytest
import torch

import anychip


@pytest.fixture(autouse=True)
def cpu() -> None:
    """The host, and the same random numbers for each test."""
    anychip.use("cpu")
    torch.manual_seed(7)
