"""A small fleet of real movers on this machine: two trainers, two servers at tp 2, a store, and drivers for
all.

The model is what the planner must cope with: rows that FSDP cuts unevenly, q/k/v in one live tensor with
fewer KV heads than tp (in one parameter of the checkpoint, too), a row-parallel projection, a tied head, a
vocabulary that is padded, norms.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

import torch

from weightsync_engine.layout.boxes import Box
from weightsync_engine.layout.shards import shard_boxes
from weightsync_engine.layout.tensors import (
    Expected,
    Mesh,
    Piece,
    Shard,
    SourceParameter,
    TrainerManifest,
    WorkerManifest,
)
from weightsync_engine.mover.client import MoverClient
from weightsync_engine.mover.slab import Slab, plan_slab
from weightsync_engine.mover.supervisor import MoverSupervisor
from weightsync_engine.protocol.messages import EpochPhase, RoundPhase
from weightsync_engine.protocol.mover import MoverJoin, MoverState, MoverTransfer
from weightsync_engine.protocol.names import ENV_STEP_BYTES
from weightsync_engine.transport.store import open_store

HOST = "127.0.0.1"
KEY = "k" * 32
TRAINERS, TP, SERVERS = 2, 2, 2
HIDDEN, HEAD, VOCAB, PADDED = 16, 4, 13, 16
Q_ROWS, KV_ROWS = 32, 4  # 8 q heads, 1 kv head: fewer than tp
EXPERTS, EXPERT_ROWS = 2, 6
DTYPE = "bfloat16"


def shapes(layers: int) -> dict[str, tuple[int, ...]]:
    result: dict[str, tuple[int, ...]] = {"embed": (VOCAB, HIDDEN), "norm": (HIDDEN,)}
    for i in range(layers):
        result |= {f"{i}.{name}": (rows, HIDDEN) for name, rows, *_ in projections(i)}
        result |= {f"{i}.o": (HIDDEN, Q_ROWS), f"{i}.bias": (5,)}
        result |= {f"{i}.expert.{e}": (EXPERT_ROWS, HIDDEN) for e in range(EXPERTS)}
    return result


def projections(layer: int) -> list[tuple[str, int, int, int, int]]:
    """The parameters in `qkv`: name, rows, and where in it q, k and v begin (-1: it has none of that). Odd layers have
    them in one parameter already, where k and v live more often than q."""
    if layer % 2:
        return [("qkv", Q_ROWS + 2 * KV_ROWS, 0, Q_ROWS, Q_ROWS + KV_ROWS)]
    return [("q", Q_ROWS, 0, -1, -1), ("k", KV_ROWS, -1, 0, -1), ("v", KV_ROWS, -1, -1, 0)]


def sources(layers: int, dtype: str = DTYPE) -> tuple[SourceParameter, ...]:
    mesh = Mesh((TRAINERS,), tuple(range(TRAINERS)))
    return tuple(SourceParameter(n, s, dtype, mesh, (Shard(0),)) for n, s in shapes(layers).items())


def destinations(layers: int, tp_rank: int) -> tuple[list[Piece], dict[str, tuple[int, ...]]]:
    half_q = Q_ROWS // TP
    vocab = PADDED // TP
    rows = min(VOCAB - vocab * tp_rank, vocab)
    tensors: dict[str, tuple[int, ...]] = {"embed": (vocab, HIDDEN), "norm": (HIDDEN,)}
    pieces = [
        Piece("embed", Box((vocab * tp_rank, 0), (rows, HIDDEN)), "embed", (0, 0)),
        Piece("norm", Box((0,), (HIDDEN,)), "norm", (0,)),
    ]
    for i in range(layers):
        tensors |= {
            f"{i}.qkv": (half_q + 2 * KV_ROWS, HIDDEN), f"{i}.o": (HIDDEN, half_q), f"{i}.bias": (5,),
            f"{i}.experts": (EXPERTS, EXPERT_ROWS, HIDDEN),
        }  # fmt: skip
        live = {0: (half_q, 0), 1: (KV_ROWS, half_q), 2: (KV_ROWS, half_q + KV_ROWS)}
        for name, _, *begins in projections(i):
            for part, begin in enumerate(begins):
                rows, at = live[part]
                start = begin + (half_q * tp_rank if part == 0 else 0)
                if begin >= 0:
                    pieces.append(Piece(f"{i}.{name}", Box((start, 0), (rows, HIDDEN)), f"{i}.qkv", (at, 0)))
        pieces += [
            Piece(f"{i}.o", Box((0, half_q * tp_rank), (HIDDEN, half_q)), f"{i}.o", (0, 0)),
            Piece(f"{i}.bias", Box((0,), (5,)), f"{i}.bias", (0,)),
            *(
                Piece(f"{i}.expert.{e}", Box((0, 0), (EXPERT_ROWS, HIDDEN)), f"{i}.experts", (e, 0, 0))
                for e in range(EXPERTS)
            ),
        ]
    return pieces, tensors


@dataclass
class Member:
    """One rank: its slab, its supervisor, a driver."""

    rank: int
    server: str
    slab: Slab
    manifest: TrainerManifest | WorkerManifest
    supervisor: MoverSupervisor
    client: MoverClient

    def view(self, name: str) -> torch.Tensor:
        return self.slab.tensor(self.manifest.tensors[name])


@dataclass
class Fleet:
    """Start with `Fleet.start`; `close` lets everything go. Epochs and rounds count up by themselves."""

    members: list[Member]
    layers: int
    epoch: int = 0
    round: int = 0
    sequence: int = 0
    values: dict[str, torch.Tensor] = field(default_factory=dict)
    store: object = None

    @classmethod
    async def start(
        cls,
        folder: Path,
        layers: int = 2,
        spare: Collection[int] = (),
        on_outcome=None,
        device: str = "cpu",
        env: dict[str, str] | None = None,
        staging_bytes: int = 0,
        supervisor: Callable[..., MoverSupervisor] = MoverSupervisor,
    ) -> Fleet:
        """All movers up; the ranks in `spare` have a spare mover."""
        members = []
        for rank in range(TRAINERS + SERVERS * TP):
            slab, manifest = make(rank, layers, device=device)
            role = "trainer" if rank < TRAINERS else "inference"
            parent = supervisor(
                role,
                rank,
                slab,
                manifest,
                folder,
                on_outcome,
                spare=rank in spare,
                env={ENV_STEP_BYTES: "256", **(env or {})},
                staging_bytes=staging_bytes,
            )
            server = "trainer" if rank < TRAINERS else f"server-{(rank - TRAINERS) // TP}"
            members.append(
                Member(rank, server, slab, manifest, parent, MoverClient(parent.socket_path).start())
            )
        fleet = cls(members, layers)
        try:
            await asyncio.gather(*(m.client.wait_for(lambda s: s is not None, 60) for m in members))
        except BaseException:
            await fleet.close()
            raise
        return fleet

    async def close(self) -> None:
        for m in self.members:
            await m.client.close()
            m.supervisor.close()
            m.slab.close()

    async def join(self, deadline: float = 20.0, want=EpochPhase.JOINED, **changed) -> list[MoverState]:
        """A new epoch of all members; `changed` overrides the request of one rank: `rank_3={"key": ...}`."""
        self.epoch += 1
        self.round = 0
        self.store, rendezvous = open_store(HOST)
        for m in self.members:
            fields = {
                "object_uid": "uid", "term": 1, "epoch": self.epoch, "rank": m.rank, "key": KEY, "host": HOST,
                "world_size": len(self.members), "trainer_ranks": TRAINERS, "rendezvous": rendezvous,
                "transport": "auto", "server": m.server, "deadline_seconds": deadline,
                "who": f"pod {m.server}, worker {m.rank}",
            }  # fmt: skip
            m.client.send(MoverJoin(**{**fields, **changed.get(f"rank_{m.rank}", {})}))
        return await self.each(
            lambda s: (
                s is not None
                and s.epoch is not None
                and s.epoch.epoch == self.epoch
                and s.epoch.phase != EpochPhase.JOINING
            ),
            deadline + 5,
            lambda s: s.epoch.phase == want,
        )

    async def each(self, ended, timeout: float, good=lambda s: True, members=None) -> list[MoverState]:
        found = await asyncio.gather(*(m.client.wait_for(ended, timeout) for m in members or self.members))
        for state in found:
            assert good(state), found
        return list(found)

    def publish(self, version: str, sequence: int | None = None, seed: int | None = None) -> None:
        """New random bits in every snapshot (the same for the same seed), stamped, and told to the movers."""
        self.sequence = sequence or self.sequence + 1
        generator = torch.Generator().manual_seed(seed or self.sequence)
        self.values = {
            n: torch.randint(-(1 << 15), 1 << 15, s, generator=generator, dtype=torch.int16).view(
                torch.bfloat16
            )
            for n, s in shapes(self.layers).items()
        }
        for m in self.members[:TRAINERS]:
            m.slab.begin_write()
            for source in m.manifest.sources:
                box = shard_boxes(source)[m.rank]
                if box is not None:
                    value = self.values[source.name][tuple(map(slice, box.start, box.stop))]
                    m.view(source.name).copy_(value.to(m.view(source.name).dtype))
            m.slab.stamp_after_copies(version, self.sequence)
            m.supervisor.published()

    def transfer(self, version: str, deadline: float = 20.0) -> None:
        self.round += 1
        for m in self.members:
            if m.client.state is not None:
                m.client.send(
                    MoverTransfer(
                        epoch=self.epoch, round=self.round, version=version, deadline_seconds=deadline
                    )
                )

    def ended(self, state: MoverState | None) -> bool:
        return (
            state is not None
            and state.round is not None
            and state.round.round == self.round
            and state.round.phase != RoundPhase.TRANSFERRING
        )

    async def transferred(
        self, timeout: float = 25.0, want=RoundPhase.VERIFIED, members=None
    ) -> list[MoverState]:
        return await self.each(self.ended, timeout, lambda s: s.round.phase == want, members)

    async def new_mover(self, member: Member, old_id: str) -> MoverState:
        return await member.client.wait_for(lambda s: s is not None and s.mover_id != old_id, 60)

    def check_bits(self) -> None:
        """Every worker's shadow equals the published values, bit for bit."""
        for m in self.members[TRAINERS:]:
            for piece in m.manifest.pieces:
                region = piece.region
                got = m.view(piece.tensor)[tuple(map(slice, region.start, region.stop))].cpu()
                got = got.reshape(piece.box.shape)
                want = self.values[piece.name][tuple(map(slice, piece.box.start, piece.box.stop))]
                assert torch.equal(got.view(torch.int16), want.view(torch.int16)), (m.rank, piece)


def make(
    rank: int,
    layers: int,
    dtype: str = DTYPE,
    rows: int = 0,
    rename: str = "",
    mesh: int = TRAINERS,
    device: str = "cpu",
) -> tuple[Slab, TrainerManifest | WorkerManifest]:
    """Slab and manifest of a rank. A worker's norm can have another dtype, more rows or another name."""
    if rank < TRAINERS:
        held = sources(layers, dtype)
        boxes = {s.name: shard_boxes(s)[rank] for s in held}
        tensors, size = plan_slab((n, b.shape, dtype) for n, b in boxes.items() if b is not None)
        return Slab.create(size, device), TrainerManifest(rank, held, tensors)
    pieces, live = destinations(layers, (rank - TRAINERS) % TP)
    expected = {n: Expected(s, DTYPE) for n, s in shapes(layers).items()}
    if dtype != DTYPE or rows or rename:
        name = rename or "norm"
        live["norm"] = (HIDDEN + rows,)
        del expected["norm"]
        expected[name] = Expected((HIDDEN + rows,), dtype)
        pieces = [p for p in pieces if p.name != "norm"]
        pieces.append(Piece(name, Box((0,), (HIDDEN + rows,)), "norm", (0,)))
    tensors, size = plan_slab((n, s, dtype if n == "norm" else DTYPE) for n, s in live.items())
    return Slab.create(size, device), WorkerManifest(expected, tuple(pieces), tensors, {}, {"head": "embed"})


@contextlib.contextmanager
def stopped(pid: int):
    """The process is frozen inside the block."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


async def until(predicate, timeout: float, what: str) -> None:
    """Poll with a deadline."""
    deadline = time.monotonic() + timeout
    while not predicate():
        assert time.monotonic() < deadline, f"not within {timeout} s: {what}"
        await asyncio.sleep(0.02)
