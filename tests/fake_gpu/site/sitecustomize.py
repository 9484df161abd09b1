"""Puts the fake GPU into a mover's process; a mover of another GPU sees none (FAKE_GPU=blind)."""

import os

from tests.fake_gpu import FakeDevice, in_place

_held = in_place(FakeDevice(total=int(os.environ.get("FAKE_GPU_TOTAL", 1 << 30))))
_device = _held.__enter__()
if os.environ.get("FAKE_GPU") == "blind":
    _device.uuid = bytes(16)
