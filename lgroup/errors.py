"""Every error that lgroup raises on purpose, in one place. The tree itself is drawn in ``lgroup.transport.errors``.

All of them can be pickled: they travel from learners to the coordinator as text, and within it between threads.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from lgroup.transport.errors import ConnectionClosed, LGroupError, ProtocolError
from lgroup.workers.errors import ActorError, WorkerStartError

__all__ = [
    "ActorError",
    "ConfigError",
    "ConnectionClosed",
    "LGroupError",
    "ProtocolError",
    "UpdateDropped",
    "UpdateFailed",
    "WorkerStartError",
]


class ConfigError(LGroupError, ValueError):
    """A setting is unknown, contradictory or out of range. Raised before any process starts."""

    @classmethod
    def refused(cls, name: str, value: object, allowed: str) -> ConfigError:
        """The error for the setting ``name``, given as ``value``, where only ``allowed`` (a phrase) is possible."""
        return cls(f"{name}={_short(value)} is not possible; allowed: {allowed}")

    @classmethod
    def unknown(cls, what: str, name: str, known: Iterable[str]) -> ConfigError:
        """The error for a ``what`` (such as "setting") called ``name`` that is none of ``known``."""
        known = sorted(known)
        close = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
        listed = ", ".join(known) if len(known) <= 20 else f"none of the {len(known)} known ones is close to it"
        hint = f"did you mean {' or '.join(map(repr, close))}?" if close else f"known: {listed}"
        return cls(f"there is no {what} {name!r}; {hint}")


class UpdateFailed(LGroupError):
    """An update was admitted and is not applied; no learner kept anything of it.

    Attributes:
        reason: the ledger's word: ``worker_died``, ``user_error``, ``nonfinite``, ``poison`` or ``rolled_back``.
        cause_type: the name of the exception's class on the learner (such as ``"ValueError"``), if there was one.
        remote_traceback: the learner's traceback as text, else "".
        result: the update's ``UpdateResult``, if there is one.
    """

    def __init__(
        self,
        message: str,
        *,
        reason: str = "user_error",
        cause_type: str | None = None,
        remote_traceback: str = "",
        result: Any = None,
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.cause_type = cause_type
        self.remote_traceback = remote_traceback
        self.result = result

    def __str__(self) -> str:
        message = super().__str__()
        return f"{message}\n\n{self.remote_traceback.rstrip()}" if self.remote_traceback else message


class UpdateDropped(LGroupError):
    """An update was not admitted: no learner ever received it.

    Attributes:
        reason: the ledger's word: ``queue_full``, ``stale``, ``ref_lost``, ``no_such_module`` or ``shutdown``.
        result: the update's ``UpdateResult``, if there is one.
    """

    def __init__(self, message: str, *, reason: str = "queue_full", result: Any = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.result = result


def _short(value: object, limit: int = 120) -> str:
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}..."
