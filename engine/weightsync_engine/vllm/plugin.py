"""Entry point of `vllm.general_plugins`: makes `--weight-transfer-config '{"backend": "weightsync"}'` known.

vLLM runs it in its API server (before it parses arguments), in an inspection process, in the engine core and
in every worker. So it has no effect but the one entry in vLLM's table and one interval, and imports nothing of ours
but names.
"""

import logging

from ..protocol.names import BACKEND

QUEUE_LOOK_MS = 100
"""An idle engine core or worker looks into vLLM's queue in shared memory this often even without a ping."""


def register() -> None:
    """Idempotent."""
    from vllm.distributed.device_communicators import shm_broadcast
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    # Its pings can get lost, and then a request, or the pause of a flip, waits for the next look after 5 s (vLLM's pull
    # request 45224). A look is one byte read.
    if getattr(shm_broadcast, "SHM_READER_RECHECK_INTERVAL_MS", 0) > QUEUE_LOOK_MS:
        shm_broadcast.SHM_READER_RECHECK_INTERVAL_MS = QUEUE_LOOK_MS
    if BACKEND in WeightTransferEngineFactory._registry:
        return
    WeightTransferEngineFactory.register_engine(BACKEND, "weightsync_engine.vllm.engine", "WeightSyncEngine")


def log_with_vllm() -> None:
    """Let our log lines appear among vLLM's, which sets up its own logger only. Idempotent."""
    ours, theirs = logging.getLogger("weightsync_engine"), logging.getLogger("vllm")
    if not ours.handlers and theirs.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)
        ours.propagate = False
