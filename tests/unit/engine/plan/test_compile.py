"""Plans: every element arrives, once per copy, inside the envelope, and the same plan on every rank."""

import dataclasses
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync_engine.layout.boxes import Box
from weightsync_engine.layout.shards import shard_boxes
from weightsync_engine.layout.tensors import (
    Expected,
    Mesh,
    Piece,
    Replicate,
    Shard,
    SlabTensor,
    SourceParameter,
    StridedShard,
    WorkerManifest,
)
from weightsync_engine.plan.compile import Worker, compile_plan
from weightsync_engine.plan.reference import execute, slices
from weightsync_engine.plan.steps import Plan, PlanError, exchanges
from weightsync_engine.plan.validate import Envelope, violations


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


def run(sources, workers, trainers):
    """Compile and execute; returns the plan after checking every promise of it."""
    plan = compile_plan(sources, workers, trainers)
    values = {s.name: np.random.default_rng(7).integers(1, 1 << 40, s.shape) for s in sources}
    slabs = {r: {} for r in range(trainers + len(workers))}
    for s in sources:
        for rank, box in shard_boxes(s).items():
            if box is not None:
                slabs[rank][s.name] = values[s.name][slices(box)].copy()
    writes = {r: {} for r in slabs}
    for w in workers:
        for name, place in w.manifest.tensors.items():
            slabs[w.rank][name] = np.zeros(place.shape, np.int64)
            writes[w.rank][name] = np.zeros(place.shape, np.int64)
    execute(plan, slabs, writes)
    for w in workers:
        touched = {n: np.zeros_like(a) for n, a in writes[w.rank].items()}
        for piece in w.manifest.pieces:
            at = slices(Box(piece.at, piece.box.shape))
            name = (
                piece.name
                if piece.name in values
                else next(a for a, n in w.manifest.aliases.items() if n == piece.name)
            )
            np.testing.assert_array_equal(slabs[w.rank][piece.tensor][at], values[name][slices(piece.box)])
            touched[piece.tensor][at] += 1
        for name, count in writes[w.rank].items():
            np.testing.assert_array_equal(count, touched[name])
    for step in plan.steps:
        assert violations(step) == []
    return plan


@st.composite
def one_parameter(draw, name, trainers, servers):
    """A source and, per worker, where it lands: cut, replicated or repeated for neighbours, inside a larger
    tensor."""
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)))
    placement = draw(st.one_of(st.just(Replicate()), st.builds(Shard, st.integers(0, len(shape) - 1))))
    source = fsdp(name, shape, trainers, placement=placement)
    if trainers % 2 == 0 and draw(st.booleans()):
        dim = draw(st.integers(0, len(shape) - 1))
        pair = draw(
            st.sampled_from(
                [(Replicate(), Shard(dim)), (Shard(dim), Replicate()), (StridedShard(dim, 2), Shard(dim))]
            )
        )
        ranks = draw(st.permutations(range(trainers)))
        source = dataclasses.replace(source, mesh=Mesh((trainers // 2, 2), tuple(ranks)), placements=pair)
    spots = []
    for size in servers:
        groups = draw(st.sampled_from([g for g in range(1, size + 1) if size % g == 0]))
        axis = draw(st.integers(0, len(shape) - 1))
        outer = draw(st.booleans())
        for w in range(size):
            shard = w // (size // groups) if outer else w % groups
            cut = SourceParameter("", shape, "int8", Mesh((groups,), tuple(range(groups))), (Shard(axis),))
            box = shard_boxes(cut)[shard]
            if box is None:
                spots.append([])
                continue
            pad = tuple(draw(st.integers(0, 2)) for _ in shape)
            tensor = tuple(n + p + draw(st.integers(0, 1)) for n, p in zip(box.shape, pad, strict=True))
            spots.append([(box, tensor, pad, f"live {name}")])
    return source, spots


@st.composite
def worlds(draw):
    trainers = draw(st.integers(1, 6))
    servers = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    made = [draw(one_parameter(f"p{i}", trainers, servers)) for i in range(draw(st.integers(1, 3)))]
    params = {s.name: (s.shape, s.dtype) for s, _ in made}
    workers, rank = [], trainers
    for number, size in enumerate(servers):
        for _ in range(size):
            index = rank - trainers
            places = {s.name: spots[index] for s, spots in made}
            workers.append(Worker(rank, f"server-{number}", manifest(params, places)))
            rank += 1
    return [s for s, _ in made], workers, trainers


@given(worlds())
@settings(max_examples=150, deadline=None)
def test_every_element_arrives_once_per_copy_and_inside_the_envelope(world):
    run(*world)


@given(worlds(), st.randoms())
@settings(max_examples=50, deadline=None)
def test_the_digest_does_not_depend_on_the_order_of_the_inputs(world, rng):
    sources, workers, trainers = world
    first = compile_plan(sources, workers, trainers)
    mixed = []
    for w in workers:
        pieces, expected = list(w.manifest.pieces), list(w.manifest.expected.items())
        rng.shuffle(pieces)
        rng.shuffle(expected)
        mixed.append(
            dataclasses.replace(
                w, manifest=dataclasses.replace(w.manifest, pieces=tuple(pieces), expected=dict(expected))
            )
        )
    rng.shuffle(mixed)
    shuffled = list(sources)
    rng.shuffle(shuffled)
    assert compile_plan(shuffled, mixed, trainers).digest == first.digest


@given(worlds())
@settings(max_examples=50, deadline=None)
def test_exchanges_give_each_target_element_exactly_one_source(world):
    plan = compile_plan(*world)
    for step in plan.steps:
        for index, rank in enumerate(step.target.ranks):
            shape = step.target.local_box(step.shape, index).shape
            seen = np.zeros(shape, int)
            for e in exchanges(step):
                if e.target == rank:
                    assert e.source_box.shape == e.target_box.shape
                    seen[slices(e.target_box)] += 1
            assert (seen == 1).all()


def rows(start, n, width=16):
    return Box((start, 0), (n, width))


def test_kv_heads_fewer_than_tp_go_to_neighbouring_ranks_with_the_shard_axis_outer():
    # C01: hidden 16, head_dim 4, 8 q heads, 2 kv heads, tp 4.
    params = {"q": ((32, 16), "bfloat16"), "k": ((8, 16), "bfloat16"), "v": ((8, 16), "bfloat16")}
    workers = [
        Worker(
            4 + w,
            "s",
            manifest(
                params,
                {
                    "q": [(rows(8 * w, 8), (16, 16), (0, 0), "qkv")],
                    "k": [(rows(4 * (w // 2), 4), (16, 16), (8, 0), "qkv")],
                    "v": [(rows(4 * (w // 2), 4), (16, 16), (12, 0), "qkv")],
                },
            ),
        )
        for w in range(4)
    ]
    plan = run([fsdp(n, s, 4, d) for n, (s, d) in params.items()], workers, 4)
    k = next(s for s in plan.steps if s.name == "k")
    assert (k.target.mesh, k.target.placements) == ((2, 2), (Shard(0), Replicate()))
    assert [p.box.start[0] for p in k.target.parts] == [8, 8, 8, 8]
    assert not any(p.staged for p in k.target.parts)
    assert plan.copies["k"][0].count == 2 and plan.copies["q"][0].count == 1


def replicated(params, trainers, workers, server=lambda w: "s"):
    places = {n: [(Box.whole(s), s, (0,) * len(s), n)] for n, (s, _) in params.items()}
    return [Worker(trainers + w, server(w), manifest(params, places)) for w in range(workers)]


def test_full_replication_is_a_pair_of_replicate_and_a_shard_over_one():
    # C17
    params = {"norm": ((16,), "float32")}
    plan = run([fsdp("norm", (16,), 4)], replicated(params, 4, 4), 4)
    (step,) = plan.steps
    assert (step.target.mesh, step.target.placements) == ((4, 1), (Replicate(), Shard(0)))
    assert (step.source.mesh, step.source.placements) == ((4,), (Shard(0),))


def test_replicated_sources_are_sent_by_each_trainer_in_turn():
    params = {f"b{i}": ((4,), "float32") for i in range(6)}
    plan = run(
        [fsdp(n, s, 3, placement=Replicate()) for n, (s, _) in params.items()], replicated(params, 3, 2), 3
    )
    assert [s.source.first_rank for s in plan.steps] == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize(("count", "senders"), [(12, {4}), (10, {1}), (5, {1}), (2, {2})])
def test_uneven_shards_become_blocks_from_single_ranks_and_empty_tails_take_no_part(count, senders):
    # C09
    plan = run([fsdp("w", (count, 4), 4)], replicated({"w": ((count, 4), "float32")}, 4, 2), 4)
    assert {len(s.source.ranks) for s in plan.steps} == senders


def test_column_cuts_of_a_row_sharded_source_are_one_step_and_contiguous_on_the_worker():
    params = {"o": ((8, 8), "float32")}
    workers = [
        Worker(2 + w, "s", manifest(params, {"o": [(Box((0, 4 * w), (8, 4)), (8, 4), (0, 0), "o")]}))
        for w in (0, 1)
    ]
    (step,) = run([fsdp("o", (8, 8), 2)], workers, 2).steps
    assert step.target.placements == (Shard(1),) and not step.target.parts[0].staged


def test_a_strided_region_is_staged():
    # C22: gate rows of both experts inside w13.
    params = {"gate": ((2, 4, 4), "float32")}
    places = {"gate": [(Box.whole((2, 4, 4)), (2, 8, 4), (0, 0, 0), "w13")]}
    (step,) = run([fsdp("gate", (2, 4, 4), 2)], [Worker(2, "s", manifest(params, places))], 2).steps
    assert step.target.parts[0].staged


@pytest.mark.parametrize("shape", [(1152, 3, 2, 2, 2), ()])
def test_tensors_of_other_ranks_are_seen_in_one_to_three_dimensions(shape):
    # C18
    placement = Shard(0) if shape else Replicate()
    source = fsdp("w", shape, 4, placement=placement)
    plan = run([source], replicated({"w": (shape, "float32")}, 4, 2), 4)
    assert all(1 <= len(s.shape) <= 3 for s in plan.steps)


def test_more_sources_than_the_envelope_allows_become_blocks():
    # C18: 32 sources for each target.
    params = {"w": ((32, 4), "float32")}
    plan = run([fsdp("w", (32, 4), 32)], replicated(params, 32, 1), 32)
    assert len(plan.steps) == 32
    wide = compile_plan([fsdp("w", (32, 4), 32)], replicated(params, 32, 1), 32, Envelope(max_sources=32))
    assert len(wide.steps) == 1


def test_a_share_above_the_staging_limit_is_split():
    # C18: 4 GiB on each of 4 ranks.
    params = {"w": ((131072, 131072), "int8")}
    plan = compile_plan([fsdp("w", (131072, 131072), 4, "int8")], replicated(params, 4, 1), 4)
    assert all(violations(s) == [] for s in plan.steps)
    assert sum(s.box.size for s in plan.steps) == 131072**2


def test_alike_servers_share_one_step():
    params = {"w": ((8, 4), "float32")}
    workers = [
        Worker(
            2 + w,
            f"s{w // 2}",
            manifest(params, {"w": [(Box((4 * (w % 2), 0), (4, 4)), (4, 4), (0, 0), "w")]}),
        )
        for w in range(4)
    ]
    (step,) = run([fsdp("w", (8, 4), 2)], workers, 2).steps
    assert (step.target.mesh, step.target.placements) == ((2, 2), (Replicate(), Shard(0)))


@pytest.mark.parametrize("sent", [("embed",), ("head",), ("embed", "head")])
def test_tied_storage_is_written_once_whichever_name_is_sent(sent):
    # C12
    shape = (6, 4)
    base = manifest(
        {"embed": (shape, "float32")},
        {"embed": [(Box.whole(shape), (8, 4), (0, 0), "embed")]},
        aliases={"head": "embed"},
    )
    plan = run([fsdp(n, shape, 2) for n in sent], [Worker(2, "s", base)], 2)
    assert sum(s.box.size for s in plan.steps) == 24
    assert plan.tied == ({"head": "embed"} if len(sent) == 2 else {})


BASE = {"w": ((4, 4), "float32"), "v": ((4,), "float32")}


def problem(sources=None, workers=None, trainers=2):
    sources = [fsdp(n, s, 2, d) for n, (s, d) in BASE.items()] if sources is None else sources
    workers = replicated(BASE, 2, 2) if workers is None else workers
    with pytest.raises(PlanError) as caught:
        compile_plan(sources, workers, trainers)
    return caught.value.problem


def test_a_name_that_the_server_lacks_is_named_with_its_rank():
    extra = [*(fsdp(n, s, 2, d) for n, (s, d) in BASE.items()), fsdp("q.bias", (4,), 2)]
    found = problem(sources=extra)
    assert (found.reason, found.rank) == ("UnknownParameter", 2) and "q.bias" in found.message


def test_a_name_that_the_trainer_does_not_send_is_named():
    found = problem(sources=[fsdp("w", (4, 4), 2)])
    assert found.reason == "NotSent" and "'v'" in found.message


def test_a_shape_that_differs_is_named_with_both_shapes_and_the_rank():
    workers = [
        replicated(BASE, 2, 1)[0],
        Worker(3, "t", replicated({**BASE, "w": ((4, 5), "float32")}, 3, 1)[0].manifest),
    ]
    found = problem(workers=workers)
    assert (found.reason, found.rank) == ("ShapeDiffers", 3)
    assert "(4, 4)" in found.message and "(4, 5)" in found.message


def test_a_dtype_that_differs_is_named_with_both_dtypes():
    # C16
    found = problem(workers=replicated({**BASE, "w": ((4, 4), "bfloat16")}, 2, 2))
    assert (found.reason, found.rank) == ("DtypeDiffers", 2)
    assert "float32" in found.message and "bfloat16" in found.message and "'w'" in found.message


def test_what_a_worker_could_not_resolve_is_named_with_its_reason():
    worker = replicated(BASE, 2, 1)[0]
    bad = dataclasses.replace(worker.manifest, unresolved={"w": "the live tensor is empty after loading"})
    found = problem(workers=[dataclasses.replace(worker, manifest=bad)])
    assert (found.reason, found.rank) == ("Unresolved", 2) and "empty after loading" in found.message


def test_ranks_that_are_not_one_interval_are_refused():
    assert (
        problem(workers=[dataclasses.replace(w, rank=w.rank + 1) for w in replicated(BASE, 2, 2)]).reason
        == "WorldSize"
    )


def test_a_mesh_beyond_the_trainers_ranks_is_refused_with_both_numbers():
    found = problem(sources=[fsdp(n, s, 4, d) for n, (s, d) in BASE.items()])
    assert found.reason == "WorldSize" and "3" in found.message and "2 trainer ranks" in found.message


def test_an_empty_trainer_is_a_stated_problem():
    assert problem(sources=[]).reason == "NoParameters"


def test_rows_that_no_rank_of_a_server_holds_are_refused():
    half = manifest({"w": ((4, 4), "float32")}, {"w": [(Box((0, 0), (2, 4)), (2, 4), (0, 0), "w")]})
    found = problem(sources=[fsdp("w", (4, 4), 2)], workers=[Worker(2, "s", half)])
    assert found.reason == "Uncovered" and "'w'" in found.message


def test_pieces_that_overlap_in_a_slab_are_refused():
    places = {
        "w": [(Box.whole((4, 4)), (8, 4), (0, 0), "x")],
        "u": [(Box.whole((4, 4)), (8, 4), (3, 0), "x")],
    }
    both = {"w": ((4, 4), "float32"), "u": ((4, 4), "float32")}
    found = problem(
        sources=[fsdp(n, s, 2) for n, (s, _) in both.items()],
        workers=[Worker(2, "s", manifest(both, places))],
    )
    assert found.reason == "BadManifest" and "overlap" in found.message


def test_a_piece_that_leaves_its_slab_tensor_is_refused():
    places = {"w": [(Box.whole((4, 4)), (5, 4), (2, 0), "x")]}
    found = problem(
        sources=[fsdp("w", (4, 4), 2)], workers=[Worker(2, "s", manifest({"w": ((4, 4), "float32")}, places))]
    )
    assert found.reason == "BadManifest" and "leaves" in found.message


def test_plans_that_differ_in_one_place_have_different_digests():
    base = compile_plan([fsdp("w", (4, 4), 2)], replicated({"w": ((4, 4), "float32")}, 2, 2), 2)
    seen = {base.digest}
    moved = dataclasses.replace(base.steps[0], name="x")
    seen.add(Plan(2, 4, (moved,), base.copies).digest)
    seen.add(Plan(2, 4, base.steps, {}).digest)
    seen.add(Plan(2, 4, base.steps, base.copies, {"x": "w"}).digest)
    assert len(seen) == 4


def test_a_model_of_a_thousand_parameters_is_one_step_each():
    rng = random.Random(3)
    params = {f"layers.{i}.w": ((rng.choice([64, 128]), 64), "bfloat16") for i in range(1000)}
    sources = [fsdp(n, s, 8, d) for n, (s, d) in params.items()]
    first = replicated(params, 8, 1)[0].manifest
    plan = compile_plan(sources, [Worker(8 + w, f"s{w}", first) for w in range(8)], 8)
    assert plan.summary.parameters == 1000 and plan.summary.steps == 1000
