"""vLLM's trainer contract: what is checked before anybody is met, and how several servers are one client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from vllm.distributed.weight_transfer.base import WeightSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from weightsync_engine.mover.client import drive, join_epoch
from weightsync_engine.protocol.messages import Rendezvous
from weightsync_engine.protocol.mover import MoverJoin
from weightsync_engine.trainer.contract import ModelSource, Servers, TrainerInit, read_unique_id, unique_id

WHERE: dict[str, Any] = {"master_address": "10.0.0.1"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"rank": 0, "world_size": 1, **WHERE}, "some of both"),
        ({"rank": 0, "world_size": 2, "num_trainer_ranks": 0, **WHERE}, "some of both"),
        ({"rank": 2, "world_size": 4, "num_trainer_ranks": 2, **WHERE}, "rank 2 is none of 2"),
        ({"rank": 0, "world_size": 2}, "either unique_id, or master_address"),
        ({"rank": 0, "world_size": 2, "unique_id": "x", **WHERE}, "either unique_id, or master_address"),
        ({"rank": 0, "world_size": 2, "unique_id": "nonsense"}, "none that unique_id"),
        ({"rank": 0, "world_size": 2, "deadline_seconds": 0, **WHERE}, "must be positive"),
    ],
)
def test_what_cannot_be_met_is_told_before_anybody_waits(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        TrainerInit(**given)


def test_a_unique_id_holds_a_place_and_a_secret_and_does_not_show_them() -> None:
    made = unique_id("127.0.0.1")
    meeting = read_unique_id(made)
    assert (meeting.host, len(meeting.key)) == ("127.0.0.1", 64)
    assert meeting.key != read_unique_id(unique_id("127.0.0.1")).key
    assert meeting.key not in repr(meeting)
    assert made not in repr(TrainerInit(rank=0, world_size=2, unique_id=made))


def test_the_backend_is_known_by_name_and_wants_a_source_that_gives_a_model() -> None:
    class Stream(WeightSource):
        def metadata(self) -> list[Any]:
            return []

        def __iter__(self) -> Any:
            return iter(())

    init = TrainerInit(rank=0, world_size=2, **WHERE)
    with pytest.raises(TypeError, match="ModelSource"):
        WeightTransferTrainerFactory.trainer_init(init, client=Servers([Client()], [1]), source=Stream())


def test_a_world_that_is_not_the_sum_of_its_members_is_told_before_anybody_waits() -> None:
    init = TrainerInit(rank=0, world_size=4, **WHERE)
    servers = Servers([Client(), Client()], [1, 1])
    with pytest.raises(
        ValueError, match="world_size is 4 with 1 trainer ranks, but the servers have 2 workers"
    ):
        WeightTransferTrainerFactory.trainer_init(init, client=servers, source=ModelSource(nn.Linear(2, 2)))


def test_a_mover_that_nobody_finds_ends_at_the_deadline_with_its_path(tmp_path: Path) -> None:
    join = MoverJoin(
        object_uid="u", term=1, epoch=1, rank=0, world_size=2, trainer_ranks=1, key="k" * 64, host="127.0.0.1",
        rendezvous=Rendezvous(host="127.0.0.1", port=1), transport="gloo", server="s", deadline_seconds=0.2,
    )  # fmt: skip
    problem = drive(join_epoch(tmp_path / "none.sock", join), join.deadline_seconds)
    assert problem is not None
    assert problem.reason == "MoverLate"
    assert "none.sock" in problem.message and "log" in problem.message


class Client:
    def __init__(self, broken: str = "") -> None:
        self.calls: list[Any] = []
        self.broken = broken

    def _called(self, name: str, *what: Any) -> None:
        self.calls.append((name, *what))
        if name == self.broken:
            raise ConnectionError("gone")

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._called("init", init_info)

    def start_weight_update(self) -> None:
        self._called("start")

    def update_weights(self, update_info: Any) -> None:
        self._called("update", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._called("finish", weight_version)


def test_several_servers_get_ranks_that_follow_each_other() -> None:
    clients = [Client(), Client(), Client()]
    servers = Servers(clients, [2, 1, 4])
    servers.init_weight_transfer_engine({"rank_offset": 8, "world_size": 15})
    assert [c.calls[0][1]["rank_offset"] for c in clients] == [8, 10, 11]
    servers.start_weight_update()
    servers.update_weights({"round": 1})
    servers.finish_weight_update("v")
    assert [c.calls[1:] for c in clients] == [[("start",), ("update", {"round": 1}), ("finish", "v")]] * 3


def test_a_server_that_fails_is_named_once_all_have_answered() -> None:
    clients = [Client(), Client(broken="start")]
    with pytest.raises(RuntimeError, match="server 1 of 2: ConnectionError: gone"):
        Servers(clients, [1, 1]).start_weight_update()
    assert clients[0].calls == [("start",)]
    with pytest.raises(ValueError, match="give each server's count"):
        Servers(clients, [1])


def test_a_models_source_tells_and_yields_the_same_for_other_backends() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3))
    source = ModelSource(model, dtype=torch.bfloat16)
    told = {meta.name: (meta.dtype, meta.shape) for meta in source.metadata()}
    for _ in range(2):  # each pass is a fresh one
        found = dict(source)
        assert {name: (t.dtype, tuple(t.shape)) for name, t in found.items()} == told
        assert torch.equal(found["0.weight"], model[0].weight.detach().bfloat16())
