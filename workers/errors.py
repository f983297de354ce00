"""The errors of the workers."""

from __future__ import annotations

from lgroup.transport.errors import LGroupError


class ActorError(LGroupError):
    """An actor's process is gone, or a call to it failed.

    Attributes:
        cause_type: the name of the exception's class in the worker (such as ``"ValueError"``); ``None`` if the process
            is gone.
        remote_traceback: the worker's traceback as text, else "".
        actor_died: the process is gone, so that later calls fail too.
    """

    def __init__(
        self,
        message: str,
        *,
        cause_type: str | None = None,
        remote_traceback: str = "",
        actor_died: bool = False,
    ) -> None:
        super().__init__(message)
        self.cause_type = cause_type
        self.remote_traceback = remote_traceback
        self.actor_died = actor_died

    def __str__(self) -> str:
        message = super().__str__()
        return f"{message}\n\n{self.remote_traceback.rstrip()}" if self.remote_traceback else message


class WorkerStartError(ActorError):
    """A worker process did not come up: its constructor raised, hung or crashed, or a class could not be imported.

    Attributes:
        permanent: the next try would fail the same way, or nobody wants one.
    """

    def __init__(
        self, message: str, *, cause_type: str | None = None, remote_traceback: str = "", permanent: bool = False
    ) -> None:
        super().__init__(message, cause_type=cause_type, remote_traceback=remote_traceback)
        self.permanent = permanent
