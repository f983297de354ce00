"""What calls to many actors return. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from lgroup.workers.calls import Reply
from lgroup.workers.errors import ActorError


class ResultOrError:
    """A call's value or its error. ``None`` is a value."""

    __slots__ = ("_error", "_result")

    def __init__(self, result: Any = None, error: Exception | None = None) -> None:
        if result is not None and error is not None:
            raise ValueError("a call has a result or an error, not both")
        self._result = result
        self._error = error

    @property
    def ok(self) -> bool:
        """Whether the call succeeded."""
        return self._error is None

    def get(self) -> Any:
        """The value, or the error as an object."""
        return self._result if self._error is None else self._error

    def unwrap(self) -> Any:
        """The value. Raises the error."""
        if self._error is not None:
            raise self._error
        return self._result

    def __repr__(self) -> str:
        return f"ResultOrError(result={self._result!r})" if self.ok else f"ResultOrError(error={self._error!r})"


@dataclass(frozen=True)
class CallResult:
    """One actor's result or error, and the tag of the call that it answers."""

    actor_id: int
    result_or_error: ResultOrError
    tag: str | None = None

    @property
    def ok(self) -> bool:
        """Whether the call succeeded."""
        return self.result_or_error.ok

    def get(self) -> Any:
        """The value, or the error as an object."""
        return self.result_or_error.get()

    def unwrap(self) -> Any:
        """The value. Raises the error."""
        return self.result_or_error.unwrap()


@dataclass
class RemoteCallResults:
    """The results of a call to several actors, in the order they were asked, or came in. May be iterated repeatedly."""

    result_or_errors: list[CallResult] = field(default_factory=list)

    def add_result(self, actor_id: int, result_or_error: ResultOrError, tag: str | None = None) -> None:
        """Add one actor's result."""
        self.result_or_errors.append(CallResult(actor_id, result_or_error, tag))

    def __iter__(self) -> Iterator[CallResult]:
        return iter(list(self.result_or_errors))

    def __len__(self) -> int:
        return len(self.result_or_errors)

    def ignore_errors(self) -> Iterator[CallResult]:
        """Those that succeeded."""
        return self._where(lambda result: result.ok)

    def ignore_actor_errors(self) -> Iterator[CallResult]:
        """All but those whose actor's process is gone: values, and what user code raised."""
        return self._where(lambda result: not _actor_died(result))

    def ignore_ray_errors(self) -> Iterator[CallResult]:
        """The same as ``ignore_actor_errors``, under the name that RLlib has for it."""
        return self.ignore_actor_errors()

    def _where(self, wanted: Callable[[CallResult], bool]) -> Iterator[CallResult]:
        return iter([result for result in self.result_or_errors if wanted(result)])


def result_of(reply: Reply) -> ResultOrError:
    """A reply as a result."""
    return ResultOrError(reply.value) if reply.error is None else ResultOrError(error=reply.error.to_exception())


def _actor_died(result: CallResult) -> bool:
    error = result.get()
    return not result.ok and isinstance(error, ActorError) and error.actor_died
