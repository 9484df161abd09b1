"""Every label, route, header, port and environment variable that operator, agents and users share."""

PROTOCOL_VERSION = 4
"""Raised by every change that an older operator or agent would misread. Unlike versions never talk."""

GROUP = "weightsync.dev"
BACKEND = "weightsync"
"""Our name in vLLM's tables of weight transfer engines, for servers and for trainers."""

LABEL_SYNC = f"{GROUP}/sync"
"""Pod label: the name of the WeightSync object, in the pod's namespace, that the pod belongs to."""
LABEL_ROLE = f"{GROUP}/role"
"""Pod label: `trainer` or `inference`."""
GATE_IN_SYNC = f"{GROUP}/in-sync"
"""Pod condition and readiness gate that carries what only the operator knows."""

ROLE_TRAINER = "trainer"
ROLE_INFERENCE = "inference"

CONTAINER_PORT_NAME = "weightsync"
"""Name of the container port on which a pod's agent answers, where it is not the default of the role."""
DEFAULT_TRAINER_PORT = 7077
DEFAULT_INFERENCE_PORT = 8000
"""vLLM's own port: in a vLLM pod the agent is a set of routes of the vLLM server."""

ROUTE_READY = "/readyz"
ROUTE_STATE = "/weightsync/v1/state"
ROUTE_DECISION = "/weightsync/v1/decision"
ROUTE_PREFIX = "/weightsync/v1/"

ENV_POD_NAME = "WEIGHTSYNC_POD_NAME"
"""Optional, by the downward API; default: the host name."""
ENV_POD_UID = "WEIGHTSYNC_POD_UID"
"""Optional, by the downward API; lets the operator tell a pod from its successor on the same address."""
ENV_POD_IP = "WEIGHTSYNC_POD_IP"
"""Optional, by the downward API; default: the address that the host name resolves to."""
ENV_NAMESPACE = "WEIGHTSYNC_NAMESPACE"
"""Optional; default: the namespace of the pod's service account."""
ENV_NAME = "WEIGHTSYNC_NAME"
"""Optional; the one WeightSync object whose operator tokens the agent accepts. Default: any of the namespace."""
ENV_OPERATOR = "WEIGHTSYNC_OPERATOR"
"""Optional; the operator's service account as `namespace:name`. Default: DEFAULT_OPERATOR."""
ENV_JWKS = "WEIGHTSYNC_JWKS"
"""Optional; file or https address of the cluster's public keys. Default: the API server's /openid/v1/jwks."""
ENV_PORT = "WEIGHTSYNC_PORT"
"""Optional; the port of a trainer pod's agent. Default: DEFAULT_TRAINER_PORT."""
ENV_STAGING_MIB = "WEIGHTSYNC_STAGING_MIB"
"""Optional; device memory that each mover sets aside for its transport's buffers, in MiB. Default: four times
WEIGHTSYNC_STEP_BYTES, 1024 where that is not set: what nccl_m2n uses at most. nccl_p2p stages only what is no run of
memory, in up to three steps at once."""

ENV_STEP_BYTES = "WEIGHTSYNC_STEP_BYTES"
"""The most that one rank holds of one step, in bytes; default: what the transport does best with (64 MiB for gloo,
256 MiB for nccl_m2n, 1 GiB for nccl_p2p). Smaller saves staging memory, larger saves fixed costs. Equal on all
ranks, trainer and servers: a plan is made for it."""
ENV_COMMIT = "WEIGHTSYNC_COMMIT"
"""vLLM pod: how new weights become live, STAGED (default) or IN_PLACE."""
STAGED = "Staged"
"""Into memory beside the live weights, while the server generates; then copied over in milliseconds."""
IN_PLACE = "InPlace"
"""Into the live weights themselves: no second copy, nothing is generated during the transfer, and one that fails takes
the server out of service until a later one succeeds."""
ENV_DRAFT_MODEL = "WEIGHTSYNC_DRAFT_MODEL"
"""Optional, vLLM pod: what is to become of a draft model for speculative decoding; default: UPDATE."""
UPDATE = "update"
"""It gets new weights with each version: the trainer must send all that it does not share with the target."""
FROZEN = "frozen"
"""It keeps the weights that it was loaded with. Answers stay right, as vLLM verifies every token that it proposes."""
DRAFT_PREFIX = "draft."
"""Of the names of what a draft model has that is not from the target's own checkpoint."""

DEFAULT_OPERATOR = "weightsync-system:weightsync-operator"


def audience(namespace: str, name: str) -> str:
    """The audience of the operator's token for one WeightSync object."""
    return f"{GROUP}/{namespace}/{name}"
