"""Manifests and sources as bytes: canonical JSON, checked when read. Equal values give equal bytes."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

from pydantic import TypeAdapter

from .tensors import SourceParameter, TrainerManifest, WorkerManifest

_TRAINER = TypeAdapter(TrainerManifest)
_WORKER = TypeAdapter(WorkerManifest)
_SOURCES = TypeAdapter(tuple[SourceParameter, ...])


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def encode_trainer(manifest: TrainerManifest) -> bytes:
    return _canonical(_TRAINER.dump_python(manifest, mode="json"))


def decode_trainer(data: bytes) -> TrainerManifest:
    """Raises `pydantic.ValidationError` (a ValueError) for anything else than an encoded manifest."""
    return _TRAINER.validate_json(data)


def encode_worker(manifest: WorkerManifest) -> bytes:
    """Pieces are put in order of name and box: their order carries no meaning."""
    pieces = sorted(manifest.pieces, key=lambda p: (p.name, p.box, p.tensor, p.at))
    ordered = dataclasses.replace(manifest, pieces=tuple(pieces))
    return _canonical(_WORKER.dump_python(ordered, mode="json"))


def decode_worker(data: bytes) -> WorkerManifest:
    """Raises `pydantic.ValidationError` (a ValueError) for anything else than an encoded manifest."""
    return _WORKER.validate_json(data)


def encode_sources(sources: tuple[SourceParameter, ...]) -> bytes:
    """Sources in order of name: their order carries no meaning."""
    return _canonical(_SOURCES.dump_python(tuple(sorted(sources, key=lambda s: s.name)), mode="json"))


def decode_sources(data: bytes) -> tuple[SourceParameter, ...]:
    """Raises `pydantic.ValidationError` (a ValueError) for anything else than encoded sources."""
    return _SOURCES.validate_json(data)


def digest_of(data: bytes) -> str:
    """blake2b, 128 bits, hex."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()
