"""For tests and the demo on CPUs only, never part of the product.

vLLM's CPU build replaces linear weights by packed copies after it has loaded them, so nothing can be written
into the live model any more. This plugin (`VLLM_PLUGINS=weightsync,vllm_live_weights`) makes it keep the
weights and compute with plain products instead. On a GPU vLLM keeps its weights anyway.
"""


def register() -> None:
    """Entry point of `vllm.general_plugins`; may run several times in several processes."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    import vllm._custom_ops as ops
    from vllm.model_executor.layers import utils

    ops._supports_onednn = False
    utils.check_cpu_sgl_kernel = lambda *_: False
