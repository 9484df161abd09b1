"""For tests and the demo on CPUs only, never part of the product.

vLLM's CPU build replaces linear weights by packed copies after it has loaded them, and permutes experts, so
nothing can be written into the live model any more. This plugin
(`VLLM_PLUGINS=weightsync,vllm_live_weights`) makes it keep the weights and compute with plain products, and
pack experts at every call instead. On a GPU vLLM keeps its weights anyway. It also lets idle workers sleep.

`VLLM_LIVE_WEIGHTS_STEP_SECONDS`, if set, is how long a step takes beyond its work: a tiny model is so fast that one
server's request is over before a busy machine lets another server begin.
"""

import os
import time
from typing import Any


def register() -> None:
    """Entry point of `vllm.general_plugins`; may run several times in several processes."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    import vllm._custom_ops as ops
    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    ops._supports_onednn = False
    utils.check_cpu_sgl_kernel = lambda *_: False
    for kind in (
        cpu_moe.CPUUnquantizedExperts,
        cpu_moe.X86CPUUnquantizedExperts,
        cpu_moe.ArmCPUUnquantizedExperts,
        cpu_moe.PowerCPUUnquantizedExperts,
    ):
        kind.process_weights_after_loading = _keep
        kind.apply = _apply
        kind.weightsync_keeps_weights = True
    _spin_less()
    if seconds := float(os.environ.get("VLLM_LIVE_WEIGHTS_STEP_SECONDS", "0")):
        _slow(seconds)


def _spin_less() -> None:
    """After every step a worker spins for a second, in case another step comes: with one question a second, two servers
    are all that a machine of two cores does."""
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    SpinCondition.__init__.__defaults__ = (0.01,)  # busy_loop_s


def _slow(seconds: float) -> None:
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    step = WorkerWrapperBase.execute_model
    if getattr(step, "slow", False):
        return

    def slow(self: Any, scheduler_output: Any) -> Any:
        if scheduler_output.total_num_scheduled_tokens:
            time.sleep(seconds)
        return step(self, scheduler_output)

    slow.slow = True  # type: ignore[attr-defined]
    WorkerWrapperBase.execute_model = slow


def _keep(self: Any, layer: Any) -> None:
    self._use_zentorch = False


def _apply(
    self: Any,
    output: Any,
    hidden_states: Any,
    w1: Any,
    w2: Any,
    topk_weights: Any,
    topk_ids: Any,
    activation: Any,
    global_num_experts: int,
    expert_map: Any,
    a1q_scale: Any = None,
    a2_scale: Any = None,
    workspace13: Any = None,
    workspace2: Any = None,
    expert_tokens_meta: Any = None,
    apply_router_weight_on_input: bool = False,
) -> None:
    """What the kernel does, with experts packed here. With expert parallelism tokens of other workers' experts
    count as nothing."""
    import vllm._custom_ops as ops

    if expert_map is not None:
        local = expert_map.to(topk_ids.device)[topk_ids.long()]
        topk_weights = topk_weights.masked_fill(local < 0, 0.0)
        topk_ids = local.clamp(min=0).to(topk_ids.dtype)
    ops.cpu_fused_moe(
        output,
        hidden_states,
        ops.cpu_prepack_moe_weight(w1, self.isa),
        ops.cpu_prepack_moe_weight(w2, self.isa),
        self.w1_bias,
        self.w2_bias,
        topk_weights,
        topk_ids,
        activation.value,
        self.isa,
        apply_router_weight_on_input,
    )
