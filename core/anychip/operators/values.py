"""Whether the values of a tensor can be looked at, for references that check indices on a host."""

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_batchedtensor, is_functorch_wrapped_tensor


def has_values(tensor: Tensor) -> bool:
    """False while a compiler traces, and for a tensor that ``vmap`` has made a batch of."""
    if torch.compiler.is_compiling():
        return False
    while is_functorch_wrapped_tensor(tensor):
        if is_batchedtensor(tensor):
            return False
        tensor = get_unwrapped(tensor)
    return True
