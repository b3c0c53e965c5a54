"""``anychip train`` with every operator by its reference: the bits that any chip computes which
does torch's operators as the host does them.
"""

import sys

import torch

import anychip
from anychip.cli import group
from anychip.dispatch.operator import registered

torch.set_num_threads(1)
with anychip.policy(pin=dict.fromkeys(registered(), "reference")):
    if code := group.run(["train", *sys.argv[1:]]):
        raise RuntimeError(f"exit code {code}")
