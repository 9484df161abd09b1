"""Rank 0's judgement over the digests of all ranks, and its one word for the weights."""

from __future__ import annotations

import pytest
import torch
from tests.unit.engine.plan.test_compile import fsdp, manifest, rows

from weightsync_engine.layout.shards import shard_boxes
from weightsync_engine.layout.tensors import Replicate, SourceParameter, WorkerManifest
from weightsync_engine.mover.verify import (
    Sums,
    content_of,
    judge_digests,
    of_sources,
    of_targets,
    sent_sums,
)
from weightsync_engine.plan.compile import compile_plan
from weightsync_engine.plan.groups import Worker
from weightsync_engine.plan.plan import LocalPart
from weightsync_engine.protocol.messages import Problem

SHAPE, TP, TRAINERS = (40, 16), 4, 2


def fused() -> list[WorkerManifest]:
    """8 q heads and 2 KV heads of 4 rows in one parameter, over four workers: q lives once and k twice."""
    params = {"qk": (SHAPE, "float32")}
    return [
        manifest(
            params,
            {
                "qk": [
                    (rows(8 * w, 8), (12, 16), (0, 0), "w"),
                    (rows(32 + 4 * (w // 2), 4), (12, 16), (8, 0), "w"),
                ]
            },
        )
        for w in range(TP)
    ]


class World:
    """What all ranks hold after the steps of a round."""

    def __init__(self, value: torch.Tensor, sources: list[SourceParameter], trainers: int = TRAINERS) -> None:
        self.sources, self.manifests = sources, fused()
        workers = [Worker(trainers + w, "s", m) for w, m in enumerate(self.manifests)]
        self.plan = compile_plan(sources, workers, trainers)
        self.held: list[torch.Tensor] = []
        for rank in range(trainers):
            box = shard_boxes(sources[0])[rank]
            assert box is not None
            self.held.append(value[tuple(map(slice, box.start, box.stop))].clone())
        for each in self.manifests:
            live = torch.zeros(12, 16)
            for piece in each.pieces:
                live[tuple(map(slice, piece.region.start, piece.region.stop))] = value[
                    tuple(map(slice, piece.box.start, piece.box.stop))
                ]
            self.held.append(live)

    def words(self) -> list[Sums]:
        found = []
        for rank, held in enumerate(self.held):

            def local(part: LocalPart, held: torch.Tensor = held) -> torch.Tensor:
                return held[tuple(map(slice, part.box.start, part.box.stop))]

            at = rank - self.plan.trainer_ranks
            summed = (
                of_sources(self.sources, rank, local)
                if at < 0
                else of_targets(self.manifests[at], local, self.plan.weights(rank))
            )
            found.append(summed.sums())
        return found

    def judged(self) -> Problem | None:
        words = self.words()
        sent = sent_sums(words, self.sources)
        return sent if isinstance(sent, Problem) else judge_digests(words, sent, self.plan)


def sharded() -> World:
    return World(torch.arange(640.0).reshape(SHAPE), [fsdp("qk", SHAPE, TRAINERS)])


def test_a_parameter_of_which_a_part_lives_twice_is_judged_whole() -> None:
    # C01
    assert sharded().judged() is None


@pytest.mark.parametrize("rank", range(TRAINERS, TRAINERS + TP))
@pytest.mark.parametrize("row", [0, 7, 8, 11])
def test_one_wrong_bit_in_any_copy_is_found(rank: int, row: int) -> None:
    world = sharded()
    world.held[rank][row, 3] += 1
    found = world.judged()
    assert found is not None and found.reason == "DigestMismatch" and "'qk'" in found.message


def test_two_wrong_copies_do_not_make_up_for_each_other() -> None:
    world = sharded()
    for rank in (TRAINERS, TRAINERS + 1):
        world.held[rank][8, 0] += 1
    assert world.judged() is not None


def test_replicas_that_differ_in_the_trainer_are_named() -> None:
    world = World(torch.arange(640.0).reshape(SHAPE), [fsdp("qk", SHAPE, TRAINERS, placement=Replicate())])
    assert world.judged() is None
    world.held[1][0, 0] += 1
    found = world.judged()
    assert found is not None and (found.reason, found.rank) == ("ReplicasDiffer", 1)


def test_two_names_of_one_storage_that_differ_in_the_trainer_are_refused_with_both() -> None:
    # C12: live tied, both are sent and differ: nobody can say which is meant.
    shape = (4, 4)
    params = {"embed": (shape, "float32")}
    held = manifest(params, {"embed": [(rows(0, 4, 4), shape, (0, 0), "e")]}, aliases={"head": "embed"})
    sources = [fsdp(name, shape, 1) for name in ("embed", "head")]
    plan = compile_plan(sources, [Worker(1, "s", held)], 1)
    assert plan.tied == {"head": "embed"}
    for head, want in ((7, None), (8, "TiedDiffer")):
        words: list[Sums] = [{"embed": 7, "head": head}, {"embed": 7}]
        sent = sent_sums(words, sources)
        assert not isinstance(sent, Problem)
        found = judge_digests(words, sent, plan)
        assert (found.reason if found else None) == want
    assert found is not None and "'head'" in found.message and "'embed'" in found.message


def content(value: torch.Tensor, trainers: int) -> str:
    world = World(value, [fsdp("qk", SHAPE, trainers)], trainers)
    sent = sent_sums(world.words(), world.sources)
    assert not isinstance(sent, Problem)
    return content_of(sent)


def test_the_word_for_the_weights_depends_on_every_bit_and_on_nothing_else() -> None:
    # C14
    value = torch.arange(640.0).reshape(SHAPE)
    assert content(value, 1) == content(value, 2) == content(value.clone(), 3), "however it is sharded"
    other = value.clone()
    other[39, 15] = 638.5
    swapped = value.flip(0)
    assert len({content(v, 2) for v in (value, other, swapped)}) == 3
    assert content_of({"a": 1, "b": 2}) == content_of({"b": 2, "a": 1})
    assert content_of({"a": 1, "b": 2}) != content_of({"a": 2, "b": 1})
