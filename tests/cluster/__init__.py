"""How tests, the demo and CI get a bare API server (`ApiServer`) or a real cluster (`obtain`).

Nothing here needs an image registry: what is missing is built from the Go module proxy and Debian packages
into a cache outside the clone (see `cache`).
"""

from tests.cluster.apiserver import ApiServer
from tests.cluster.errors import ClusterError

__all__ = ["ApiServer", "ClusterError"]
