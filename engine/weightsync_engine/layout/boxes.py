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
        if any(s < 0 for s in self.start) or any(n < 0 for n in self.shape):
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
        start = tuple(max(a, b) for a, b in zip(self.start, other.start, strict=True))
        stop = tuple(min(a, b) for a, b in zip(self.stop, other.stop, strict=True))
        if any(a >= b for a, b in zip(start, stop, strict=True)):
            return None
        return Box(start, tuple(b - a for a, b in zip(start, stop, strict=True)))

    def contains(self, other: Box) -> bool:
        return all(a <= b for a, b in zip(self.start, other.start, strict=True)) and all(
            a >= b for a, b in zip(self.stop, other.stop, strict=True)
        )

    def shifted(self, by: tuple[int, ...]) -> Box:
        """The same shape with `by` added to its start."""
        return Box(tuple(a + b for a, b in zip(self.start, by, strict=True)), self.shape)

    def relative_to(self, origin: tuple[int, ...]) -> Box:
        """The same elements counted from `origin`."""
        return Box(tuple(a - b for a, b in zip(self.start, origin, strict=True)), self.shape)
