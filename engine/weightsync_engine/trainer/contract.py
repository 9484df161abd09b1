"""vLLM's own trainer contract, for trainers that are written against it, without an operator or Kubernetes.

    from weightsync_engine.trainer.contract import ModelSource, Servers, TrainerInit
    client = Servers([HTTPVLLMWeightSyncClient(url) for url in urls], workers=[2, 2])
    engine = WeightTransferTrainerFactory.trainer_init(
        TrainerInit(rank=rank, num_trainer_ranks=8, world_size=12, master_address=ip), client=client,
        source=ModelSource(model))
    engine.send_weights("step-1")

Every trainer rank takes a snapshot and drives its own mover; rank 0 also drives the servers through the client. What
the contract leaves to the trainer stays with it: when servers pause, and what becomes of their caches.
"""

from __future__ import annotations

import base64
import binascii
import json
import logging
import secrets
import socket
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Self

import torch
from torch import nn
from vllm.distributed.weight_transfer.base import (
    ModuleSource,
    ParamMeta,
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
    WeightTransferUpdatePayload,
    materialize_full_tensor,
)
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from ..agent.core import pod_address
from ..mover.client import drive, join_epoch, run_transfer
from ..protocol.messages import Rendezvous
from ..protocol.mover import MoverJoin, MoverTransfer
from ..protocol.names import BACKEND
from ..transport.store import open_store
from .handle import PublishError
from .merge import merge
from .naming import Names
from .publisher import Publisher
from .sources import Held, Sources, WireDtype

log = logging.getLogger(__name__)

RPC_BEYOND_SECONDS = 10.0
"""How long a server may take to answer beyond the deadline that it was given."""
EPOCH = 1


@dataclass(frozen=True)
class Meeting:
    """Where an epoch meets, and the secret that its members share."""

    host: str
    port: int
    key: str = field(repr=False)


def unique_id(host: str | None = None) -> str:
    """A new meeting place at a free port of `host` (default: this machine's address), as one opaque string.

    For `TrainerInit.unique_id` of every trainer rank; rank 0 must run where it was made. It holds the secret of the
    epoch: hand it out as one.
    """
    host = host or pod_address()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        said = {"host": host, "port": probe.getsockname()[1], "key": secrets.token_hex(32)}
    return base64.urlsafe_b64encode(json.dumps(said).encode()).decode()


def read_unique_id(text: str) -> Meeting:
    """Raises ValueError for anything that `unique_id` did not make."""
    try:
        said = json.loads(base64.urlsafe_b64decode(text.encode()))
        return Meeting(str(said["host"]), int(said["port"]), str(said["key"]))
    except (binascii.Error, ValueError, KeyError, TypeError) as e:
        raise ValueError(f"the unique id is none that unique_id() made: {type(e).__name__}") from None


@dataclass(kw_only=True)
class TrainerInit(TrainerInitInfo):  # type: ignore[misc]
    """What every trainer rank gives to `trainer_init`: the place to meet by `unique_id`, or by `master_address` and
    `master_port` (0: a free one; both are rank 0's)."""

    backend: ClassVar[str] = BACKEND

    world_size: int
    """Trainer ranks and the workers of all servers."""
    num_trainer_ranks: int = 1
    master_address: str | None = None
    master_port: int = 0
    unique_id: str | None = field(default=None, repr=False)
    transport: str = "auto"
    deadline_seconds: float = 120.0
    """For joining, and for each update."""
    names_per_update: int = 0
    """Names in one call of the servers' `update_weights`; 0: all in one."""

    def __post_init__(self) -> None:
        if not 0 < self.num_trainer_ranks < self.world_size:
            raise ValueError(
                f"num_trainer_ranks is {self.num_trainer_ranks} and world_size {self.world_size}: it counts trainer "
                "ranks and all workers, and there must be some of both"
            )
        if not 0 <= self.rank < self.num_trainer_ranks:
            raise ValueError(f"rank {self.rank} is none of {self.num_trainer_ranks} trainer ranks")
        if (self.unique_id is None) == (self.master_address is None):
            raise ValueError("give either unique_id, or master_address and master_port")
        if self.deadline_seconds <= 0 or self.names_per_update < 0:
            raise ValueError("deadline_seconds must be positive, and names_per_update not negative")
        if self.unique_id is not None:
            read_unique_id(self.unique_id)


class ModelSource(WeightSource):  # type: ignore[misc]
    """A model's own shards, under the checkpoint's names; `names` and `dtype` as for `Publisher`. Through this backend
    nothing is gathered; iterating it, as other backends do, gathers one whole tensor at a time."""

    def __init__(self, model: nn.Module, *, names: Names = None, dtype: WireDtype = None) -> None:
        self.model, self.names, self.dtype = model, names, dtype

    def _declared(self) -> list[ParamMeta]:
        merged = merge([[held.describe() for held in self._held()]])
        return [ParamMeta(s.name, getattr(torch, s.dtype), s.shape) for s in merged]

    # vLLM 0.32 calls `metadata` and iterates the source, 0.33 reads it and asks for `iter_full`.
    metadata = cached_property(_declared) if isinstance(WeightSource.metadata, property) else _declared

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Each parameter whole, gathered from its ranks: a collective."""
        held = {h.name: h for h in self._held()}
        at, whole = "", torch.empty(0)
        for source in merge([[h.describe() for h in held.values()]]):
            if source.tensor != at:
                at, whole = source.tensor, materialize_full_tensor(held[source.tensor].tensor.detach())
            region = whole
            for dim, (start, extent) in enumerate(zip(source.region.start, source.region.shape, strict=True)):
                region = region.narrow(dim, start, extent)
            yield source.name, region.reshape(source.shape).to(getattr(torch, source.dtype))

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.iter_full()

    def _held(self) -> list[Held]:
        return Sources(self.model, self.names, self.dtype).held()


class Servers:
    """Several vLLM servers as one client of the contract: each call goes to all of them at once.

    `workers`: of each server (its TP x PP x DP); their ranks follow each other in this order.
    """

    def __init__(self, clients: Sequence[VLLMWeightSyncClient], workers: Sequence[int]) -> None:
        if not clients or len(clients) != len(workers) or min(workers) < 1:
            raise ValueError(f"{len(clients)} clients with workers {list(workers)}: give each server's count")
        self._clients, self._workers = list(clients), list(workers)
        self._pool = ThreadPoolExecutor(len(clients), thread_name_prefix="weightsync-server")

    @property
    def workers(self) -> int:
        """Of all servers together."""
        return sum(self._workers)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        first, infos = init_info["rank_offset"], list[dict[str, Any]]()
        for count in self._workers:
            infos.append({**init_info, "rank_offset": first})
            first += count
        self._all(lambda i, client: client.init_weight_transfer_engine(infos[i]))

    def start_weight_update(self) -> None:
        self._all(lambda _, client: client.start_weight_update())

    def update_weights(self, update_info: WeightTransferUpdatePayload) -> None:
        self._all(lambda _, client: client.update_weights(update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._all(lambda _, client: client.finish_weight_update(weight_version))

    def _all(self, call: Callable[[int, VLLMWeightSyncClient], None]) -> None:
        """Raises the error that came first, which is the cause as a rule, once all have answered."""
        futures = {self._pool.submit(call, i, client): i for i, client in enumerate(self._clients)}
        errors = [(futures[f], e) for f in as_completed(futures) if (e := f.exception()) is not None]
        if errors:
            which, error = errors[0]
            raise RuntimeError(
                f"server {which} of {len(futures)}: {type(error).__name__}: {error}"
            ) from error


class TrainerEngine(TrainerWeightTransferEngine[TrainerInit]):  # type: ignore[misc]
    """One trainer rank: its snapshot, its mover; rank 0 drives the servers."""

    init_info_cls = TrainerInit

    def __init__(
        self, init_info: TrainerInit, client: VLLMWeightSyncClient, source: WeightSource | None
    ) -> None:
        super().__init__(client=client, source=source, is_sender=init_info.is_sender)
        self.rank = init_info.rank
        if (
            isinstance(client, Servers)
            and client.workers != init_info.world_size - init_info.num_trainer_ranks
        ):
            raise ValueError(
                f"world_size is {init_info.world_size} with {init_info.num_trainer_ranks} trainer ranks, but the "
                f"servers have {client.workers} workers together: it must be the sum, or all wait for nobody"
            )
        self._init = init_info
        self._round = 0
        self._store: object = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="weightsync-servers")
        model, names, dtype = _model_of(source)
        self._publisher = Publisher(
            model, names=names, dtype=dtype, timeout=init_info.deadline_seconds, agent=False
        )

    @classmethod
    def trainer_init(
        cls, init_info: TrainerInit, *, client: VLLMWeightSyncClient, source: WeightSource | None = None
    ) -> Self:
        """Meet the servers. Raises the same error on all trainer ranks, and leaves nothing behind."""
        engine = cls(init_info, client, source)
        try:
            engine._meet()
        except BaseException:
            engine.shutdown()
            raise
        return engine

    def _meet(self) -> None:
        init, error = self._init, ""
        said: dict[str, Any] = {"rank": init.rank, "world": [init.world_size, init.num_trainer_ranks]}
        if init.is_sender:
            try:
                said |= self._open()
            except (OSError, ValueError) as e:
                error = f"rank 0 cannot open the meeting place: {e}"
        every = self._publisher.agree("trainer_init", error, said)
        ranks, worlds = [rank["rank"] for rank in every], [rank["world"] for rank in every]
        if ranks != list(range(init.num_trainer_ranks)) or any(world != worlds[0] for world in worlds):
            raise PublishError(
                f"the trainer's processes gave ranks {ranks} and [world_size, num_trainer_ranks] {worlds}: each rank "
                f"of torch.distributed must give its own, and all the same world"
            )
        where = every[0]
        asked = self._ask(lambda: self.client.init_weight_transfer_engine(self._worker_init(where)))
        join = MoverJoin(
            object_uid=where["uid"],
            term=1,
            epoch=EPOCH,
            rank=init.rank,
            world_size=init.world_size,
            trainer_ranks=init.num_trainer_ranks,
            rendezvous=Rendezvous(host=where["host"], port=where["port"]),
            key=where["key"],
            host=pod_address(),
            transport=init.transport,
            server="trainer",
            deadline_seconds=init.deadline_seconds,
        )
        problem = drive(join_epoch(self._publisher.mover_socket, join), init.deadline_seconds)
        self._agree("trainer_init", problem.message if problem else "", asked)

    def _open(self) -> dict[str, Any]:
        init = self._init
        if init.unique_id is not None:
            meeting = read_unique_id(init.unique_id)
        else:
            assert init.master_address is not None
            meeting = Meeting(init.master_address, init.master_port, secrets.token_hex(32))
        self._store, rendezvous = open_store(meeting.host, meeting.port)
        return {
            "host": rendezvous.host, "port": rendezvous.port, "key": meeting.key, "uid": f"vllm-{uuid.uuid4().hex}",
        }  # fmt: skip

    def _worker_init(self, where: dict[str, Any]) -> dict[str, Any]:
        init = self._init
        return {
            "rank_offset": init.num_trainer_ranks, "world_size": init.world_size,
            "trainer_ranks": init.num_trainer_ranks, "master_address": where["host"], "master_port": where["port"],
            "key": where["key"], "object_uid": where["uid"], "epoch": EPOCH, "transport": init.transport,
            "deadline_seconds": init.deadline_seconds, "names": list(self._publisher.names),
        }  # fmt: skip

    def send_weights(self, weight_version: str | None = None) -> None:
        """One update: snapshot, transfer, flip. `weight_version` as `Publisher.publish` wants it; default: `update-N`.

        Raises the same error on all trainer ranks; then the servers hold what they held, unless it says that
        finishing failed.
        """
        self._round += 1
        version, seconds = weight_version or f"update-{self._round}", self._init.deadline_seconds
        self._publisher.publish(version, on_busy="wait")
        started = self._ask(self.client.start_weight_update)
        self._agree("start_weight_update", "", started)
        asked = self._ask(lambda: self._update(version))
        transfer = MoverTransfer(epoch=EPOCH, round=self._round, version=version, deadline_seconds=seconds)
        problem = drive(run_transfer(self._publisher.mover_socket, transfer), seconds)
        self._agree("update_weights", problem.message if problem else "", asked)
        finished = self._ask(lambda: self.client.finish_weight_update(version))
        self._agree("finish_weight_update", "", finished)

    def _update(self, version: str) -> None:
        info = {"version": version, "round": self._round, "deadline_seconds": self._init.deadline_seconds}
        names = list(self._publisher.names)
        size = self._init.names_per_update or len(names)
        for at in range(0, len(names), size):
            self.client.update_weights({**info, "names": names[at : at + size]})

    def _ask(self, call: Callable[[], None]) -> Future[None] | None:
        """Rank 0 asks the servers, beside what it does itself."""
        return self._pool.submit(call) if self.is_sender else None

    def _agree(self, what: str, error: str, asked: Future[None] | None) -> None:
        """All ranks go on, or all raise what went wrong first. What a server says is the cause, as a rule."""
        if asked is not None:
            try:
                asked.result(self._init.deadline_seconds + RPC_BEYOND_SECONDS)
            except FutureTimeout:
                error = error or f"the servers did not answer {what} in {self._init.deadline_seconds:g} s"
            except Exception as e:
                error = f"{what}: {e}" + (f" ({error})" if error else "")
        # The other ranks wait as long as the servers may take.
        self._publisher.agree(what, error, {}, patience=2.0)

    def shutdown(self) -> None:
        """Let mover and snapshot go. Idempotent; waits for nobody."""
        self._publisher.close()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._store = None


def _model_of(source: WeightSource | None) -> tuple[nn.Module, Names, WireDtype]:
    if isinstance(source, ModelSource):
        return source.model, source.names, source.dtype
    if isinstance(source, ModuleSource):
        return source._module, None, None
    raise TypeError(
        f"the backend {BACKEND!r} sends a model's own shards and needs a source that gives the model: "
        f"weightsync_engine.trainer.contract.ModelSource (or vLLM's ModuleSource), not {type(source).__name__}"
    )


if BACKEND not in WeightTransferTrainerFactory._registry:
    WeightTransferTrainerFactory.register_engine(BACKEND, TrainerEngine)
