"""Plans: every element arrives, once per copy, inside the envelope, and the same plan on every rank."""

import copy
import dataclasses
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.engine.plan.helpers import fsdp, manifest, run

from weightsync_engine.layout.boxes import Box
from weightsync_engine.layout.shards import shard_boxes
from weightsync_engine.layout.tensors import (
    Mesh,
    Replicate,
    Shard,
    SourceParameter,
    StridedShard,
    Within,
    WorkerManifest,
)
from weightsync_engine.plan.compile import compile_plan
from weightsync_engine.plan.cost import rank_costs
from weightsync_engine.plan.groups import Worker
from weightsync_engine.plan.plan import Part
from weightsync_engine.plan.steps import PlanError
from weightsync_engine.plan.validate import Envelope, violations

MESHES = [(1,), (2,), (3,), (4,), (5,), (6,), (2, 2), (2, 3), (3, 2), (1, 4), (2, 1, 2), (1, 2, 3)]


@st.composite
def placements_of(draw, mesh, dims):
    """Replicated, cut along one or several dimensions, HSDP, and FSDP over TP on one dimension."""
    found = []
    for _ in mesh:
        found.append(draw(st.one_of(st.just(Replicate()), st.builds(Shard, st.integers(0, dims - 1)))))
    if len(mesh) > 1 and draw(st.booleans()):
        dim = draw(st.integers(0, dims - 1))
        found[-2:] = StridedShard(dim, mesh[-1]), Shard(dim)
    return tuple(found)


@st.composite
def one_parameter(draw, name, trainers, servers):
    """A source and, per worker, where it lands.

    Source: any mesh over some of the trainer's ranks in any order, or a region of a stacked tensor. Workers:
    cut, replicated, repeated for neighbours or for every n-th, held by some workers only (experts), held
    twice, inside a larger tensor.
    """
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    within, tensor = None, shape
    if draw(st.integers(0, 3)) == 0:
        stack = draw(st.integers(1, 4))
        tensor = (stack, *(n + draw(st.integers(0, 2)) for n in shape))
        at = (
            draw(st.integers(0, stack - 1)),
            *(draw(st.integers(0, t - n)) for t, n in zip(tensor[1:], shape, strict=True)),
        )
        within = Within(f"stack of {name}", tensor, at)
    dims = draw(st.sampled_from([m for m in MESHES if math.prod(m) <= trainers]))
    ranks = draw(st.permutations(range(trainers)))[: math.prod(dims)]
    if draw(st.booleans()):
        ranks = sorted(ranks)
    dtype = draw(st.sampled_from(["float32", "bfloat16"]))
    source = SourceParameter(
        name, shape, dtype, Mesh(dims, tuple(ranks)), draw(placements_of(dims, len(tensor))), within
    )
    spots = []
    for size in servers:
        groups = draw(st.sampled_from([g for g in range(1, size + 1) if size % g == 0]))
        axis = draw(st.integers(0, len(shape) - 1))
        outer, twice = draw(st.booleans()), draw(st.integers(0, 5)) == 0
        only = draw(st.integers(0, size - 1)) if draw(st.integers(0, 3)) == 0 else None
        for w in range(size):
            shard = w // (size // groups) if outer else w % groups
            cut = SourceParameter("", shape, "int8", Mesh((groups,), tuple(range(groups))), (Shard(axis),))
            box = shard_boxes(cut)[shard] if only is None else (Box.whole(shape) if w == only else None)
            if box is None:
                spots.append([])
                continue
            extra = (1,) if draw(st.integers(0, 4)) == 0 else ()
            pad = (*(0 for _ in extra), *(draw(st.integers(0, 2)) for _ in shape))
            held = (
                *(2 for _ in extra),
                *(n + p + draw(st.integers(0, 1)) for n, p in zip(box.shape, pad[len(extra) :], strict=True)),
            )
            places = [(box, held, pad, f"live {name}")]
            spots.append([*places, (box, held, pad, f"second {name}")] if twice else places)
        if only is None and draw(st.integers(0, 3)) == 0:
            spots[-size:] = draw(fused_rows(name, shape, size))
    return source, spots


@st.composite
def fused_rows(draw, name, shape, size):
    """Two ranges of rows of one parameter, each cut over as many groups of neighbours as it likes (q and k in one
    name, with fewer KV heads than workers)."""
    middle = draw(st.integers(0, shape[0]))
    spots = [[] for _ in range(size)]
    for part, start, count in (("q", 0, middle), ("k", middle, shape[0] - middle)):
        groups = draw(st.sampled_from([g for g in range(1, size + 1) if size % g == 0]))
        whole = (count, *shape[1:])
        cut = SourceParameter("", whole, "int8", Mesh((groups,), tuple(range(groups))), (Shard(0),))
        for w in range(size):
            box = shard_boxes(cut)[w // (size // groups)]
            if box is not None and box.size:
                at = Box((box.start[0] + start, *box.start[1:]), box.shape)
                spots[w].append((at, box.shape, (0,) * len(shape), f"{part} of {name}"))
    return spots


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
@settings(max_examples=300, deadline=None)
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
@settings(max_examples=40, deadline=None)
def test_the_digest_does_not_depend_on_which_values_are_shared_objects(world):
    sources, workers, trainers = world
    shared = compile_plan(sources, workers, trainers)
    assert (
        compile_plan(copy.deepcopy(sources), [copy.deepcopy(w) for w in workers], trainers).digest
        == shared.digest
    )


@given(
    worlds(),
    st.integers(1, 3),
    st.integers(1, 4),
    st.sampled_from([64, 300, 1 << 20]),
    st.sampled_from([0, 1]),
)
@settings(max_examples=200, deadline=None)
def test_a_narrow_envelope_is_kept_as_well(world, sources, targets, share, stack):
    limits = Envelope(max_sources=sources, max_targets=targets, max_local_bytes=share, stack_bytes=stack)
    run(*world, limits)


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
    (kv,) = (s for s in plan.steps if s.target.shards == 2)
    assert (kv.target.mesh, kv.target.placements) == ((2, 2), (Shard(0), Replicate()))
    assert {r.name: r.copies for r in plan.routes} == {"q": 1, "k": 2, "v": 2}


def test_q_and_k_in_one_parameter_with_fewer_kv_heads_than_workers_are_written_and_counted():
    # C01: as Phi-3 has them. 8 q heads, 2 kv heads, tp 4: q lives once, k twice.
    params = {"qk": ((40, 16), "bfloat16")}
    workers = [
        Worker(
            4 + w,
            "s",
            manifest(
                params,
                {
                    "qk": [
                        (rows(8 * w, 8), (12, 16), (0, 0), "live"),
                        (rows(32 + 4 * (w // 2), 4), (12, 16), (8, 0), "live"),
                    ]
                },
            ),
        )
        for w in range(4)
    ]
    plan = run([fsdp("qk", (40, 16), 4, "bfloat16")], workers, 4)
    (route,) = plan.routes
    assert route.copies == 2
    assert plan.weights(5) == {"qk": {rows(8 * w, 8): 2 for w in range(4)}}
    assert plan.weights(0) == {}, "trainers count what they hold once"


def test_a_piece_of_which_some_elements_live_more_often_than_others_is_refused():
    params = {"w": ((4, 4), "float32")}
    spots = [[(rows(0, 4, 4), (4, 4), (0, 0), "w")], [(rows(2, 2, 4), (2, 4), (0, 0), "w")]]
    workers = [Worker(2 + i, "s", manifest(params, {"w": spot})) for i, spot in enumerate(spots)]
    found = problem(sources=[fsdp("w", (4, 4), 2)], workers=workers)
    assert found.reason == "Uncovered" and "[1, 2] copies" in found.message


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
    (step,) = plan.steps
    assert step.shape == (3, 8) and step.source.ranks == range(3)


@pytest.mark.parametrize(("count", "steps"), [(12, 1), (10, 2), (5, 2), (2, 1)])
def test_uneven_shards_travel_without_padding_and_empty_tails_take_no_part(count, steps):
    # C09: 3 3 3 3, 3 3 3 1, 2 2 1 0, 1 1 0 0.
    plan = run([fsdp("w", (count, 4), 4)], replicated({"w": ((count, 4), "float32")}, 4, 2), 4)
    assert len(plan.steps) == steps
    assert max(s.source.ranks[-1] for s in plan.steps) == {5: 2, 2: 1}.get(count, 3)


def test_column_cuts_of_a_row_sharded_source_are_one_step_of_crossed_blocks():
    params = {"o": ((8, 8), "float32")}
    workers = [
        Worker(2 + w, "s", manifest(params, {"o": [(Box((0, 4 * w), (8, 4)), (8, 4), (0, 0), "o")]}))
        for w in (0, 1)
    ]
    (step,) = run([fsdp("o", (8, 8), 2)], workers, 2).steps
    assert step.shape == (2, 2, 16)
    assert (step.source.placements, step.target.placements) == ((Shard(0),), (Shard(1),))


def test_fused_rows_and_columns_over_all_layers_are_one_step_of_each_kind():
    names = [f"layers.{i}" for i in range(20)]
    params = {f"{n}.{k}": ((16, 16), "bfloat16") for n in names for k in ("q", "o", "norm")}
    workers = []
    for w in range(4):
        places = {f"{n}.norm": [(Box.whole((16, 16)), (16, 16), (0, 0), f"{n}.norm")] for n in names}
        places |= {f"{n}.q": [(Box((4 * w, 0), (4, 16)), (12, 16), (4, 0), f"{n}.qkv")] for n in names}
        places |= {f"{n}.o": [(Box((0, 4 * w), (16, 4)), (16, 4), (0, 0), f"{n}.o")] for n in names}
        workers.append(Worker(8 + w, "s", manifest(params, places)))
    plan = run([fsdp(n, s, 8, d) for n, (s, d) in params.items()], workers, 8)
    assert sorted(len(s.shape) for s in plan.steps) == [2, 2, 3]


def test_regions_of_stacked_experts_are_written_and_nothing_beside_them():
    # C22: w13 of two experts; the trainer holds gate and up of all experts in one tensor.
    stacked = (4, 8, 4)
    mesh = Mesh((2, 2), (0, 1, 2, 3))

    def part(name, at):
        return SourceParameter(
            name, (4, 4), "bfloat16", mesh, (Shard(0), Shard(1)), Within("gate_up", stacked, at)
        )

    sources = [part(f"{e}.{k}", (e, row, 0)) for e in range(4) for k, row in (("gate", 0), ("up", 4))]
    params = {s.name: (s.shape, s.dtype) for s in sources}
    workers = []
    for w in (0, 1):
        places = {
            f"{e}.{k}": [(Box.whole((4, 4)), (2, 9, 4), (e % 2, row, 0), "w13")]
            for e in (2 * w, 2 * w + 1)
            for k, row in (("gate", 0), ("up", 4))
        }
        workers.append(Worker(4 + w, "s", manifest(params, places)))
    plan = run(sources, workers, 4)
    assert [s.shape for s in plan.steps] == [(4, 32)]


@pytest.mark.parametrize("ranks", [(0, 1, 2, 3), (0, 2, 1, 3)])
def test_experts_cut_by_ep_and_then_by_fsdp_arrive_whole_whatever_the_order_of_ranks(ranks):
    # C19: two shard axes at once; with a mesh [[0, 2], [1, 3]] the ranks of one expert slice are no interval.
    source = SourceParameter("experts", (8, 16, 4), "bfloat16", Mesh((2, 2), ranks), (Shard(0), Shard(1)))
    params = {"experts": (source.shape, source.dtype)}
    workers = [
        Worker(
            4 + w,
            "s",
            manifest(params, {"experts": [(Box((4 * w, 0, 0), (4, 16, 4)), (4, 16, 4), (0, 0, 0), "w13")]}),
        )
        for w in (0, 1)
    ]
    run([source], workers, 4)


@pytest.mark.parametrize("trainers", [6, 17])
def test_an_odd_number_of_trainers_and_a_padded_vocabulary_move_every_row_once(trainers):
    # C09, C18, C23: 151 rows in 160 live ones; chunks of 26 and 9 rows with short and empty tails.
    params = {"embed": ((151, 4), "bfloat16")}
    workers = [
        Worker(
            trainers + w,
            "s",
            manifest(
                params, {"embed": [(Box((40 * w, 0), (min(40, 151 - 40 * w), 4)), (40, 4), (0, 0), "e")]}
            ),
        )
        for w in range(4)
    ]
    plan = run([fsdp("embed", (151, 4), trainers, "bfloat16")], workers, trainers)
    assert plan.bytes_received == 151 * 4 * 2


def test_pods_of_unlike_tensor_parallel_sizes_share_an_epoch():
    params = {"w": ((24, 4), "float32")}
    workers, rank = [], 3
    for server, tp in (("a", 2), ("b", 4), ("c", 4)):
        for w in range(tp):
            n = 24 // tp
            places = {"w": [(Box((n * w, 0), (n, 4)), (n, 4), (0, 0), "w")]}
            workers.append(Worker(rank, server, manifest(params, places)))
            rank += 1
    plan = run([fsdp("w", (24, 4), 3)], workers, 3)
    assert [g.replicas for g in plan.groups] == [1, 2]


def test_no_sender_carries_more_than_its_share_where_replicas_allow_it():
    # Replicated parameters even out what single owners must send.
    owned = [SourceParameter("own", (40000,), "float32", Mesh((1,), (0,)), (Replicate(),))]
    shared = [fsdp(f"p{i}", (30011,), 4, placement=Replicate()) for i in range(40)]
    sources = owned + shared
    params = {s.name: (s.shape, s.dtype) for s in sources}
    plan = run(sources, replicated(params, 4, 3), 4)
    sent = [cost.bytes_sent for cost in rank_costs(plan)[:4]]
    assert max(sent) <= 1.02 * sum(sent) / 4


def test_one_large_replicated_parameter_is_split_among_all_that_hold_it():
    plan = run(
        [fsdp("w", (1 << 20,), 8, placement=Replicate())], replicated({"w": ((1 << 20,), "float32")}, 8, 1), 8
    )
    assert [c.bytes_sent for c in rank_costs(plan)[:8]] == [4 << 17] * 8


@pytest.mark.parametrize("shape", [(1152, 3, 2, 2, 2), ()])
def test_tensors_of_other_ranks_are_seen_in_one_to_three_dimensions(shape):
    # C18
    placement = Shard(0) if shape else Replicate()
    source = fsdp("w", shape, 4, placement=placement)
    plan = run([source], replicated({"w": (shape, "float32")}, 4, 2), 4)
    assert all(1 <= len(s.shape) <= 3 for s in plan.steps)


def test_more_sources_than_the_envelope_allows_come_in_turns():
    # C18: 32 sources for each target.
    params = {"w": ((32, 4), "float32")}
    plan = run([fsdp("w", (32, 4), 32)], replicated(params, 32, 1), 32)
    assert [s.source.ranks for s in plan.steps] == [range(16), range(16, 32)]
    wide = compile_plan([fsdp("w", (32, 4), 32)], replicated(params, 32, 1), 32, Envelope(max_sources=32))
    assert len(wide.steps) == 1


def test_a_share_above_the_staging_limit_is_split():
    # C18: 4 GiB on each of 4 ranks.
    params = {"w": ((131072, 131072), "int8")}
    plan = compile_plan([fsdp("w", (131072, 131072), 4, "int8")], replicated(params, 4, 1), 4)
    assert all(violations(s) == [] for s in plan.steps)
    assert plan.bytes_received == 131072**2 and len(plan.steps) == 64


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
    assert plan.bytes_received == 24 * 4
    assert plan.tied == ({"head": "embed"} if len(sent) == 2 else {})


BASE = {"w": ((4, 4), "float32"), "v": ((4,), "float32")}


def problem(sources=None, workers=None, trainers=2):
    sources = [fsdp(n, s, 2, d) for n, (s, d) in BASE.items()] if sources is None else sources
    workers = replicated(BASE, 2, 2) if workers is None else workers
    with pytest.raises(PlanError) as caught:
        compile_plan(sources, workers, trainers)
    return caught.value.problem


def test_what_a_server_has_no_use_for_is_not_sent_and_counted():
    # C27: the layers of a draft model, where no server runs one
    extra = [*(fsdp(n, s, 2, d) for n, (s, d) in BASE.items()), fsdp("mtp.fc.weight", (4, 4), 2)]
    lacks = replicated(BASE, 2, 2, lambda w: f"server-{w}")
    drops = [
        dataclasses.replace(w, manifest=dataclasses.replace(w.manifest, unused=frozenset({"mtp.fc.weight"})))
        for w in lacks
    ]
    plan = compile_plan(extra, drops, 2)
    assert plan.unused == {"mtp.fc.weight"}
    assert (plan.summary.parameters, plan.summary.unused) == (2, 1)
    assert plan.bytes_received == compile_plan(extra[:2], drops, 2).bytes_received
    # One server drops it and one lacks it: what that name is there, nobody knows.
    found = problem(sources=extra, workers=[drops[0], lacks[1]])
    assert (found.reason, found.rank) == ("UnknownParameter", 3)


def test_what_one_worker_has_no_use_for_may_be_anothers():
    shape = (4, 4)
    holds = Worker(
        2, "s", manifest({"w": (shape, "float32")}, {"w": [(Box.whole(shape), shape, (0, 0), "w")]})
    )
    drops = Worker(3, "s", WorkerManifest({}, (), {}, {}, unused=frozenset({"w"})))
    plan = run([fsdp("w", shape, 2)], [holds, drops], 2)
    assert (plan.unused, plan.bytes_received) == (frozenset(), 64)


def drafting(workers):
    """The same workers with a draft model that needs `draft.fc`."""
    more, places = (
        {"draft.fc": ((4, 4), "float32")},
        {"draft.fc": [(Box.whole((4, 4)), (4, 4), (0, 0), "draft.fc")]},
    )
    added = manifest(more, places)
    return [
        dataclasses.replace(
            w,
            manifest=dataclasses.replace(
                w.manifest,
                expected=w.manifest.expected | added.expected,
                pieces=w.manifest.pieces + added.pieces,
                tensors=w.manifest.tensors | added.tensors,
                draft=frozenset(more),
            ),
        )
        for w in workers
    ]


def test_what_a_draft_model_lacks_is_refused_with_both_ways_out():
    # C27
    found = problem(workers=drafting(replicated(BASE, 2, 2)))
    assert (found.reason, found.rank) == ("NotSent", 2)
    for words in (
        "'draft.fc'",
        "for its draft model",
        "WEIGHTSYNC_DRAFT_MODEL=update",
        "WEIGHTSYNC_DRAFT_MODEL=frozen",
    ):
        assert words in found.message


def test_a_server_without_a_draft_model_has_no_use_for_one_that_another_updates():
    # C27
    sent = [*(fsdp(n, s, 2, d) for n, (s, d) in BASE.items()), fsdp("draft.fc", (4, 4), 2)]
    plain = replicated(BASE, 2, 2, lambda w: f"server-{w}")
    mixed = [drafting(plain[:1])[0], plain[1]]
    plan = run(sent, mixed, 2)
    assert (plan.draft, plan.unused, plan.summary.draft) == ({"draft.fc"}, frozenset(), 1)
    without = compile_plan(sent, plain, 2)
    assert (without.draft, without.unused) == (frozenset(), {"draft.fc"})
    # A server that has one knows what it holds.
    found = problem(sources=[*sent, fsdp("draft.cf", (4, 4), 2)], workers=mixed)
    assert (found.reason, found.rank) == ("UnknownParameter", 2) and "'draft.cf'" in found.message


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
    changed = [
        base,
        dataclasses.replace(base, steps=()),
        dataclasses.replace(base, steps=(dataclasses.replace(base.steps[0], first_unit=1),)),
        dataclasses.replace(base, routes=(dataclasses.replace(base.routes[0], copies=1),)),
        dataclasses.replace(
            base, routes=(dataclasses.replace(base.routes[0], weights=((Box.whole((4, 4)), 2),)),)
        ),
        dataclasses.replace(base, tied={"x": "w"}),
        dataclasses.replace(base, parts={0: [Part(0, 0, 0, 8)]}),
    ]
    assert len({plan.digest for plan in changed}) == len(changed)


def test_a_model_of_a_thousand_parameters_is_few_steps():
    rng = random.Random(3)
    params = {f"layers.{i}.w": ((rng.choice([64, 128]), 64), "bfloat16") for i in range(1000)}
    sources = [fsdp(n, s, 8, d) for n, (s, d) in params.items()]
    first = replicated(params, 8, 1)[0].manifest
    plan = compile_plan(sources, [Worker(8 + w, f"s{w}", first) for w in range(8)], 8)
    assert plan.summary.parameters == 1000 and plan.summary.steps == 1
