"""The one exception of this package."""


class ClusterError(RuntimeError):
    """Something needed for a test cluster is missing or failed; the message says what to do about it."""
