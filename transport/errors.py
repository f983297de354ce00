"""The root of lgroup's error tree, and the errors of the transport.

The root stands here because ``transport`` is the lowest package: everything above may raise one of these.

    LGroupError
    ├── ProtocolError          bytes from a peer that are not a message of ours       (transport)
    ├── ConnectionClosed       the endpoint is closed, or its peer is gone            (transport)
    ├── ActorError             a worker process is gone or failed a call              (workers)
    │   └── WorkerStartError   a worker process did not come up                       (workers)
    ├── ConfigError            a setting is unknown, contradictory or out of range    (lgroup)
    ├── UpdateFailed           an update was admitted and not applied                 (lgroup)
    └── UpdateDropped          an update was not admitted                             (lgroup)
"""

from __future__ import annotations


class LGroupError(Exception):
    """Everything lgroup raises on purpose is one of these."""


class ProtocolError(LGroupError, ValueError):
    """Bytes that are not a well-formed message, or exceed a limit. The peer that sent them loses its connection."""


class ConnectionClosed(LGroupError, ConnectionError):
    """The endpoint was closed, or the peer it should reach is not connected (any more)."""
