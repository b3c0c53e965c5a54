"""What every operator over lists of tensors checks and counts, and the sample shapes they share."""

from collections.abc import Mapping, Sequence

from torch import Tensor

SHAPES = ((4, 5), (17,), (), (1000,))


def nbytes(*lists: Sequence[Tensor]) -> int:
    """Bytes of all tensors in all lists."""
    return sum(t.numel() * t.element_size() for tensors in lists for t in tensors)


def numel(tensors: Sequence[Tensor]) -> int:
    """Elements of all tensors of a list."""
    return sum(t.numel() for t in tensors)


def check_scalars(**scalars: Tensor | None) -> None:
    """Raises ValueError for one that has dims."""
    for name, tensor in scalars.items():
        if tensor is not None and tensor.dim() != 0:
            raise ValueError(f"{name} must be a 0-dim tensor, got shape {tuple(tensor.shape)}")


def check_numbers(attrs: Mapping[str, float]) -> None:
    """Raises ValueError for a rate of an average that is not in [0, 1), or an eps below 0."""
    for name in ("beta1", "beta2", "momentum"):
        if name in attrs and not 0.0 <= attrs[name] < 1.0:
            raise ValueError(f"{name} must be at least 0 and below 1, got {attrs[name]}")
    if attrs.get("eps", 0.0) < 0.0:
        raise ValueError(f"eps must be at least 0, got {attrs['eps']}")


def check_shapes(first: str, tensors: Sequence[Tensor], **others: Sequence[Tensor]) -> None:
    """Raises ValueError for a list whose length or shapes are not those of the first one."""
    for name, other in others.items():
        if len(other) != len(tensors):
            raise ValueError(
                f"{name} must be as long as {first} ({len(tensors)}), got {len(other)}"
            )
        for index, (a, b) in enumerate(zip(tensors, other, strict=True)):
            if a.shape != b.shape:
                raise ValueError(
                    f"{name}[{index}] must have the shape of {first}[{index}] {tuple(a.shape)}, "
                    f"got {tuple(b.shape)}"
                )
