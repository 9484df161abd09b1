"""How tests, the demo and CI get a bare API server (`ApiServer`) or a real cluster (`obtain`).

Nothing here needs an image registry: what is missing is built from the Go module proxy and Debian packages
into a cache outside the clone (see `cache`).
"""

from tests.cluster.apiserver import ApiServer
from tests.cluster.errors import ClusterError
from tests.cluster.images import Image, host_env_image, operator_image
from tests.cluster.kind import Cluster, host_python_volumes, obtain

__all__ = [
    "ApiServer",
    "Cluster",
    "ClusterError",
    "Image",
    "host_env_image",
    "host_python_volumes",
    "obtain",
    "operator_image",
]
