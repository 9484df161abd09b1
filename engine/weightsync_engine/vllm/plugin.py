"""Entry point of `vllm.general_plugins`: makes `--weight-transfer-config '{"backend": "weightsync"}'` known.

vLLM runs it in its API server (before it parses arguments), in an inspection process, in the engine core and
in every worker. So it has no effect but the one entry in vLLM's table, and imports nothing of ours but names.
"""

import logging

from ..protocol.names import BACKEND


def register() -> None:
    """Idempotent."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

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
