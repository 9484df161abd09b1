"""Movers that damage what they move: an entry of their own, and the supervisor that starts it. For tests only.

`python damage.py FOLDER SLAB_DESCRIPTOR` is a mover in all things, but that a file
`FOLDER/<local rank>.json` makes it do harm in every round for as long as the file is there.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from weightsync_engine.mover import epoch as epoch_module
from weightsync_engine.mover import process
from weightsync_engine.mover.epoch import Epoch
from weightsync_engine.mover.supervisor import MoverSupervisor
from weightsync_engine.plan.plan import LocalPart, LocalStep
from weightsync_engine.transport.base import LocalTensor
from weightsync_engine.transport.gloo import GlooTransport


@dataclass(frozen=True)
class Damage:
    kind: Literal["bit", "experts", "half"]
    """One bit flipped; two experts swapped; the first half left as it was in the round before."""
    tensor: str
    """Of the mover's slab."""
    other: str = ""
    """With `experts` on the sending side: the tensor that takes its place, and it the other's."""


def cause(folder: Path, local_rank: int, damage: Damage) -> Path:
    """From now on that rank does harm, until the file that is returned is gone."""
    path = folder / f"{local_rank}.json"
    scratch = path.with_suffix(".new")
    scratch.write_text(json.dumps(asdict(damage)))
    return scratch.replace(path)


def damaging(folder: Path) -> Callable[..., MoverSupervisor]:
    """A supervisor whose movers obey the files in `folder`."""

    class Damaging(MoverSupervisor):
        def _command(self) -> list[str]:
            return [sys.executable, "-P", __file__, str(folder), str(self._slab.fd)]

    return Damaging


def main() -> int:
    folder = Path(sys.argv.pop(1))
    order: list[Damage | None] = [None]

    class InShadow(Epoch):
        """Behind the last step and before the digests."""

        def _run_steps(self, *arguments: Any) -> bool:
            order[0] = _read(folder, self.local_rank)
            damage, manifest = order[0], self._manifest
            if damage is None or self.rank < self.request.trainer_ranks:
                return super()._run_steps(*arguments)
            tensor = self._slab.tensor(manifest.tensors[damage.tensor])
            before = tensor.clone()
            whole = super()._run_steps(*arguments)
            if damage.kind == "bit":
                _flip(tensor)
            elif damage.kind == "experts":
                tensor[[0, 1]] = tensor[[1, 0]]
            else:
                tensor[: len(tensor) // 2] = before[: len(tensor) // 2]
            return whole

        @property
        def local_rank(self) -> int:
            return local[0]

    class GlooOfDamage(GlooTransport):
        """What is sent is not what the snapshot holds."""

        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self._last: dict[LocalPart, torch.Tensor] = {}

        def begin(self, step: LocalStep, local: LocalTensor) -> None:
            super().begin(step, self._wrong(local) if step.sends else local)

        def _wrong(self, local: LocalTensor) -> LocalTensor:
            def read(part: LocalPart) -> torch.Tensor:
                damage, right = order[0], local(part)
                last = self._last.get(part)
                self._last[part] = right.clone()
                if damage is None or part.tensor not in (damage.tensor, damage.other):
                    return right
                if damage.kind == "experts":
                    other = damage.other if part.tensor == damage.tensor else damage.tensor
                    return local(replace(part, tensor=other))
                wrong = right.clone()
                if damage.kind == "bit":
                    _flip(wrong)
                elif last is not None:
                    wrong.view(-1)[: wrong.numel() // 2] = last.view(-1)[: wrong.numel() // 2]
                return wrong

            return read

    GlooOfDamage.__name__ = GlooTransport.__name__  # or its peers find that it runs with another transport
    local = [0]
    read_config = process.read_config

    def remembered(line: bytes) -> process.Config:
        config = read_config(line)
        local[0] = config.local_rank
        return config

    process.read_config = remembered
    process.Epoch = InShadow  # type: ignore[misc]
    epoch_module.choose = lambda *_: GlooOfDamage  # type: ignore[assignment]
    return process.main()


def _read(folder: Path, local_rank: int) -> Damage | None:
    try:
        return Damage(**json.loads((folder / f"{local_rank}.json").read_text()))
    except OSError:
        return None


def _flip(tensor: torch.Tensor) -> None:
    bits = tensor.view(torch.int16) if tensor.element_size() == 2 else tensor.view(torch.int32)
    bits[(-1,) * bits.dim()] ^= 1


if __name__ == "__main__":
    sys.exit(main())
