from __future__ import annotations

import pytest

from lgroup.workers._async_calls import AsyncCalls
from lgroup.workers.calls import RemoteError, Reply, error_record, prepare_call
from lgroup.workers.errors import ActorError
from lgroup.workers.results import RemoteCallResults, ResultOrError, result_of


def raised(died: bool) -> ResultOrError:
    return result_of(Reply(1, False, None, RemoteError("ValueError", "no", "trace", "actor 0", 5, died)))


def test_none_is_a_result() -> None:
    assert ResultOrError().ok and ResultOrError().get() is None and ResultOrError().unwrap() is None


def test_get_returns_an_error_and_unwrap_raises_it() -> None:
    failed = raised(died=False)
    assert not failed.ok and isinstance(failed.get(), ActorError) and failed.get().cause_type == "ValueError"
    with pytest.raises(ActorError, match=r"actor 0 \(pid 5\) raised ValueError: no\n\ntrace"):
        failed.unwrap()


def test_results_can_be_filtered_by_what_failed_and_iterated_twice() -> None:
    results = RemoteCallResults()
    results.add_result(0, ResultOrError(1))
    results.add_result(1, raised(died=False), "t")
    results.add_result(2, raised(died=True))
    assert [result.actor_id for result in results] == [result.actor_id for result in results] == [0, 1, 2]
    assert [result.actor_id for result in results.ignore_errors()] == [0]
    assert [result.actor_id for result in results.ignore_actor_errors()] == [0, 1]
    assert [result.actor_id for result in results.ignore_ray_errors()] == [0, 1]
    assert len(results) == 3


def test_room_is_counted_per_actor_and_tag_until_results_are_fetched() -> None:
    calls = AsyncCalls(limit_per_actor=2)
    calls.sent((0, 1), "a")
    calls.sent((0, 2), "a")
    calls.sent((1, 3), None)
    assert not calls.has_room(0, "a") and calls.has_room(0, "b") and calls.has_room(0, None) and calls.has_room(1, "a")
    calls.answered((0, 2), ResultOrError("x"))
    assert not calls.has_room(0, "a") and calls.num_outstanding() == 3 and calls.num_outstanding("a") == 2
    assert [(result.actor_id, result.get(), result.tag) for result in calls.fetch({"a"})] == [(0, "x", "a")]
    assert calls.has_room(0, "a") and len(calls.fetch(())) == 0


def test_an_answer_to_a_forgotten_call_is_dropped() -> None:
    calls = AsyncCalls(limit_per_actor=1)
    calls.sent((0, 1), None)
    calls.forget(0)
    calls.answered((0, 1), ResultOrError(1))
    assert calls.num_outstanding() == 0 and len(calls.fetch(())) == 0


def test_a_data_call_names_a_method() -> None:
    with pytest.raises(TypeError, match="names a method"):
        prepare_call(lambda actor: None, data_only=True)
    with pytest.raises(TypeError, match="names a method or is a function"):
        prepare_call(5)  # type: ignore[arg-type]


def test_an_error_whose_text_cannot_be_had_still_has_a_record() -> None:
    class Bad(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    try:
        raise Bad
    except Bad as error:
        name, message, trace = error_record(error, frames_of_ours=0)
    assert name.endswith("Bad") and "cannot be had" in message and "raise Bad" in trace
