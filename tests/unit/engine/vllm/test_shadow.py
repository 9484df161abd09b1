"""The copy from the shadow to the live weights, and what a worker says of them."""

from __future__ import annotations

import pytest
import torch

from weightsync_engine.layout.boxes import Box
from weightsync_engine.layout.tensors import Piece, WorkerManifest
from weightsync_engine.mover.slab import Slab, plan_slab
from weightsync_engine.resolve.manifest import Resolved
from weightsync_engine.vllm import shadow as module
from weightsync_engine.vllm.shadow import Flipped, Shadow

WANT = Flipped("uid", 3, 7, "step-7")


@pytest.fixture
def fused() -> torch.Tensor:
    """A live tensor of two parameters, of which the shadow holds each for itself."""
    return torch.zeros(6, 4)


@pytest.fixture
def shadow(fused: torch.Tensor) -> Shadow:
    views = {"gate": fused[:4], "up": fused[4:]}
    tensors, size = plan_slab((name, tuple(view.shape), "float32") for name, view in views.items())
    slab = Slab.create(size)
    return Shadow(Resolved(WorkerManifest({}, (), tensors, {}), size, views, ""), slab)


@pytest.fixture
def shared() -> tuple[torch.Tensor, Shadow]:
    """A live tensor of two parameters, of which only `gate` has a place: something else may write `up`."""
    live = torch.arange(24.0).view(6, 4)
    tensors, size = plan_slab([("gate_up", (6, 4), "float32")])
    gate = Piece("gate", Box((0, 0), (4, 4)), "gate_up", (0, 0))
    manifest = WorkerManifest({}, (gate,), tensors, {"up": "its loader transforms it"})
    resolved = Resolved(manifest, size, {"gate_up": live}, "", frozenset({"gate_up"}))
    return live, Shadow(resolved, Slab.create(size))


def test_what_no_piece_fills_stays_as_it_was_live() -> None:
    live = torch.arange(24.0).view(6, 4)
    tensors, size = plan_slab([("embed", (6, 4), "float32")])
    rows = Piece("embed", Box((0, 0), (5, 4)), "embed", (0, 0))
    resolved = Resolved(WorkerManifest({}, (rows,), tensors, {}), size, {"embed": live}, "")
    shadow = Shadow(resolved, Slab.create(size))
    shadow.slab.begin_write()
    shadow.slab.tensor(tensors["embed"])[:5] = 7
    shadow.slab.stamp("step-7", 7)
    assert shadow.flip(WANT) is None
    assert (live[:5] == 7).all()
    assert live[5].tolist() == [20.0, 21.0, 22.0, 23.0], "the padding"


def test_a_flip_keeps_what_another_wrote_beside_our_pieces(shared: tuple[torch.Tensor, Shadow]) -> None:
    live, shadow = shared
    receive(shadow, "step-7", 7, 7.0)
    live[4:] = 5
    assert shadow.flip(WANT) is None
    assert (live[:4] == 7).all()
    assert (live[4:] == 5).all(), "the shadow's old copy of it came back"


def receive(shadow: Shadow, version: str, round_: int, value: float) -> None:
    """What a mover does."""
    shadow.slab.begin_write()
    for tensor in shadow._next:
        tensor.fill_(value)
    shadow.slab.stamp(version, round_)


def test_a_verified_shadow_becomes_live_wholly(shadow: Shadow, fused: torch.Tensor) -> None:
    receive(shadow, "step-7", 7, 7.0)
    assert shadow.flip(WANT) is None
    assert (fused == 7).all()
    assert (shadow.live, shadow.torn) == (WANT, False)


@pytest.mark.parametrize(
    ("version", "round_"), [("step-6", 7), ("step-7", 6)], ids=["another-version", "another-round"]
)
def test_a_shadow_of_something_else_is_never_copied(
    shadow: Shadow, fused: torch.Tensor, version: str, round_: int
) -> None:
    receive(shadow, version, round_, 9.0)
    problem = shadow.flip(WANT)
    assert problem is not None
    assert problem.reason == "ShadowNotVerified"
    assert f"{version} of round {round_}" in problem.message
    assert (fused == 0).all()
    assert (shadow.live, shadow.torn) == (None, False)


def test_a_shadow_that_was_never_or_is_half_written_is_never_copied(
    shadow: Shadow, fused: torch.Tensor
) -> None:
    assert shadow.flip(WANT) is not None
    shadow.slab.begin_write()
    shadow._next[0].fill_(9.0)
    assert shadow.flip(WANT) is not None
    assert (fused == 0).all()


def test_a_repeated_flip_copies_nothing_more(shadow: Shadow, fused: torch.Tensor) -> None:
    receive(shadow, "step-7", 7, 7.0)
    shadow.flip(WANT)
    receive(shadow, "step-8", 8, 8.0)
    assert shadow.flip(WANT) is None
    assert (fused == 7).all()


def test_weights_are_torn_until_a_whole_flip_if_a_copy_breaks(
    shadow: Shadow, fused: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    receive(shadow, "step-7", 7, 7.0)

    def broken(live: list[torch.Tensor], new: list[torch.Tensor]) -> None:
        live[0].copy_(new[0])
        raise RuntimeError("device lost")

    with monkeypatch.context() as m:
        m.setattr(module.torch, "_foreach_copy_", broken)
        with pytest.raises(RuntimeError, match="device lost"):
            shadow.flip(WANT)
    assert shadow.torn
    assert shadow.live is None
    assert shadow.flip(WANT) is None
    assert (fused == 7).all()
    assert not shadow.torn


def test_a_shadow_that_is_written_during_the_copy_leaves_the_weights_torn(
    shadow: Shadow, monkeypatch: pytest.MonkeyPatch
) -> None:
    receive(shadow, "step-7", 7, 7.0)
    copy = torch._foreach_copy_

    def overtaken(live: list[torch.Tensor], new: list[torch.Tensor]) -> None:
        copy(live, new)
        shadow.slab.begin_write()

    monkeypatch.setattr(module.torch, "_foreach_copy_", overtaken)
    problem = shadow.flip(WANT)
    assert problem is not None
    assert problem.reason == "ShadowOverwritten"
    assert shadow.torn


def test_the_first_flip_of_an_epoch_notices_live_memory_that_did_not_take_the_copy(
    shadow: Shadow, monkeypatch: pytest.MonkeyPatch
) -> None:
    receive(shadow, "step-7", 7, 7.0)
    monkeypatch.setattr(module.torch, "_foreach_copy_", lambda live, new: live[0].copy_(new[0]))
    problem = shadow.flip(WANT)
    assert problem is not None
    assert problem.reason == "FlipNotExact"
    assert "up" in problem.message
    assert shadow.torn
