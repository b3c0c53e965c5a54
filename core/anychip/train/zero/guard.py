"""What happens to who reads a weight that is not there? A sentence; never what was there before.

A tensor whose storage has been made empty still has its shape, and torch reads it all the same:
from address 0, or from what has taken its place. So a parameter that is not whole is of another
class, :class:`Released`, which tells its shape and refuses its values, and names itself.

What keeps an alias of it (a view that somebody made while it was whole, compiled code) does not see
that. Where torch can (its builds for CUDA, from 2.13), the storage refuses with the same sentence;
else, on the host, it is NaN from end to end: pages of a small file, mapped over and over, which
cost no memory; else it is empty. A torch that gives a storage no other memory (2.11) has these
pages where the memory is.
"""

import ctypes
import mmap
import os
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_leaves

from anychip.contract import HOST

_MODULE: Any = torch._C
SWAPS = hasattr(UntypedStorage, "_swap_data_ptr_")
"""Whether torch can give a storage other memory, which its views then have too: the allocator's,
which keeps it."""
_refuse = getattr(_MODULE, "_set_storage_data_ptr_access_error_msg", None) if SWAPS else None

_PROPERTIES = {
    *("device", "dtype", "grad", "grad_dtype", "grad_fn", "layout", "nbytes", "ndim", "output_nr"),
    *("requires_grad", "retains_grad", "shape"),
    *("_backward_hooks", "_post_accumulate_grad_hooks", "_version"),
    *(name for name in dir(Tensor) if name.startswith("is_")),
}
_METHODS = {
    *("dim", "element_size", "get_device", "nelement", "numel", "register_hook"),
    *("register_post_accumulate_grad_hook", "requires_grad_", "size", "storage_offset", "stride"),
    *("untyped_storage", "is_complex", "is_contiguous", "is_floating_point", "is_inference"),
}


@cache
def _without_values() -> frozenset[Callable[..., Any]]:
    """What can be asked of a parameter that has none."""
    found = {getattr(Tensor, name) for name in _METHODS}
    for name in _PROPERTIES:
        descriptor: Any = getattr(Tensor, name, None)  # some are younger than others
        if hasattr(descriptor, "__set__"):
            found |= {descriptor.__get__, descriptor.__set__, descriptor.__delete__}
    return frozenset(found)


class Released(nn.Parameter):
    """A parameter while its values are elsewhere."""

    _sentence: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _without_values():
            raise RuntimeError(_first_released([args, kwargs])._sentence)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def stand_in(tensor: Tensor) -> Tensor:
    """In place of a parameter that is not whole one like it without its values; else the tensor."""
    if type(tensor) is not Released:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def gradient_edge(param: Tensor) -> GradientEdge:
    """Where a parameter's gradient is added up, be it whole or not."""
    with torch._C.DisableTorchFunctionSubclass():
        return get_gradient_edge(param)


def _first_released(values: Any) -> Released:
    found = [value for value in tree_leaves(values) if type(value) is Released]
    return found[0]


class Room:
    """The memory of a storage, which comes and goes; parameters are views of it all the time.

    Args:
        storage: of all of them.
        params: that come and go with it.
        sentences: for whoever reads one of them meanwhile.
    """

    def __init__(
        self, storage: UntypedStorage, params: Sequence[Tensor], sentences: Sequence[str]
    ) -> None:
        self.storage, self.nbytes = storage, storage.nbytes()
        self._params = list(zip(params, map(type, params), sentences, strict=True))
        self._sentence = "".join(sentences[:1])
        self._is_host = storage.device.type == HOST
        self._nan = 0

    def release(self) -> None:
        """Frees the memory. Work that was queued on the current stream may still use it."""
        for param, _, sentence in self._params:
            param._sentence = sentence  # type: ignore[attr-defined]
            param.__class__ = Released
        if not self.nbytes:
            return
        if _refuse is not None:
            # Not smaller: a view that autograd makes anew must fit, to be refused by its name.
            self._swap(self._at(0))
            _refuse(self.storage._cdata, self._sentence)
        elif self._is_host and not SWAPS:
            _cover(self.storage.data_ptr(), self.nbytes)
        elif self._is_host:
            self._nan = _map_nan(self.nbytes)
            self._swap(self._at(self._nan))
        else:
            self.storage.resize_(0)

    def restore(self) -> None:
        """Gets memory again, whose content is undefined. Parameters stay closed."""
        if not self.nbytes:
            return
        if _refuse is not None:
            self._swap(self._fresh())  # which takes the refusal with it
        elif self._is_host and not SWAPS:
            first, end = _whole_pages(self.storage.data_ptr(), self.nbytes)
            if first < end:
                _mmap(first, end - first, _MAP_FIXED | mmap.MAP_ANONYMOUS, -1)
        elif self._is_host:
            self._swap(self._fresh())
            _unmap(self._nan, self.nbytes)
        else:
            self.storage.resize_(self.nbytes)

    def open(self) -> None:
        """Parameters can be read again."""
        for param, kind, _ in self._params:
            param.__class__ = kind

    def _swap(self, other: UntypedStorage) -> None:
        """The storage is as the other was, which takes with it what the storage had."""
        self.storage._swap_data_ptr_(other)  # type: ignore[attr-defined]

    def _at(self, address: int) -> UntypedStorage:
        device, nbytes = self.storage.device, self.nbytes
        found: UntypedStorage = _MODULE._construct_storage_from_data_pointer(
            address, device, nbytes
        )
        return found

    def _fresh(self) -> UntypedStorage:
        device = self.storage.device
        return torch.empty(self.nbytes, dtype=torch.uint8, device=device).untyped_storage()


_LEAST = 1 << 21
_MOST_MAPPINGS = 256
"""Of one storage: the kernel allows 65,530 of a process."""


def _chunk(nbytes: int) -> int:
    """Bytes of the file that is mapped over so many: a power of two."""
    return max(_LEAST, 1 << (nbytes // _MOST_MAPPINGS).bit_length())


@cache
def _file(nbytes: int) -> int:
    """Of bytes that make NaN in every format of floating point."""
    file = os.memfd_create("anychip-released")
    for _ in range(nbytes // _LEAST):
        os.write(file, b"\xff" * _LEAST)
    return file


@cache
def _libc() -> Any:
    found = ctypes.CDLL(None, use_errno=True)
    found.mmap.restype = ctypes.c_void_p
    number = ctypes.c_int
    found.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, number, number, number, ctypes.c_long]
    found.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return found


_MAP_FIXED = 0x10


def _map_nan(nbytes: int) -> int:
    """Address of so many bytes of the file, again and again; what is written there stays there."""
    first = _mmap(None, nbytes, mmap.MAP_ANONYMOUS, -1)
    _cover(first, nbytes)
    return first


def _cover(address: int, nbytes: int) -> None:
    """Maps the file over the pages that are in so many bytes; what is beside them is written."""
    (first, end), chunk = _whole_pages(address, nbytes), _chunk(nbytes)
    for start in range(first, end, chunk):
        _mmap(start, min(chunk, end - start), _MAP_FIXED, _file(chunk))
    for start, stop in (
        (address, min(first, address + nbytes)),
        (max(first, end), address + nbytes),
    ):
        ctypes.memset(start, 0xFF, max(0, stop - start))


def _whole_pages(address: int, nbytes: int) -> tuple[int, int]:
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    return first, (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE


def _mmap(address: int | None, nbytes: int, flags: int, file: int) -> int:
    access = mmap.PROT_READ | mmap.PROT_WRITE
    found = _libc().mmap(address, nbytes, access, mmap.MAP_PRIVATE | flags, file, 0)
    if found == ctypes.c_void_p(-1).value:
        raise OSError(
            ctypes.get_errno(), f"mmap of {nbytes} bytes: {os.strerror(ctypes.get_errno())}"
        )
    assert isinstance(found, int)
    return found


def _unmap(address: int, nbytes: int) -> None:
    _libc().munmap(address, nbytes)
