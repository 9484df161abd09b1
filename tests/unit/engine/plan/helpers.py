"""Layouts to plan, and a plan carried out and held to every promise of it."""

import numpy as np

from weightsync_engine.layout.shards import shard_boxes
from weightsync_engine.layout.tensors import (
    DTYPE_BYTES,
    Expected,
    Mesh,
    Piece,
    Shard,
    SlabTensor,
    SourceParameter,
    WorkerManifest,
)
from weightsync_engine.plan.compile import compile_plan
from weightsync_engine.plan.reference import execute, slices
from weightsync_engine.plan.validate import M2N, violations


def fsdp(name, shape, ranks, dtype="float32", placement=None):
    return SourceParameter(name, shape, dtype, Mesh((ranks,), tuple(range(ranks))), (placement or Shard(0),))


def manifest(params, places, extra_rows=0, **more):
    """Of `params` {name: (shape, dtype)} and `places` {name: [(box, tensor shape, at, tensor)]}."""
    tensors, pieces = {}, []
    for name, spots in places.items():
        for box, shape, at, tensor in spots:
            tensors[tensor] = SlabTensor(0, shape, params[name][1])
            pieces.append(Piece(name, box, tensor, at))
    expected = {n: Expected(*p) for n, p in params.items()}
    return WorkerManifest(
        expected, tuple(pieces), tensors, more.get("unresolved", {}), more.get("aliases", {})
    )


def run(sources, workers, trainers, envelope=M2N):
    """Compile and execute; returns the plan after checking every promise of it."""
    plan = compile_plan(sources, workers, trainers, envelope)
    values = {s.name: np.random.default_rng(7).integers(1, 1 << 40, s.shape) for s in sources}
    whole = {s.tensor: np.zeros(s.tensor_shape, np.int64) for s in sources}
    for s in sources:
        whole[s.tensor][slices(s.region)] = values[s.name].reshape(s.region.shape)
    slabs = {r: {} for r in range(trainers + len(workers))}
    for s in sources:
        for rank, box in shard_boxes(s).items():
            if box is not None:
                slabs[rank][s.tensor] = whole[s.tensor][slices(box)].copy()
    writes = {r: {} for r in slabs}
    for w in workers:
        for name, place in w.manifest.tensors.items():
            slabs[w.rank][name] = np.zeros(place.shape, np.int64)
            writes[w.rank][name] = np.zeros(place.shape, np.int64)
    execute(plan, slabs, writes)
    kept = 0
    for w in workers:
        touched = {n: np.zeros_like(a) for n, a in writes[w.rank].items()}
        for piece in w.manifest.pieces:
            at = slices(piece.region)
            name = (
                piece.name
                if piece.name in values
                else next(a for a, n in w.manifest.aliases.items() if n == piece.name)
            )
            arrived = slabs[w.rank][piece.tensor][at].reshape(piece.box.shape)
            np.testing.assert_array_equal(arrived, values[name][slices(piece.box)])
            touched[piece.tensor][at] += 1
            kept += piece.box.size * DTYPE_BYTES[w.manifest.expected[piece.name].dtype]
        for name, count in writes[w.rank].items():
            np.testing.assert_array_equal(count, touched[name])
    for step in plan.steps:
        assert violations(step, envelope) == []
    assert plan.bytes_received == kept
    check_weights(plan)
    return plan


def check_weights(plan):
    """What a server's digests add up to has every element of a parameter equally often."""
    for route in plan.routes:
        group = plan.groups[route.group]
        weights = plan.weights(group.first_rank).get(route.name, {})
        counted = np.zeros(route.source.shape, np.int64)
        for worker in group.manifests:
            for piece in worker.pieces:
                if piece.name == route.name:
                    counted[slices(piece.box)] += weights.get(piece.box, 1)
        assert (counted == route.copies).all(), route.name
