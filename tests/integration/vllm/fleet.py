"""The other side of a round: trainer ranks with real movers and a real agent, and the operator's steps."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import uvicorn
from starlette.applications import Starlette
from tests.integration.vllm import tiny
from tests.integration.vllm.serving import Operator, VllmProcess, free_port

from weightsync_engine.agent.core import AgentCore
from weightsync_engine.agent.credentials import KeySource, TokenVerifier
from weightsync_engine.agent.routes import routes
from weightsync_engine.layout.tensors import Mesh, Shard, SourceParameter, TrainerManifest
from weightsync_engine.mover.slab import Slab, plan_slab
from weightsync_engine.mover.supervisor import MoverSupervisor
from weightsync_engine.protocol.messages import AgentState, EpochPhase, RoundPhase
from weightsync_engine.protocol.names import DEFAULT_OPERATOR
from weightsync_engine.protocol.session import Pod
from weightsync_engine.transport.store import open_store

RANKS = 2
SECONDS = 90.0
"""Deadline of every phase: the machine may be busy."""


class _Store:
    def __init__(self, host: str) -> None:
        self._store, rendezvous = open_store(host)
        self.port = rendezvous.port

    def close(self) -> None:
        del self._store


class Trainer:
    """Two trainer ranks of one pod: slabs sharded along dimension 0, movers, and the pod's agent on a
    thread. It sends the parameters of `like`, and those of a draft model."""

    def __init__(
        self, folder: Path, operator: Operator, like: Path, device: str = "cpu", draft: Path | None = None
    ) -> None:
        weights = sorted(_weights(like, draft).items())
        mesh = Mesh((RANKS,), tuple(range(RANKS)))
        sources = tuple(
            SourceParameter(n, tuple(t.shape), _name(t.dtype), mesh, (Shard(0),)) for n, t in weights
        )
        self.slabs: list[Slab] = []
        self.places: list[dict[str, Any]] = []
        self.movers: list[MoverSupervisor] = []
        self.sequence = 0
        for rank in range(RANKS):
            local = [
                (name, tuple(part.shape), _name(part.dtype))
                for name, tensor in weights
                if (part := _share(tensor, rank)) is not None
            ]
            places, size = plan_slab(local)
            slab = Slab.create(size, device)
            manifest = TrainerManifest(rank, sources, places)
            self.slabs.append(slab)
            self.places.append(places)
            self.movers.append(MoverSupervisor("trainer", rank, slab, manifest, folder / "run"))
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._jwks = operator.jwks
        self._up = threading.Event()
        self._stop: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        assert self._up.wait(30)

    def publish(self, checkpoint: Path, version: str, draft: Path | None = None) -> None:
        """The snapshot copy of all ranks."""
        weights = _weights(checkpoint, draft)
        self.sequence += 1
        for rank in range(RANKS):
            slab = self.slabs[rank]
            slab.begin_write()
            for name, place in self.places[rank].items():
                share = _share(weights[name], rank)
                assert share is not None
                slab.tensor(place).copy_(share)
            slab.stamp_after_copies(version, self.sequence)
            self.movers[rank].published()

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        pod = Pod(
            "trainer", uuid.uuid4().hex, "trainer-0", None, "127.0.0.1", RANKS,
            run_id=uuid.uuid4().hex, trainer_ranks=tuple(range(RANKS)), trainer_world=RANKS,
        )  # fmt: skip
        core = AgentCore(pod, [m.socket_path for m in self.movers], open_store=_Store)
        verifier = TokenVerifier(KeySource(str(self._jwks)), "rl", None, DEFAULT_OPERATOR)
        app = Starlette(routes=list(routes(core, verifier)))
        server = uvicorn.Server(
            uvicorn.Config(app, host="127.0.0.1", port=self.port, log_config=None, lifespan="off")
        )
        await core.start()
        serving = asyncio.create_task(server.serve())
        while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0.01)
        self._up.set()
        await self._stop.wait()
        server.should_exit = True
        await core.close()
        await serving

    def close(self) -> None:
        if self._loop is not None and self._stop is not None:
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(20)
        for mover in self.movers:
            mover.close()


def _weights(checkpoint: Path, draft: Path | None) -> dict[str, torch.Tensor]:
    more = {f"draft.{name}": tensor for name, tensor in tiny.load(draft).items()} if draft else {}
    return tiny.load(checkpoint) | more


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _share(tensor: torch.Tensor, rank: int) -> torch.Tensor | None:
    """A rank's part as torch.chunk cuts it; None where it has none."""
    chunks = torch.chunk(tensor, RANKS, dim=0)
    return chunks[rank] if rank < len(chunks) else None


class Fleet:
    """One trainer and some servers, and what the operator does with them."""

    def __init__(self, operator: Operator, trainer: Trainer, servers: Sequence[VllmProcess]) -> None:
        self.operator, self.trainer, self.servers = operator, trainer, list(servers)
        self.epoch = 0
        self.round = 0

    @property
    def urls(self) -> list[str]:
        return [self.trainer.url, *(s.url for s in self.servers)]

    def boot(self, url: str) -> str:
        return self.operator.state(url).boot_id

    def tell(self, verb: str, **body: Any) -> None:
        """To every agent, the trainer's first."""
        for url in self.urls:
            self.operator.tell(url, verb, self.boot(url), **body)

    def until(self, holds: Any, what: str, seconds: float = SECONDS) -> list[AgentState]:
        return [self.operator.until(url, holds, seconds, what) for url in self.urls]

    def join(self) -> list[AgentState]:
        """A new epoch of everybody."""
        self.epoch += 1
        workers = [self.operator.state(s.url).inference.workers for s in self.servers]  # type: ignore[union-attr]
        common = {
            "epoch": self.epoch, "world_size": RANKS + sum(workers), "trainer_ranks": RANKS,
            "key": secrets.token_hex(32), "lead_agent": {"host": "127.0.0.1", "port": self.trainer.port},
            "deadline_seconds": SECONDS,
        }  # fmt: skip
        lead = self.trainer.url
        self.operator.tell(lead, "join", self.boot(lead), first_rank=0, **common)
        state = self.operator.until(
            lead,
            lambda s: s.epoch is not None and s.epoch.rendezvous is not None,
            SECONDS,
            "the store listens",
        )
        assert state.epoch is not None and state.epoch.rendezvous is not None
        where = state.epoch.rendezvous.model_dump()
        rank = RANKS
        for server, count in zip(self.servers, workers, strict=True):
            boot = self.boot(server.url)
            self.operator.tell(server.url, "join", boot, first_rank=rank, rendezvous=where, **common)
            rank += count
        return self.until(
            lambda s: (
                s.epoch is not None
                and s.epoch.epoch == self.epoch
                and s.epoch.phase is not EpochPhase.JOINING
            ),
            "all have joined",
        )

    def joined(self) -> None:
        for state in self.join():
            assert state.epoch is not None and state.epoch.phase is EpochPhase.JOINED, state

    def prepare(self, version: str, **flip: str) -> None:
        self.round += 1
        self.tell(
            "prepare", epoch=self.epoch, round=self.round, version=version,
            deadline_seconds=SECONDS, decide_by_seconds=3600, flip=flip,
        )  # fmt: skip
        self._phase(RoundPhase.READY)

    def transfer(self) -> None:
        self.tell("transfer", epoch=self.epoch, round=self.round, deadline_seconds=SECONDS)
        self._phase(RoundPhase.VERIFIED)

    def halt(self, *servers: VllmProcess, seconds: float = SECONDS) -> None:
        """All servers, or these, generate nothing until the round is over."""
        for server in servers or self.servers:
            boot = self.boot(server.url)
            self.operator.tell(
                server.url, "halt", boot, epoch=self.epoch, round=self.round, deadline_seconds=seconds
            )
        for server in servers or self.servers:
            self.operator.until(server.url, halted(self.round), SECONDS, "halted")

    def abort(self) -> None:
        why = {"reason": "Test", "message": "no more"}
        self.tell("abort", epoch=self.epoch, round=self.round, problem=why)

    def commit(self, version: str) -> None:
        self.tell("commit", epoch=self.epoch, round=self.round, version=version, deadline_seconds=30)
        self._phase(RoundPhase.COMMITTED)

    def admit(self, version: str | None) -> None:
        more = {"version": version, "after": self.round}
        for server in self.servers:
            self.operator.until(
                server.url,
                lambda _, url=server.url: (
                    self.operator.post(url, "admit", self.boot(url), **more).status_code == 200
                ),
                30,
                f"admitted with {version}",
            )

    def sync(self, checkpoint: Path, version: str) -> None:
        """A whole round."""
        self.trainer.publish(checkpoint, version)
        self.prepare(version)
        self.transfer()
        self.commit(version)
        self.admit(version)

    def _phase(self, wanted: RoundPhase) -> None:
        def settled(state: AgentState) -> bool:
            r = state.round
            return r is not None and r.round == self.round and (r.phase is wanted or r.problem is not None)

        for state in self.until(settled, f"round {self.round} is {wanted}"):
            assert state.round is not None and state.round.phase is wanted, state.round


@contextlib.contextmanager
def together(
    folder: Path, operator: Operator, checkpoint: Path, servers: Sequence[VllmProcess]
) -> Iterator[Fleet]:
    """Servers that have started, and a trainer of the same model, in an epoch; requests get through."""
    trainer = None
    try:
        for server in servers:
            server.start()
        for server in servers:
            server.wait_up()
        trainer = Trainer(folder / "trainer", operator, checkpoint)
        fleet = Fleet(operator, trainer, servers)
        fleet.joined()
        fleet.admit(None)
        for server in servers:
            # A server's first answer may take seconds: in one that is late no request would run beside another's.
            server.greedy(tiny.PROMPT, 8)
        yield fleet
    finally:
        if trainer is not None:
            trainer.close()
        for server in servers:
            server.kill()


def halted(round_: int) -> Any:
    """Whether a state says that the pod has halted for this round."""

    def says(state: AgentState) -> bool:
        mark = state.inference.halted if state.inference is not None else None
        return mark is not None and mark.round == round_

    return says


def switch(tokens: list[int], prompt: list[int], old: tiny.Reference, new: tiny.Reference) -> int:
    """Where a stream went over from the old weights to the new ones: all before is greedy of the old, all
    after it greedy of the new on the very same prefix. Fails if there is no such place: tokens lost, mixed or
    made of both."""
    before = old.greedy(prompt, len(tokens))
    longest = next((i for i, (a, b) in enumerate(zip(tokens, before, strict=True)) if a != b), len(tokens))
    for k in range(longest, -1, -1):
        if k == len(tokens) or new.greedy(prompt + tokens[:k], len(tokens) - k) == tokens[k:]:
            return k
    raise AssertionError(f"no clean switch in {tokens}; old weights explain the first {longest}")


@contextlib.contextmanager
def timed(what: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    print(f"{what}: {time.perf_counter() - started:.3f} s")
