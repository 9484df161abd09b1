"""Boxes: axis-aligned regions of a global tensor's index space, the one currency of layouts and plans."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, order=True, slots=True)
class Box:
    """Elements with `start[d] <= index[d] < start[d] + shape[d]` in every dimension d. Rank 0 is one
    scalar."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.start) != len(self.shape):
            raise ValueError(f"box start {self.start} and shape {self.shape} differ in rank")
        if min(self.start, default=0) < 0 or min(self.shape, default=0) < 0:
            raise ValueError(f"box start {self.start} and shape {self.shape} must not be negative")

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        """The box of a whole tensor of that shape."""
        return cls((0,) * len(shape), shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def stop(self) -> tuple[int, ...]:
        return tuple(s + n for s, n in zip(self.start, self.shape, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """The elements in both, or None if there are none."""
        start: list[int] = []
        shape: list[int] = []
        for a, n, b, m in zip(self.start, self.shape, other.start, other.shape, strict=True):
            first = a if a > b else b
            extent = (a + n if a + n < b + m else b + m) - first
            if extent <= 0:
                return None
            start.append(first)
            shape.append(extent)
        return Box(tuple(start), tuple(shape))

    def contains(self, other: Box) -> bool:
        for a, n, b, m in zip(self.start, self.shape, other.start, other.shape, strict=True):
            if b < a or b + m > a + n:
                return False
        return True

    def inside(self, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of that shape has all these elements, and as many dimensions."""
        if len(shape) != len(self.shape):
            return False
        return all(a + n <= whole for a, n, whole in zip(self.start, self.shape, shape, strict=True))

    def shifted(self, by: tuple[int, ...]) -> Box:
        """The same shape with `by` added to its start."""
        return Box(tuple(a + b for a, b in zip(self.start, by, strict=True)), self.shape)

    def relative_to(self, origin: tuple[int, ...]) -> Box:
        """The same elements counted from `origin`."""
        return Box(tuple(a - b for a, b in zip(self.start, origin, strict=True)), self.shape)
