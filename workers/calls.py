"""Calls to actors and their replies: the bodies of the messages, and what callers see of them.

Bodies are plain lists, so that small ones cost little:

    SPEC          [actor_class, args, kwargs]
    CALL, DATA    [target, args, kwargs]      target: a method's name, or (CALL only) a function of the actor
    *_REPLY       [True, value] or [False, [exception type, message, traceback]]
    START_ERROR   [permanent, [exception type, message, traceback]]
"""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lgroup.transport.messages import Buffer, Kind, Message
from lgroup.transport.wire import encode
from lgroup.workers.errors import ActorError

Target = str | Callable[..., Any]

_request_ids = itertools.count(1)  # unique in the coordinator; next() of it is atomic


def next_request_id() -> int:
    """A number that no other request of this process has."""
    return next(_request_ids)


@dataclass(frozen=True, slots=True)
class RemoteError:
    """What went wrong with a call.

    Attributes:
        type_name: the exception's class in the worker; ``"ActorError"`` if the process is gone.
        traceback: the worker's, as text; "" if the process is gone.
        died: the process is gone.
    """

    type_name: str
    message: str
    traceback: str
    worker_name: str
    pid: int | None
    died: bool = False

    def to_exception(self) -> ActorError:
        """The same as an exception of the caller."""
        if self.died:
            return ActorError(self.message, actor_died=True)
        return ActorError(
            f"{self.worker_name} (pid {self.pid}) raised {self.type_name}: {self.message}",
            cause_type=self.type_name,
            remote_traceback=self.traceback,
        )


@dataclass(frozen=True, slots=True)
class Reply:
    """The one reply to a call. ``value`` counts if ``ok``, else ``error`` is there."""

    request_id: int
    ok: bool
    value: Any = None
    error: RemoteError | None = None

    def unwrap(self) -> Any:
        """The value. Raises ``ActorError``."""
        if self.error is not None:
            raise self.error.to_exception()
        return self.value


OnReply = Callable[[Reply], None]


@dataclass(frozen=True, slots=True)
class PreparedCall:
    """A call, encoded, that can go to many workers, to each once: a request id counts per worker.

    Large arrays are not copied: they must not be written to until the last reply is there.
    """

    request_id: int
    frames: Sequence[Buffer]


def prepare_call(
    target: Target, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, *, data_only: bool = False
) -> PreparedCall:
    """A call of ``target`` (a method's name, or a function that gets the actor first).

    ``data_only`` travels without pickles either way: plain values, arrays and tensors only, and a method's name.
    Raises ``TypeError`` for what cannot be sent, ``ValueError`` for what is too large.
    """
    if data_only and not isinstance(target, str):
        raise TypeError(f"a data call names a method; it cannot carry the function {target!r}")
    if not isinstance(target, str) and not callable(target):
        raise TypeError(f"a call names a method or is a function of the actor, not {target!r}")
    request_id = next_request_id()
    body = [target, list(args), dict(kwargs) if kwargs else {}]
    return PreparedCall(request_id, encode(Message(Kind.DATA if data_only else Kind.CALL, request_id, body)))


def make_readonly(tree: Any) -> None:
    """Make the arrays in plain lists, tuples and dicts read-only: a later version shares their memory."""
    if isinstance(tree, np.ndarray):
        tree.flags.writeable = False
    elif isinstance(tree, list | tuple):
        for item in tree:
            make_readonly(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            make_readonly(item)


def invoke(actor: Any, target: Target, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Carry out a call on ``actor``."""
    if isinstance(target, str):
        return getattr(actor, target)(*args, **kwargs)
    return target(actor, *args, **kwargs)


def error_record(error: BaseException, *, frames_of_ours: int = 1) -> list[str]:
    """``error`` as ``[type, message, traceback]``, without the outermost ``frames_of_ours`` frames."""
    trace = error.__traceback__
    for _ in range(frames_of_ours):
        trace = trace.tb_next if trace is not None and trace.tb_next is not None else trace
    try:
        message = str(error)
    except Exception:
        message = "(its message cannot be had: __str__ raised)"
    lines = traceback.format_exception(type(error), error.with_traceback(trace), trace)
    return [type(error).__qualname__, message, "".join(lines)]


def read_reply(request_id: int, body: Any, worker_name: str, pid: int | None) -> Reply:
    """The reply in a message's body. Raises ``ValueError`` or ``TypeError`` for anything else."""
    ok, value = body
    if ok:
        return Reply(request_id, True, value)
    type_name, message, text = value
    return Reply(request_id, False, None, RemoteError(type_name, message, text, worker_name, pid))
