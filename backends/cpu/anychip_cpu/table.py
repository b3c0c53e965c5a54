"""The host's operator table, which other modules fill, and what they all say of a row."""

from __future__ import annotations

import torch

from anychip.contract import OperatorTable

table = OperatorTable()
FLOATS = {torch.float32, torch.bfloat16, torch.float16}
Needs = tuple[bool, ...]
