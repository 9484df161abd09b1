"""The in-pod engine of weightsync. It never imports kopf or a Kubernetes client."""
