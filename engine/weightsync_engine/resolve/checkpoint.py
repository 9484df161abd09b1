"""The checkpoint that a vLLM server loaded its weights from: names, shapes, and samples of values.

Only safetensors files of a local folder (or of the local Hugging Face cache) are read; headers and single
rows, so that it takes milliseconds. Everything else counts as "no checkpoint to compare with", with the
reason.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ..layout.boxes import Box

_DTYPES = {
    "F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip


class NoCheckpoint(Exception):
    """There is nothing to compare with; the text says why."""


class Checkpoint:
    """Opened safetensors files. A context manager."""

    def __init__(self, files: list[Path]) -> None:
        self._stack = contextlib.ExitStack()
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        """Names of torch dtypes; of types that have none, the file's own name."""
        self._files: dict[str, Any] = {}
        try:
            for file in files:
                opened = self._stack.enter_context(safe_open(file, framework="pt"))
                for name in opened.keys():  # noqa: SIM118 - not a mapping
                    header = opened.get_slice(name)
                    self.shapes[name] = tuple(header.get_shape())
                    self.dtypes[name] = _DTYPES.get(header.get_dtype(), header.get_dtype())
                    self._files[name] = opened
        except (OSError, SafetensorError) as e:
            self._stack.close()
            raise NoCheckpoint(f"{file} cannot be read: {e}") from e

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Idempotent."""
        self._stack.close()

    def whole(self, name: str) -> torch.Tensor:
        """A whole parameter, in the checkpoint's dtype."""
        tensor: torch.Tensor = self._files[name].get_tensor(name)
        return tensor

    def sample(self, name: str, box: Box, whole: bool = False) -> Iterator[tuple[Box, torch.Tensor]]:
        """A few rows of a box of a parameter, or all of it: each with its own box, in the checkpoint's dtype.

        Two rows at the beginning, in the middle and at the end (of the first and the last expert of a stack):
        the usual permutations (interleaved halves, rotary pairs) keep the very first and last row in place.
        """
        if not box.shape:
            yield box, self._files[name].get_tensor(name)
            return
        rows = self._files[name].get_slice(name)
        for part in [box] if whole else _parts(box):
            yield part, rows[tuple(slice(a, b) for a, b in zip(part.start, part.stop, strict=True))]


def _parts(box: Box) -> list[Box]:
    if len(box.shape) > 2:
        ends = sorted({box.start[0], box.stop[0] - 1})
        inner = _parts(Box(box.start[1:], box.shape[1:]))
        return [Box((end, *part.start), (1, *part.shape)) for end in ends for part in inner]
    start, length = box.start[0], box.shape[0]
    firsts = sorted({max(0, min(at, length - 2)) for at in (0, length // 2, length - 2)})
    return [Box((start + at, *box.start[1:]), (min(2, length), *box.shape[1:])) for at in firsts]


def open_checkpoint(model: str, revision: str | None, load_format: str) -> Checkpoint:
    """The files that vLLM loaded `model` from. Raises `NoCheckpoint`."""
    if load_format not in ("auto", "safetensors", "hf", "fastsafetensors"):
        raise NoCheckpoint(f"the weights were loaded with --load-format {load_format}")
    folder = Path(model)
    if not folder.is_dir():
        try:
            from huggingface_hub import snapshot_download

            folder = Path(snapshot_download(model, revision=revision, local_files_only=True))
        except Exception as e:
            raise NoCheckpoint(f"no local files of {model}: {e}") from e
    files = sorted(f for f in folder.glob("*.safetensors") if not f.name.startswith("consolidated"))
    if not files:
        raise NoCheckpoint(f"{folder} has no safetensors files")
    return Checkpoint(files)
