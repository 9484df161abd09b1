"""A server's draft model (speculative decoding): a second live model behind the same worker and the same mover.

What it shares with the target is the target's. What else it needs is expected under the names of its checkpoint: the
target's own (the MTP layers that it has) as they are there, those of a checkpoint of its own with `draft.` before them,
as vLLM calls its parameters. What both need comes once, and the flip copies it twice.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from ..layout.tensors import Expected, Piece
from ..protocol.names import DRAFT_PREFIX, ENV_DRAFT_MODEL, FROZEN
from .checkpoint import Checkpoint
from .manifest import Double, Resolved, resolve, slab_of, view_of
from .modules import read_model
from .observed import NotObserved, observed_rules
from .placement import Placed

WHAT_TO_DO = f"to leave the draft model as it is, set {ENV_DRAFT_MODEL}={FROZEN}"

NOT_PLANNED = "; transformers builds no draft layers: give the checkpoint's parameters with --table"


@dataclass(frozen=True)
class Draft:
    """A worker's draft model."""

    model: nn.Module
    config: Any
    """vLLM's `VllmConfig` with the draft's `model_config`."""
    own: bool
    """It has a checkpoint of its own, whose names the target's may have too."""

    @property
    def prefix(self) -> str:
        """Of its names on their way from the trainer."""
        return DRAFT_PREFIX if self.own else ""


def draft_of(model: nn.Module | None, config: Any) -> Draft | None:
    """What vLLM loaded as the draft model of a worker; None if nothing of it could be updated.

    Args:
        model: of the worker's proposer.
        config: the worker's `VllmConfig`.
    """
    speculative = config.speculative_config
    if speculative is None or not isinstance(model, nn.Module) or next(model.parameters(), None) is None:
        return None
    mine, its = config.model_config, speculative.draft_model_config
    files = {mine.model, getattr(mine, "model_weights", None) or mine.model}
    own = its.model not in files or its.revision != mine.revision
    config = copy.copy(config)
    config.model_config = its
    return Draft(model, config, own)


def shapes_of_draft(
    shapes: Mapping[str, tuple[int, ...]], draft: Draft
) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """What a trainer sends, as the target's checkpoint and the draft's would have it."""
    if not draft.own:
        return dict(shapes), dict(shapes)
    sent = {n: s for n, s in shapes.items() if n.startswith(DRAFT_PREFIX)}
    target = {n: s for n, s in shapes.items() if n not in sent}
    return target, {n.removeprefix(DRAFT_PREFIX): s for n, s in sent.items()}


def with_draft(
    target: Resolved,
    draft: Draft,
    checkpoint: Checkpoint | None,
    why_none: str = "",
    *,
    planned: bool = False,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> Resolved:
    """The target and its draft model as one. Arguments as for `resolve`, of the draft model's checkpoint."""
    dtypes = checkpoint.dtypes if checkpoint is not None else {}
    known = checkpoint.shapes if checkpoint is not None else shapes
    rules, refuse = None, ""
    if known is None:
        refuse = f"the names in its checkpoint are not known: {why_none}"
    else:
        try:
            rules = observed_rules(draft.model, known, dtypes, draft.config)
        except NotObserved as e:
            refuse = f"its names cannot be told from vLLM's loader: {e}" + (NOT_PLANNED if planned else "")
    found = resolve(
        draft.model, checkpoint, why_none, refuse,
        planned=planned, shapes=known, config=draft.config, rules=rules, beside=target.memory,
    )  # fmt: skip
    shared = {} if rules is None else _shared(target, draft, found, rules.forward)
    return _join(target, draft, found, shared)


def _shared(target: Resolved, draft: Draft, found: Resolved, live_of: Any) -> dict[str, str]:
    """Parameters of the draft model's checkpoint that need not come, as vLLM found them equal to the target's and keeps
    one copy: name in its checkpoint -> name in the target's. (What it shares without comparing is nobody's.)"""
    shared: dict[str, str] = {}
    known = {n: live_of(n) for n in found.manifest.unused}
    for tensor, _ in read_model(draft.model):
        inside = target.memory.get(tensor.storage, ())
        flag = "has_own_lm_head" if "lm_head" in tensor.name.split(".") else "has_own_embed_tokens"
        if len(inside) == 1 and getattr(draft.model, flag, False):
            shared |= {n: inside[0] for n, live in known.items() if live == tensor.name}
    return shared


def _join(target: Resolved, draft: Draft, found: Resolved, shared: Mapping[str, str]) -> Resolved:
    one, other, prefix = target.manifest, found.manifest, draft.prefix

    def sent(name: str) -> str:
        """What a parameter of the draft model's checkpoint is called on its way."""
        return one.aliases.get(prefix + name, prefix + name)

    unresolved = {
        f"{prefix}{name}" if name not in one.unresolved else f"{name} (draft model)": (
            f"it belongs to the draft model; {why}; {WHAT_TO_DO}"
        )
        for name, why in other.unresolved.items()
    }
    expected = {sent(name): whole for name, whole in other.expected.items()}
    for name, whole in expected.items():
        if (known := one.expected.get(name)) is not None and known != whole:
            unresolved[name] = (
                f"it belongs to the target as {_said(known)} and to the draft model as {_said(whole)}; {WHAT_TO_DO}"
            )
    held = {(p.name, p.box): p for p in one.pieces}
    wholes_of = {name: tensor for _, wholes in target.loaders for name, tensor in wholes.items()}
    pieces: list[Piece] = []
    doubles: list[Double] = []
    # A tensor of which some is copied from elsewhere, or not at all, is copied piece by piece.
    split = set(found.shared)
    own: set[str] = set()
    loaded = {tensor for _, wholes in found.loaders for tensor in wholes.values()}
    for p in other.pieces:
        name = sent(p.name)
        if p.tensor in loaded:
            if name not in wholes_of:
                pieces.append(Piece(name, p.box, f"{name} (whole)", p.at))
            continue
        same = held.get((name, p.box))
        if same is None and name not in wholes_of:
            pieces.append(Piece(name, p.box, f"{DRAFT_PREFIX}{p.tensor}", p.at))
            own.add(p.tensor)
            continue
        live = view_of(found.views[p.tensor], Placed(p.name, p.box, p.tensor, p.at))
        at = (same.tensor, same.region) if same is not None else (wholes_of[name], p.box)
        doubles.append(Double(f"{name} of the draft model", live, *at))
        split.add(p.tensor)
    views = {f"{DRAFT_PREFIX}{tensor}": found.views[tensor] for tensor in found.views if tensor in own}
    wholes = wholes_of | {
        name: f"{name} (whole)"
        for name in (sent(n) for _, ws in found.loaders for n in ws)
        if name not in wholes_of
    }
    all_expected = expected | one.expected
    tensors, size = slab_of(target.views | views, {tensor: all_expected[n] for n, tensor in wholes.items()})
    aliases = {sent(a): sent(n) for a, n in other.aliases.items()} | {
        prefix + a: n for a, n in shared.items()
    }
    unused = {prefix + name for name in other.unused} - aliases.keys()
    if not draft.own:
        unused &= one.unused
    else:
        unused |= one.unused
    manifest = replace(
        one,
        expected=all_expected,
        pieces=(*one.pieces, *pieces),
        tensors=tensors,
        unresolved=one.unresolved | unresolved,
        aliases={a: n for a, n in aliases.items() if a not in all_expected} | one.aliases,
        fallback={sent(n): why for n, why in other.fallback.items()} | one.fallback,
        unused=frozenset(unused),
        draft=frozenset(expected.keys() - one.expected.keys()),
    )
    return Resolved(
        manifest=manifest,
        slab_bytes=size,
        views=target.views | views,
        not_compared=target.not_compared or found.not_compared,
        shared=target.shared | {f"{DRAFT_PREFIX}{tensor}" for tensor in split & own},
        direct_bytes=target.direct_bytes + found.direct_bytes,
        loader_bytes=target.loader_bytes + found.loader_bytes,
        other_bytes=target.other_bytes + found.other_bytes,
        loaders=(
            *target.loaders,
            *((loader, {n: wholes[sent(n)] for n in own}) for loader, own in found.loaders),
        ),
        doubles=tuple(doubles),
        memory=target.memory | found.memory,
    )


def _said(whole: Expected) -> str:
    return f"{list(whole.shape)} of {whole.dtype}"
