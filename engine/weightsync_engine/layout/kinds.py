"""Tensors of one kind: names that differ in numbers only, as a parameter of every layer does.

Slabs hold what is of one kind in one run of memory, in the order of the numbers, and plans move it in that order: so
that a rank's share of many layers is one run on both sides.
"""

from __future__ import annotations


def kind_of(name: str) -> tuple[str, tuple[int, ...]]:
    """A dotted name with each number that is a whole component replaced, and those numbers in order."""
    parts = name.split(".")
    numbers: list[int] = []
    for at, part in enumerate(parts):
        if part.isdecimal() and part.isascii():
            numbers.append(int(part))
            parts[at] = "#"
    return ".".join(parts), tuple(numbers)


def slab_order(tensor: tuple[str, tuple[int, ...], str]) -> tuple[object, ...]:
    """By what a slab sorts its tensors (name, shape, dtype): those that are of one kind and alike follow each other."""
    name, shape, dtype = tensor
    kind, numbers = kind_of(name)
    return kind, dtype, tuple(shape), numbers, name
