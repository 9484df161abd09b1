"""Inside a vLLM server: the plugins, the worker's engine with its shadow, the flip, the pod's agent and its
guard."""
