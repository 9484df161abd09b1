"""The operator's I/O: agents over HTTP, the Kubernetes API, kopf."""
