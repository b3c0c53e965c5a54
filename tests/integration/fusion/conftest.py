"""The cpu backend, from counts of zero; transformers says nothing and is not asked to download."""

import pytest
import torch

import anychip


@pytest.fixture(autouse=True)
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    anychip.use("cpu")
    anychip.provenance(reset=True)
    torch.manual_seed(0)
