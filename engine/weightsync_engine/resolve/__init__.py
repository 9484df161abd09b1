"""From the live modules of a vLLM model to the place of every checkpoint parameter on this worker."""
