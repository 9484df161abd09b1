"""Stacks: like parameters as one reshard, from and to where they lie."""

import copy
import dataclasses
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.engine.plan.helpers import fsdp, manifest, run

from weightsync_engine.layout.boxes import Box
from weightsync_engine.layout.kinds import kind_of
from weightsync_engine.layout.shards import shard_boxes
from weightsync_engine.layout.tensors import (
    DTYPE_BYTES,
    Mesh,
    Replicate,
    Shard,
    SourceParameter,
    WorkerManifest,
)
from weightsync_engine.mover.slab import plan_slab
from weightsync_engine.plan.compile import compile_plan
from weightsync_engine.plan.cost import links, rank_costs
from weightsync_engine.plan.groups import Worker
from weightsync_engine.plan.steps import Stack
from weightsync_engine.plan.validate import M2N, Envelope
from weightsync_engine.transport.gloo import GlooTransport
from weightsync_engine.transport.nccl import M2NTransport, P2PTransport, _share

ALL = Envelope(stack_bytes=1)


def stacks(plan):
    return [step for step in plan.steps if isinstance(step, Stack)]


def names(plan, step):
    return [plan.routes[at].source.name for at in step.routes]


def even(shape, axis, parts, index):
    """Part `index` of `parts` equal ones along a dimension."""
    n = shape[axis] // parts
    start = tuple(n * index if d == axis else 0 for d in range(len(shape)))
    return Box(start, (*shape[:axis], n, *shape[axis + 1 :]))


@st.composite
def layered(draw):
    """Like parameters in layers, cut evenly by FSDP over some or all trainers along any dimension, and by tensor
    parallelism along any; replicas inside a server and beside it, alone or inside larger tensors."""
    trainers = draw(st.sampled_from([2, 3, 4, 6, 1]))
    servers = draw(
        st.sampled_from([[2], [4], [2, 2], [2, 2, 2], [4, 4], [3, 3], [4, 2], [1, 1], [1], [2, 3, 3]])
    )
    many = draw(st.integers(1, 5))
    sources, params, spots = [], {}, [{} for _ in range(sum(servers))]
    for kind in range(draw(st.integers(1, 2))):
        first = draw(st.integers(0, trainers - 1)) if draw(st.integers(0, 3)) == 0 else 0
        senders = draw(st.integers(1, trainers - first)) if first else trainers
        shape = draw(st.lists(st.integers(1, 4), min_size=draw(st.sampled_from([2, 1])), max_size=3))
        cut = {
            size: draw(st.sampled_from([g for g in range(1, size + 1) if size % g == 0]))
            for size in set(servers)
        }
        sent, wanted = (draw(st.integers(0, len(shape) - 1)) for _ in range(2))
        shape[sent] *= senders
        shape[wanted] *= math.lcm(*cut.values()) // (
            math.gcd(senders, *cut.values()) if sent == wanted else 1
        )
        shape = tuple(shape)
        outer, inside = draw(st.booleans()), draw(st.booleans())
        dtype = draw(st.sampled_from(["float32", "bfloat16"]))
        for layer in draw(st.permutations(range(many))):
            name = f"layers.{8 + layer}.kind-{kind}"
            mesh = Mesh((senders,), tuple(range(first, first + senders)))
            sources.append(SourceParameter(name, shape, dtype, mesh, (Shard(sent),)))
            params[name] = shape, dtype
            position = 0
            for size in servers:
                for w in range(size):
                    shard = w // (size // cut[size]) if outer else w % cut[size]
                    box = even(shape, wanted, cut[size], shard)
                    at = (2, *(0 for _ in shape[1:])) if inside else (0,) * len(shape)
                    held = (box.shape[0] + at[0], *box.shape[1:])
                    spots[position][name] = [(box, held, at, f"live {name}")]
                    position += 1
    workers, rank = [], trainers
    for number, size in enumerate(servers):
        for _ in range(size):
            workers.append(Worker(rank, f"server-{number}", manifest(params, spots[rank - trainers])))
            rank += 1
    return sources, workers, trainers


LIMITS = st.builds(
    Envelope,
    max_sources=st.sampled_from([16, 16, 2]),
    max_targets=st.sampled_from([64, 64, 4, 3, 2, 1]),
    max_local_bytes=st.sampled_from([1 << 20, 1000, 100, 32]),
    stack_bytes=st.sampled_from([1, 1, 200]),
)


@given(layered(), LIMITS)
@settings(max_examples=250, deadline=None)
def test_every_element_arrives_once_per_copy_and_inside_the_envelope(world, limits):
    plan = run(*world, limits)
    for step in stacks(plan):
        held = [kind_of(name) for name in names(plan, step)]
        assert len({kind for kind, _ in held}) == 1 and held == sorted(held)
        assert math.prod(step.shape) * step.parts == len(held) * math.prod(step.parameter)
    costs, sent = rank_costs(plan), links(plan)
    assert sum(sent.values()) == plan.bytes_received == sum(c.bytes_received for c in costs)
    for rank in range(plan.world_size):
        assert sum(n for (a, _), n in sent.items() if a == rank) == costs[rank].bytes_sent
        own = plan.local(rank)
        ends = {rank: {p for s in own for p in s.peers}}
        assert ends[rank] == {b if a == rank else a for a, b in sent if rank in (a, b)}
        assert costs[rank].staging_bytes == max((s.local_bytes for s in own), default=0)


@given(layered(), st.randoms())
@settings(max_examples=60, deadline=None)
def test_all_ranks_make_the_same_stacks_in_whatever_order_and_objects_the_inputs_come(world, rng):
    sources, workers, trainers = world
    first = compile_plan(sources, workers, trainers, ALL)
    mixed = copy.deepcopy(sources), [copy.deepcopy(w) for w in workers]
    for inputs in mixed:
        rng.shuffle(inputs)
    again = compile_plan(*mixed, trainers, ALL)
    assert (again.digest, again.steps) == (first.digest, first.steps)


# ---- a small transformer ---------------------------------------------------------------------------------------------

LAYERS, HIDDEN, HEADS, KV, WIDTH, ROWS = 12, 64, 128, 64, 192, 256


def transformer():
    """Name -> (shape, dimension that tensor parallelism cuts)."""
    found = {
        "embed.weight": ((ROWS, HIDDEN), 0),
        "lm_head.weight": ((ROWS, HIDDEN), 0),
        "norm.weight": ((64,), None),
    }
    for i in range(LAYERS):
        found |= {
            f"layers.{i}.{name}.weight": what
            for name, what in {
                "q": ((HEADS, HIDDEN), 0), "k": ((KV, HIDDEN), 0), "v": ((KV, HIDDEN), 0), "o": ((HIDDEN, HEADS), 1),
                "gate": ((WIDTH, HIDDEN), 0), "up": ((WIDTH, HIDDEN), 0), "down": ((HIDDEN, WIDTH), 1),
                "norm": ((HIDDEN,), None),
            }.items()
        }  # fmt: skip
    return found


def fleet(trainers, servers, tensor):
    """Sources, workers, and by rank how its slab is laid out, by the rules of the product."""
    model = transformer()
    sources = [fsdp(name, shape, trainers, "bfloat16") for name, (shape, _) in model.items()]
    params = {s.name: (s.shape, s.dtype) for s in sources}
    slabs = {
        rank: plan_slab((s.name, shard_boxes(s)[rank].shape, s.dtype) for s in sources)
        for rank in range(trainers)
    }
    manifests = []
    for w in range(tensor):
        places = {}
        for name, (shape, axis) in model.items():
            box = Box.whole(shape) if axis is None else even(shape, axis, tensor, w)
            places[name] = [(box, box.shape, (0,) * len(shape), f"{name} in a fused one")]
        made = manifest(params, places)
        placed = plan_slab((n, t.shape, t.dtype) for n, t in made.tensors.items())
        manifests.append(WorkerManifest(made.expected, made.pieces, placed[0], {}))
        for s in range(servers):
            slabs[trainers + s * tensor + w] = placed
    workers = [
        Worker(trainers + s * tensor + w, f"s{s}", manifests[w])
        for s in range(servers)
        for w in range(tensor)
    ]
    return sources, workers, slabs


def packed(plan, rank, slab):
    """(bytes of this rank's shares that are no run of its slab, bytes of all)."""
    places, size = slab
    memory = torch.zeros(size, dtype=torch.uint8)

    def local(part):
        place = places[part.tensor]
        flat = memory[place.offset : place.offset + math.prod(place.shape) * DTYPE_BYTES[place.dtype]]
        region = flat.view(getattr(torch, place.dtype)).view(place.shape)
        return region[tuple(slice(a, b) for a, b in zip(part.box.start, part.box.stop, strict=True))]

    steps = plan.local(rank)
    bad = sum(s.local_bytes for s in steps if _share(s, local).run is None)
    return bad, sum(s.local_bytes for s in steps)


@pytest.mark.parametrize(("trainers", "servers", "tensor"), [(2, 1, 2), (4, 3, 4), (1, 2, 1)])
def test_stacks_travel_as_they_lie_in_both_slabs(trainers, servers, tensor):
    sources, workers, slabs = fleet(trainers, servers, tensor)
    limits = Envelope(max_local_bytes=40 << 10, stack_bytes=4 << 10)
    plan = run(sources, workers, trainers, limits)
    norms = [at for at, route in enumerate(plan.routes) if "norm" in route.source.name]
    assert set(range(len(plan.routes))) - plan.stacked == set(norms)
    rest = sum(math.prod(plan.routes[at].source.shape) for at in norms) * 2
    for rank in range(plan.world_size):
        bad, total = packed(plan, rank, slabs[rank])
        assert bad <= rest < total / 50
    flows = compile_plan(sources, workers, trainers, dataclasses.replace(limits, stack_bytes=0))
    assert flows.bytes_received == plan.bytes_received
    if tensor > 1:
        assert all(
            bad == total for bad, total in (packed(flows, r, slabs[r]) for r in range(plan.world_size))
        )


def test_a_stack_is_cut_at_whole_parameters_and_a_large_parameter_at_rows_that_stay_runs():
    sources, workers, slabs = fleet(2, 1, 2)
    plan = run(sources, workers, 2, Envelope(max_local_bytes=10 << 10, stack_bytes=4 << 10))
    of = {}
    for step in stacks(plan):
        kind, _ = kind_of(plan.routes[step.routes[0]].source.name)
        of.setdefault(kind, []).append(step)
    # A rank's share of one: gate 12 KiB in two parts, q 8 KiB, k 4 KiB; down 12 KiB, which cannot be parted.
    assert [(s.shape, s.part, s.parts) for s in of["layers.#.gate.weight"][:2]] == [
        ((1, 96, 64), 0, 2), ((1, 96, 64), 1, 2)
    ]  # fmt: skip
    assert [s.shape for s in of["layers.#.q.weight"]] == [(1, HEADS, HIDDEN)] * LAYERS
    assert [s.shape for s in of["layers.#.k.weight"]] == [(2, KV, HIDDEN)] * 6
    assert [(s.shape, s.target.axis) for s in of["layers.#.o.weight"]] == [((1, HIDDEN, HEADS), 2)] * LAYERS
    assert "layers.#.down.weight" not in of
    for rank in range(4):
        bad, _ = packed(plan, rank, slabs[rank])
        assert bad <= (LAYERS * WIDTH * HIDDEN + (LAYERS + 1) * HIDDEN * 2) * 2 // 2


def test_layers_are_stacked_in_the_order_of_their_numbers():
    sources, workers, _ = fleet(2, 1, 2)
    plan = compile_plan(sources, workers, 2, ALL)
    found = next(names(plan, step) for step in stacks(plan) if ".q." in names(plan, step)[0])
    assert found == [f"layers.{i}.q.weight" for i in range(LAYERS)]


# ---- which mesh ------------------------------------------------------------------------------------------------------


def world(trainers, places, servers=1, axis=0, shape=(24, 24), layers=2, within=None, placement=None):
    """`places`: of each worker of a server (dimension, parts, which part)."""
    params = {f"layers.{i}.w": (shape, "float32") for i in range(layers)}
    sources = [fsdp(n, shape, trainers, placement=placement or Shard(axis)) for n in params]
    workers = []
    for s in range(servers):
        for at in places:
            box = even(shape, *at)
            spots = {n: [(box, box.shape, (0, 0), n)] for n in params}
            workers.append(Worker(trainers + len(workers), f"s{s}", manifest(params, spots)))
    return sources, workers, trainers


ROW, COLUMN = [(0, 2, 0), (0, 2, 1)], [(1, 2, 0), (1, 2, 1)]
WHOLE = [(0, 1, 0), (0, 1, 0)]


@pytest.mark.parametrize(
    ("places", "servers", "limits", "meshes", "shape"),
    [
        (ROW, 1, {}, [((2,), (Shard(1),))], (2, 24, 24)),
        (COLUMN, 1, {}, [((2,), (Shard(2),))], (2, 24, 24)),
        (WHOLE, 1, {}, [((2, 1), (Replicate(), Shard(0)))], (2, 24, 24)),
        (COLUMN, 3, {}, [((3, 2), (Replicate(), Shard(2)))], (2, 24, 24)),
        (WHOLE, 3, {}, [((6, 1), (Replicate(), Shard(0)))], (2, 24, 24)),
        ([*COLUMN, *COLUMN], 1, {}, [((2, 2), (Replicate(), Shard(2)))], (2, 24, 24)),
        ([*COLUMN, *COLUMN], 2, {}, [((4, 2), (Replicate(), Shard(2)))], (2, 24, 24)),
        ([COLUMN[0]] * 2 + [COLUMN[1]] * 2, 1, {}, [((2, 2), (Shard(2), Replicate()))], (2, 24, 24)),
        ([COLUMN[0]] * 2 + [COLUMN[1]] * 2, 2, {}, [((2, 2), (Shard(2), Replicate()))] * 2, (2, 24, 24)),
        (COLUMN, 3, {"max_targets": 4}, [((2, 2), (Replicate(), Shard(2))), ((2,), (Shard(2),))], (2, 24, 24)),
        (ROW, 3, {"max_targets": 2}, [((2, 2), (Replicate(), Shard(1))), ((2,), (Shard(1),))], (2, 24, 24)),
    ],
)  # fmt: skip
def test_all_servers_take_a_stack_in_as_few_steps_as_a_mesh_can_say(places, servers, limits, meshes, shape):
    plan = run(*world(2, places, servers), dataclasses.replace(ALL, **limits))
    assert [(s.target.mesh, s.target.placements) for s in plan.steps] == meshes
    assert {s.shape for s in stacks(plan)} == {shape} and len(stacks(plan)) == len(meshes)


def test_dimensions_that_nobody_cuts_are_taken_together_and_ranks_stay_within_three():
    shape = (2, 3, 4, 2, 6, 5)
    params = {f"layers.{i}.w": (shape, "float32") for i in range(3)}
    spots = [[(even(shape, 4, 3, w), (2, 3, 4, 2, 2, 5), (0,) * 6)] for w in range(3)]
    workers = [
        Worker(2 + w, "s", manifest(params, {n: [(*spot, n) for spot in spots[w]] for n in params}))
        for w in range(3)
    ]
    plan = run([fsdp(n, shape, 2, placement=Shard(2)) for n in params], workers, 2, ALL)
    assert [s.shape for s in stacks(plan)] == [(3 * 6, 8, 30)]


# ---- what is left to flows -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("made", "limits"),
    [
        (world(2, ROW), Envelope()),
        (world(2, ROW), Envelope(stack_bytes=2 * 24 * 24 * 2 + 1)),
        (world(5, ROW), ALL),
        (world(2, ROW, placement=Replicate()), ALL),
        (world(2, [(0, 3, 0), (0, 3, 1), (0, 3, 2)][::-1]), ALL),
        (world(3, COLUMN), dataclasses.replace(ALL, max_sources=2)),
        (world(3, COLUMN), dataclasses.replace(ALL, max_targets=1)),
        (world(2, COLUMN), dataclasses.replace(ALL, max_local_bytes=24 * 24)),
    ],
    ids=[
        "a transport without stacks", "too little", "uneven", "held by several", "not in order", "too many sources",
        "too many targets", "too large",
    ],
)  # fmt: skip
def test_what_a_stack_cannot_say_or_is_not_worth_it_goes_by_flows(made, limits):
    plan = run(*made, limits)
    assert not stacks(plan) and plan.steps and not plan.stacked


def test_transports_that_send_blocks_straight_between_views_take_no_stacks():
    assert {kind: kind.envelope.stack_bytes > 0 for kind in (GlooTransport, P2PTransport, M2NTransport)} == {
        GlooTransport: False, P2PTransport: False, M2NTransport: True
    }  # fmt: skip


@pytest.mark.parametrize("tensor", [False, True], ids=["each on one worker", "cut over the workers"])
def test_what_would_leave_most_ranks_idle_goes_by_flows(tensor):
    # Experts, each on one trainer.
    params = {f"layers.0.experts.{e}.w": ((8, 8), "float32") for e in range(4)}
    sources = [
        SourceParameter(n, s, d, Mesh((1,), (e // 2,)), (Shard(0),))
        for e, (n, (s, d)) in enumerate(params.items())
    ]
    boxes = [even((8, 8), 0, 2, w) if tensor else Box.whole((8, 8)) for w in range(2)]
    held = [list(params) if tensor else list(params)[2 * w : 2 * w + 2] for w in range(2)]
    workers = [
        Worker(2 + w, "s", manifest(params, {n: [(boxes[w], boxes[w].shape, (0, 0), n)] for n in held[w]}))
        for w in range(2)
    ]
    plan = run(sources, workers, 2, ALL)
    assert not stacks(plan) and [s.source.mesh for s in plan.steps] == [(2,)]


def test_two_alike_in_all_but_kind_or_dtype_are_stacks_of_their_own():
    params = {f"layers.{i}.{n}": ((4, 4), d) for i in (0, 1) for n, d in (("k", "float32"), ("v", "float32"))}
    params["layers.2.k"] = (4, 4), "bfloat16"
    spots = {n: [(Box.whole((4, 4)), (4, 4), (0, 0), n)] for n in params}
    worker = Worker(2, "s", manifest(params, spots))
    plan = run([fsdp(n, s, 2, d) for n, (s, d) in params.items()], [worker], 2, ALL)
    assert sorted(names(plan, s) for s in stacks(plan)) == [
        ["layers.0.k", "layers.1.k"], ["layers.0.v", "layers.1.v"], ["layers.2.k"]
    ]  # fmt: skip


def test_plans_whose_stacks_differ_in_one_place_have_different_digests():
    plan = compile_plan(*world(2, COLUMN, layers=3), ALL)
    (step,) = plan.steps
    changed = [
        plan,
        *(
            dataclasses.replace(plan, steps=(dataclasses.replace(step, **change),))
            for change in (
                {"routes": step.routes[::-1]}, {"axes": (1, 0)}, {"part": 1}, {"parts": 2}, {"shape": (3, 24, 48)},
                {"parameter": (24, 12)}, {"source": dataclasses.replace(step.source, placements=(Shard(0),))},
            )
        ),
    ]  # fmt: skip
    assert len({p.digest for p in changed}) == len(changed)


def test_a_model_of_many_layers_is_as_many_steps_as_it_has_kinds():
    rng = random.Random(3)
    params = {f"layers.{i}.{n}.w": ((64, 64), "bfloat16") for i in range(200) for n in "abc"}
    order = list(params)
    rng.shuffle(order)
    spots = {n: [(Box.whole((64, 64)), (64, 64), (0, 0), n)] for n in order}
    workers = [Worker(8 + w, f"s{w}", manifest(params, spots)) for w in range(8)]
    plan = compile_plan([fsdp(n, (64, 64), 8, "bfloat16") for n in order], workers, 8, ALL)
    assert [len(s.routes) for s in stacks(plan)] == [200] * 3 and len(plan.steps) == 3
    assert M2N.stack_bytes > 200 * 64 * 64 * 2, "a few kilobytes a layer are not worth steps of their own"
    assert not stacks(compile_plan([fsdp(n, (64, 64), 8, "bfloat16") for n in order], workers, 8))
