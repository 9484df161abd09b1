"""A slab in device memory: ordered stamps, sharing, lack of memory, and the end. Over a GPU made of host memory."""

from __future__ import annotations

import gc
import os
import struct
import sys

import pytest
import torch
from tests.fake_gpu import UUID, FakeDevice, in_place

from weightsync_engine.layout.tensors import SlabTensor
from weightsync_engine.mover import cuda
from weightsync_engine.mover import slab as module
from weightsync_engine.mover.memory import MIB, Needs, Staging, check_memory
from weightsync_engine.mover.slab import HEADER_BYTES, Slab, SlabError
from weightsync_engine.mover.supervisor import nccl_library

PLACE = SlabTensor(256, (4,), "float32")


@pytest.fixture
def gpu():
    with in_place(FakeDevice()) as device:
        yield device


@pytest.fixture
def slab(gpu):
    made = Slab.create(1024, "cuda:0")
    yield made
    gpu.run()
    made.close()


def test_the_stamp_shows_when_the_stream_has_done_its_copies_and_nobody_waits(slab, gpu):
    waits = gpu.waits
    slab.begin_write()
    slab.stamp_after_copies("step-1", 1)
    assert slab.read_stamp() is None and slab.copying
    gpu.run()
    assert slab.read_stamp().version == "step-1" and not slab.copying
    assert gpu.waits == waits


def test_a_copy_that_ends_after_the_next_publish_began_never_shows_as_the_next_version(slab, gpu):
    slab.begin_write()
    slab.stamp_after_copies("step-1", 1)
    slab.begin_write()
    slab.stamp_after_copies("step-2", 2)
    first, second = gpu.pending
    gpu.pending = [first]
    gpu.run()
    assert slab.read_stamp() is None
    gpu.pending = [second]
    gpu.run()
    assert slab.read_stamp().version == "step-2"


def test_a_publish_changes_the_stamp_before_its_first_copy(slab, gpu):
    slab.begin_write()
    slab.stamp_after_copies("step-1", 1)
    gpu.run()
    assert slab.read_stamp() is not None
    slab.begin_write()
    assert slab.read_stamp() is None and not slab.copying


def test_waiting_for_a_stamp_is_bounded_and_only_for_a_stream(slab, gpu):
    slab.begin_write()
    assert slab.wait_stamp(60) is None  # a writer on the host: not waited for
    slab.stamp_after_copies("step-1", 1)
    assert slab.wait_stamp(0.02) is None
    gpu.run()
    assert slab.wait_stamp(0).version == "step-1"


@pytest.mark.parametrize("refuses", ["cannot", "register", "write_after_stream"])
def test_where_a_stream_cannot_write_words_the_stamp_waits_for_the_copies(refuses, caplog, monkeypatch):
    device = FakeDevice(writes=refuses != "cannot")
    if refuses != "cannot":

        def refused(*_):
            raise cuda.CudaError(refuses, 801, "not supported")

        monkeypatch.setattr(device, refuses, refused)
    with in_place(device):
        slab = Slab.create(1024, "cuda:0")
        assert "every publish waits" in caplog.text and not device.registered
        waits = device.waits
        slab.begin_write()
        slab.stamp_after_copies("step-1", 1)
        assert slab.read_stamp().version == "step-1" and device.waits == waits + 1
        slab.close()


def test_a_mover_maps_the_same_memory_by_what_the_header_says(slab):
    assert os.fstat(slab.fd).st_size == HEADER_BYTES
    other = Slab.attach(os.dup(slab.fd))
    slab.begin_write()
    slab.tensor(PLACE).copy_(torch.tensor([1.0, 2, 3, 4]))
    slab.stamp("step-1", 7)
    assert other.tensor(PLACE).tolist() == [1, 2, 3, 4]
    assert other.read_stamp().sequence == 7
    other.close()


def test_a_new_slab_is_all_zeros(slab):
    assert not slab._payload.any() and slab._payload.numel() == 1024


@pytest.mark.parametrize(
    ("at", "value", "words"),
    [
        (16, struct.pack("<Q", 1 << 40), "1099511627776 bytes of payload in"),
        (module._DEVICE_AT, bytes(16), "is not visible"),
        (module._DEVICE_AT + 16, struct.pack("<qq", os.getpid(), 9999), "cannot be mapped.*invalid"),
        (8, struct.pack("<Q", 3), "kind 3"),
    ],
    ids=["too-large", "another-gpu", "bad-handle", "unknown-kind"],
)
def test_a_header_that_does_not_fit_is_refused(slab, at, value, words):
    slab._bytes[at : at + len(value)] = value
    with pytest.raises(SlabError, match=words):
        Slab.attach(os.dup(slab.fd))


def test_memory_comes_back_when_slab_and_views_are_gone(gpu):
    slab = Slab.create(5 << 20, "cuda:0")
    assert gpu.used == 6 << 20 and gpu.registered
    view = slab.tensor(PLACE)
    slab.close()
    gc.collect()
    assert gpu.used and not gpu.registered and view.tolist() == [0, 0, 0, 0]
    del view, slab
    gc.collect()
    assert gpu.used == 0


def test_a_slab_that_is_dropped_without_close_gives_all_back(gpu):
    slab = Slab.create(1024, "cuda:0")
    os.close(slab._fd)
    del slab
    gc.collect()
    assert gpu.used == 0 and not gpu.registered


def test_the_header_stays_where_a_stuck_stream_may_still_write_to_it(gpu, monkeypatch, caplog):
    monkeypatch.setattr(module, "_DRAIN_SECONDS", 0.02)
    monkeypatch.setattr(module, "_left_behind", [])
    slab = Slab.create(1024, "cuda:0")
    slab.begin_write()
    slab.stamp_after_copies("step-1", 1)
    slab.close()
    del slab
    gc.collect()
    assert gpu.registered and gpu.used and module._left_behind and "its memory is kept" in caplog.text
    gpu.run()  # would be a write to memory of others, were it not kept


def test_too_little_memory_is_told_in_bytes_and_leaves_nothing(gpu):
    gpu.cached = 1 << 20
    with pytest.raises(
        SlabError, match=r"slab of 2147483648 bytes on cuda:0 .*: 1073741824 of 1073741824 bytes"
    ):
        Slab.create(1 << 31, "cuda:0")
    assert gpu.used == 0


def test_memory_that_torch_holds_unused_is_given_back_first(gpu):
    gpu.cached = (1 << 30) - 1024
    slab = Slab.create(1 << 20, "cuda:0")
    assert gpu.cached == 0
    slab.close()


def test_memory_that_cannot_be_shared_is_told_at_once_with_what_to_change():
    with in_place(FakeDevice(exports=False)) as device:
        with pytest.raises(
            SlabError, match=r"cannot be shared with the mover: cuIpcGetMemHandle.*CUDA IPC is needed"
        ):
            Slab.create(1024, "cuda:0")
        gc.collect()
        assert device.used == 0


def test_a_slab_on_another_kind_of_device_is_refused():
    with pytest.raises(SlabError, match="only host memory and CUDA"):
        Slab.create(1024, "meta")


# ---- what is needed --------------------------------------------------------------------------------------------------


def test_a_lack_of_memory_names_every_number_and_what_to_do(gpu):
    needs = Needs.of("shadow", 500 * MIB, 100 * MIB)
    with pytest.raises(SlabError) as e:
        check_memory(needs, torch.device("cuda:0"), "use more GPUs")
    contexts = needs.contexts
    for number in (needs.total, 500 * MIB, contexts, 100 * MIB, 1 << 30, needs.total - (1 << 30)):
        assert f"{number} bytes" in str(e.value)
    assert str(e.value).endswith("use more GPUs")


def test_what_would_leave_nothing_for_the_kv_cache_is_told_too():
    with in_place(FakeDevice(total=8 << 30)) as device:
        needs = Needs.of("shadow", 1 << 30, 0)
        check_memory(needs, torch.device("cuda:0"), "", limit=needs.total)
        device.cached = MIB
        with pytest.raises(SlabError, match=r"1048576 bytes \(1 MB\) too little, and nothing would be left"):
            check_memory(needs, torch.device("cuda:0"), "", limit=needs.total)


def test_weights_that_move_need_room_for_both_copies_and_then_only_for_movers():
    needs = Needs.of("weights", 4 << 30, MIB, replaced=4 << 30)
    assert needs.total == 4 << 30
    assert needs.lasting == needs.contexts + MIB
    with in_place(FakeDevice(total=8 << 30)) as device:
        device.cached = 3 << 30
        check_memory(needs, torch.device("cuda:0"), "", limit=(3 << 30) + needs.lasting)
        with pytest.raises(SlabError, match=r"1048576 bytes \(1 MB\) too little, and nothing would be left"):
            check_memory(needs, torch.device("cuda:0"), "", limit=(3 << 30) + needs.lasting - MIB)
    said = r"4294967296 bytes .* for the weights, given back before"
    with in_place(FakeDevice(total=3 << 30)), pytest.raises(SlabError, match=said):
        check_memory(needs, torch.device("cuda:0"), "")


def test_unused_memory_of_torch_counts_as_free(gpu):
    gpu.cached = (1 << 30) - MIB
    check_memory(Needs("snapshot", 512 * MIB, 0, 0), torch.device("cuda:0"), "")


def test_staging_is_taken_given_to_the_transport_and_taken_again(gpu):
    staging = Staging(gpu, 100 * MIB)
    assert staging.hold() == "" and gpu.used == 100 * MIB
    assert staging.hold() == "" and gpu.used == 100 * MIB
    staging.release()
    gc.collect()
    assert gpu.used == 0
    taken = gpu.allocate(1000 * MIB)
    assert "no 104857600 bytes" in staging.hold()
    del taken
    gc.collect()
    assert staging.hold(1.0) == "" and staging.held == 100 * MIB


def test_staging_without_a_gpu_is_nothing():
    staging = Staging(None, 1 << 40)
    assert staging.hold() == "" and staging.held == 0


@pytest.mark.parametrize("text", ["-1", "2 GiB", ""])
def test_a_bad_size_of_staging_is_refused(text, monkeypatch):
    from weightsync_engine.mover.memory import staging_bytes

    monkeypatch.setenv("WEIGHTSYNC_STAGING_MIB", text)
    with pytest.raises(ValueError, match="WEIGHTSYNC_STAGING_MIB"):
        staging_bytes()


# ---- names of GPUs ---------------------------------------------------------------------------------------------------


def test_a_child_sees_the_one_gpu_by_its_uuid():
    name = "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"
    assert cuda.visible_to_child(UUID, {"CUDA_VISIBLE_DEVICES": "3,1"}) == {"CUDA_VISIBLE_DEVICES": name}
    assert cuda.visible_to_child(UUID, {}) == {"CUDA_VISIBLE_DEVICES": name}


def test_a_part_of_a_gpu_keeps_its_own_name():
    assert cuda.visible_to_child(UUID, {"CUDA_VISIBLE_DEVICES": "MIG-1234"}) == {}


# ---- NCCL ------------------------------------------------------------------------------------------------------------


def test_a_mover_loads_the_nccl_that_its_parent_preloads_and_nothing_else_of_it():
    assert nccl_library("/opt/tcmalloc.so:/opt/nccl/libnccl.so.2") == "/opt/nccl/libnccl.so.2"


def test_else_the_one_of_the_first_wheel_on_the_path(tmp_path, monkeypatch):
    library = tmp_path / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
    library.parent.mkdir(parents=True)
    library.touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for name in ("nvidia", "nvidia.nccl"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert nccl_library("/opt/tcmalloc.so") == str(library)
    library.unlink()
    assert nccl_library("") == ""
