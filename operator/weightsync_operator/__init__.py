"""The kopf operator of weightsync. It never imports torch, vllm or nccl."""
