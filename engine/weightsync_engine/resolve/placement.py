"""Pure: from descriptions of live tensors to the place of every checkpoint parameter on this worker.

Fails closed. Whatever cannot be told for sure ends in `unresolved`, with a reason that a user can act on, and
the plan refuses it by that name.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field

from ..layout.boxes import Box
from .names import CheckpointNames
from .shards import Rerun, Run, Unresolvable, fused


@dataclass(frozen=True, slots=True)
class Slot:
    """A region of a live tensor and what fills it, where it is not a cut along one dimension (experts)."""

    name: str
    """vLLM's unfused name of the checkpoint parameter."""
    whole: tuple[int, ...]
    """The checkpoint parameter's shape."""
    box: Box
    """The part of it that is held."""
    at: tuple[int, ...]
    """Where in the live tensor; may have more (leading) dimensions than the parameter."""


@dataclass(frozen=True)
class LiveTensor:
    """One parameter of a live vLLM model, as its module describes it."""

    name: str
    """vLLM's dotted name."""
    shape: tuple[int, ...]
    dtype: str
    storage: Hashable
    """Equal for two live tensors exactly if they are the same memory, shape and strides."""
    runs: tuple[Run, ...] = ()
    """The checkpoint parameters in it, in order, along `dim`. Empty: one, held whole by every worker."""
    dim: int = 0
    slots: tuple[tuple[Slot, ...], ...] = ()
    """Instead of runs: the ways in which a checkpoint may hold what is in it. The first one counts whose names
    are all there."""
    also: tuple[str, ...] = ()
    """More of vLLM's names: other paths to the same module."""
    borrowed: bool = False
    """Another module owns the parameter (a tied head): its description counts."""
    must_compare: bool = False
    """Nothing but the values can tell whether this is a plain copy of the checkpoint's parameter."""
    group: tuple[int, int] = (1, 0)
    """Size and rank of the tensor-parallel group that its layer is cut over. Where `must_compare`, the parameter
    may be one of as many equal shares."""
    optional: bool = False
    """It may well be no checkpoint's (a buffer): then it is left out."""
    problem: str = ""
    """Why it cannot be written directly."""
    rerun: Rerun | None = None
    """With a problem: how vLLM's own loader could fill it, if at all."""
    source: Hashable = None
    """With a problem: the storage of the live tensor that it was computed from after load."""


@dataclass(frozen=True)
class Placed:
    """Elements `box` of checkpoint parameter `name` are held in live tensor `live` from `at` on (same shape,
    with extent 1 in the leading dimensions that the parameter lacks)."""

    name: str
    box: Box
    live: str
    at: tuple[int, ...]


@dataclass(frozen=True)
class Whole:
    """A checkpoint parameter as a whole: its shape, and the dtype in which it is held live."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Placement:
    """Where everything lands on this worker; `unresolved` maps a checkpoint or live name to the reason."""

    expected: dict[str, Whole] = field(default_factory=dict)
    placed: tuple[Placed, ...] = ()
    aliases: dict[str, str] = field(default_factory=dict)
    unresolved: dict[str, str] = field(default_factory=dict)
    must_compare: frozenset[str] = frozenset()
    """Names in `expected` that are believed only after a comparison with the checkpoint's values."""
    shared: frozenset[str] = frozenset()
    """Live tensors that hold something unresolved beside what is placed in them."""
    reruns: dict[str, Rerun] = field(default_factory=dict)
    """Of names in `unresolved`: what vLLM's loader could do for them."""
    holds: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Live tensor -> the checkpoint parameters in it, where they can be told, resolved or not."""
    fallback: dict[str, str] = field(default_factory=dict)
    """Names in `expected` that go whole to vLLM's loader, each with the reason. They are not placed."""
    guessed: dict[str, Box] = field(default_factory=dict)
    """Names whose box is told by nothing but the shapes: the box of another worker, whose values must differ."""


def place(
    live: Iterable[LiveTensor],
    names: CheckpointNames,
    shapes: Mapping[str, tuple[int, ...]] | None,
) -> Placement:
    """Find the place of every checkpoint parameter.

    Args:
        live: every parameter of the live model, tied ones under each of their names.
        names: finds checkpoint names; with `known` names it accepts only those.
        shapes: whole shapes by checkpoint name, where there is a checkpoint.
    """
    expected: dict[str, Whole] = {}
    placed: list[Placed] = []
    aliases: dict[str, str] = {}
    unresolved: dict[str, str] = {}
    compare: set[str] = set()
    guessed: dict[str, Box] = {}
    reruns: dict[str, Rerun] = {}
    holds: dict[str, tuple[str, ...]] = {}
    first: dict[Hashable, tuple[str, tuple[str, ...]]] = {}
    tied: list[tuple[LiveTensor, str, tuple[str, ...]]] = []

    tensors = list(live)
    # What is wrong with a tensor under one of its names is wrong with the memory.
    problems = {tensor.storage: tensor for tensor in tensors if tensor.problem}

    def refuse(name: str, reason: str, rerun: Rerun | None = None) -> None:
        unresolved[name] = reason
        if rerun is not None:
            reruns[name] = rerun

    for tensor in sorted(tensors, key=lambda t: t.borrowed):
        if tensor.optional and not (names.known and names.find(tensor.name)):
            continue
        if tensor.storage in problems:
            told = _names_or_live(tensor, names)
            if told != [tensor.name] or (shapes is not None and tensor.name in shapes):
                holds[tensor.name] = tuple(told)
            for name in told:
                refuse(name, problems[tensor.storage].problem, problems[tensor.storage].rerun)
            continue
        if tensor.borrowed and tensor.storage not in first:
            refuse(tensor.name, "the module that owns it is not part of the model")
            continue
        if tensor.storage in first:
            tied.append((tensor, *first[tensor.storage]))
            continue
        guess: Box | None = None
        try:
            parts = _parts(tensor, names)
            if tensor.must_compare and shapes is not None:
                parts, guess = _share(tensor, parts, shapes)
            holds[tensor.name] = tuple(dict.fromkeys(n for n, _, _ in parts))
            for name, whole, _ in parts:
                known = None if shapes is None else shapes.get(name)
                if known is not None and known != whole:
                    raise Unresolvable(
                        f"the checkpoint has {name} as {list(known)}, but the live tensor {tensor.name} of "
                        f"{list(tensor.shape)} would be a share of {list(whole)}",
                        Rerun(),
                    )
                if name in expected and name not in {n for n, _, _ in parts}:
                    raise Unresolvable(f"two live tensors claim the checkpoint parameter {name}")
        except Unresolvable as e:
            refuse(tensor.name, str(e), e.rerun)
            continue
        first[tensor.storage] = (tensor.name, tuple(dict.fromkeys(n for n, _, _ in parts)))
        for name, whole, pieces in parts:
            expected[name] = Whole(whole, tensor.dtype)
            placed.extend(pieces)
            if tensor.must_compare:
                compare.add(name)
            if guess is not None:
                guessed[name] = guess

    for tensor, other, targets in tied:
        holds[tensor.name] = targets
        # The other name of the same memory: whichever of the two the trainer sends, one write covers both.
        found = names.find(tensor.name)
        if len(targets) != 1 or len(found) > 1:
            refuse(tensor.name, f"it is the same memory as {other}, which holds {', '.join(targets)}")
        alias = found[0] if found else tensor.name
        if alias != targets[0]:
            aliases[alias] = targets[0]
    return Placement(
        expected, tuple(placed), aliases, unresolved, frozenset(compare),
        guessed=guessed, reruns=reruns, holds=holds,
    )  # fmt: skip


_Parts = list[tuple[str, tuple[int, ...], list[Placed]]]
"""(checkpoint name, its whole shape, its pieces)"""


def _share(
    tensor: LiveTensor, parts: _Parts, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[_Parts, Box | None]:
    """A parameter without a loader that the checkpoint has `size` times as long in one dimension: then it is
    this worker's share (attention sinks), if the values say so too. Also the share of the next worker."""
    size, rank = tensor.group
    if len(parts) != 1 or size == 1:
        return parts, None
    ((name, shape, _),) = parts
    known = shapes.get(name, shape)
    longer = [d for d, (a, b) in enumerate(zip(shape, known, strict=False)) if a != b]
    if len(known) != len(shape) or len(longer) != 1 or known[longer[0]] != size * shape[longer[0]]:
        return parts, None

    def share(of: int) -> Box:
        return Box(tuple(of * n if d == longer[0] else 0 for d, n in enumerate(shape)), shape)

    piece = Placed(name, share(rank), tensor.name, (0,) * len(shape))
    return [(name, known, [piece])], share((rank + 1) % size)


def _names_or_live(tensor: LiveTensor, names: CheckpointNames) -> list[str]:
    """The names under which a user knows a tensor: the checkpoint's where they can be told, else vLLM's."""
    try:
        if tensor.slots:
            found = [name for name, _, _ in _slots(tensor, names)]
            return list(dict.fromkeys(found)) or [tensor.name]
        return [name for group in _find(tensor, names) for name in group]
    except Unresolvable:
        return [tensor.name]


def _parts(tensor: LiveTensor, names: CheckpointNames) -> _Parts:
    """Everything in one live tensor."""
    if tensor.slots:
        return _slots(tensor, names)
    if not tensor.runs:
        (name,), *more = _find(tensor, names)
        if more:
            raise Unresolvable(
                f"{tensor.name} packs several parameters, and its layer does not say where each one is",
                Rerun(),
            )
        origin = (0,) * len(tensor.shape)
        return [(name, tensor.shape, [Placed(name, Box.whole(tensor.shape), tensor.name, origin)])]
    found = _find(tensor, names)
    if len(found) == len(tensor.runs):
        groups = [(name, [run]) for (name,), run in zip(found, tensor.runs, strict=True)]
    elif len(found) == 1:
        groups = [(found[0][0], fused(tensor.runs))]
    else:
        raise Unresolvable(
            f"the model packs {len(found)} checkpoint parameters into {tensor.name}, "
            f"whose layer has {len(tensor.runs)} partitions",
            Rerun(),
        )
    result = []
    for name, runs in groups:
        shape = list(tensor.shape)
        shape[tensor.dim] = runs[0].whole
        pieces = [_piece(tensor, name, run) for run in runs if run.length]
        result.append((name, tuple(shape), pieces))
    return result


def _slots(tensor: LiveTensor, names: CheckpointNames) -> list[tuple[str, tuple[int, ...], list[Placed]]]:
    """As `_parts`, for a tensor of experts."""
    for slots in tensor.slots:
        found: dict[str, tuple[tuple[int, ...], list[Placed]]] = {}
        for slot in slots:
            group = names.find(slot.name, "." + slot.name.rpartition("experts.")[2])
            if len(group) != 1:
                break
            whole, pieces = found.setdefault(group[0], (slot.whole, []))
            if whole != slot.whole:
                raise Unresolvable(f"{group[0]} would be both {list(whole)} and {list(slot.whole)}")
            pieces.append(Placed(group[0], slot.box, tensor.name, slot.at))
        else:
            return [(name, whole, pieces) for name, (whole, pieces) in found.items()]
    wanted = " nor ".join(slots[0].name for slots in tensor.slots)
    raise Unresolvable(f"the checkpoint has neither {wanted}, which {tensor.name} would hold", Rerun())


def _piece(tensor: LiveTensor, name: str, run: Run) -> Placed:
    if run.at + run.length > tensor.shape[tensor.dim]:
        raise Unresolvable(
            f"{name} needs places {run.at} to {run.at + run.length} in dimension {tensor.dim} of "
            f"{tensor.name}, which has the shape {list(tensor.shape)}"
        )
    start, shape, at = [0] * len(tensor.shape), list(tensor.shape), [0] * len(tensor.shape)
    start[tensor.dim], shape[tensor.dim], at[tensor.dim] = run.start, run.length, run.at
    return Placed(name, Box(tuple(start), tuple(shape)), tensor.name, tuple(at))


def _find(tensor: LiveTensor, names: CheckpointNames) -> list[list[str]]:
    """One group of one name for each checkpoint parameter in the tensor, in the order of its runs."""
    refused: Unresolvable | None = None
    for name in (tensor.name, *tensor.also):
        try:
            return _find_as(name, tensor, names)
        except Unresolvable as e:
            refused = refused or e
    assert refused is not None
    raise refused


def _find_as(live: str, tensor: LiveTensor, names: CheckpointNames) -> list[list[str]]:
    module, _, leaf = live.rpartition(".")
    own = names.find(live)
    packed = names.rules.components(module) if len(tensor.runs) != 1 else None
    if packed is None or (names.known and own):
        # Not packed, or packed in the checkpoint already.
        if not own:
            raise Unresolvable(
                f"no parameter of the checkpoint maps to {live}"
                if names.known
                else f"no checkpoint name can be told for {live}",
                Rerun(),
            )
        if len(own) > 1:
            raise Unresolvable(f"{', '.join(own)} all map to {live}", Rerun())
        return [own]
    stem, components = packed
    groups = []
    for component in components:
        wanted = ".".join(part for part in (stem, component, leaf) if part)
        group = names.find(wanted)
        if len(group) != 1:
            raise Unresolvable(
                f"{live} packs {wanted}, "
                + (f"to which {', '.join(group)} all map" if group else "which the checkpoint does not have"),
                Rerun(),
            )
        groups.append(group)
    return groups
