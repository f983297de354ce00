"""The I/O thread runs what it is given, in order, one at a time, whatever any of it does."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lgroup.transport import IOThread

WAIT_S = 20.0


@pytest.fixture
def io() -> Iterator[IOThread]:
    with IOThread("test") as thread:
        yield thread


def run(io: IOThread, callback: Callable[..., Any], *args: Any) -> Any:
    """What the callback returns on the thread."""
    done = threading.Event()
    results: list[Any] = []
    io.call_soon(lambda: (results.append(callback(*args)), done.set()))
    assert done.wait(WAIT_S)
    return results[0]


def test_calls_run_on_the_thread_in_the_order_they_were_made(io: IOThread) -> None:
    order: list[int] = []
    for number in range(5000):
        io.call_soon(order.append, number)
    assert run(io, io.in_thread)
    assert not io.in_thread()
    assert order == list(range(5000))


def test_each_of_many_threads_sees_its_own_calls_in_order(io: IOThread) -> None:
    seen: dict[int, list[int]] = {name: [] for name in range(8)}

    def work(name: int) -> None:
        for number in range(500):
            io.call_soon(seen[name].append, number)

    threads = [threading.Thread(target=work, args=(name,)) for name in seen]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    run(io, int)
    assert all(numbers == list(range(500)) for numbers in seen.values())


def test_a_call_made_on_the_thread_runs_after_the_current_one(io: IOThread) -> None:
    order: list[str] = []
    done = threading.Event()

    def first() -> None:
        io.call_soon(order.append, "second")
        io.call_soon(done.set)
        order.append("first")

    io.call_soon(first)
    assert done.wait(WAIT_S)
    assert order == ["first", "second"]


def test_a_callback_that_keeps_calling_does_not_starve_the_others(io: IOThread) -> None:
    fired = threading.Event()

    def again() -> None:
        if not fired.is_set():
            io.call_soon(again)

    io.call_soon(again)
    io.call_later(0.01, fired.set)
    assert fired.wait(WAIT_S)


def test_timers_fire_in_the_order_of_their_times_and_not_early(io: IOThread) -> None:
    fired: list[tuple[float, float]] = []
    done = threading.Event()
    start = time.monotonic()
    for delay in (0.06, 0.02, 0.0, 0.04):
        io.call_later(delay, lambda delay=delay: fired.append((delay, time.monotonic() - start)))
    io.call_later(0.08, done.set)
    assert done.wait(WAIT_S)
    assert [delay for delay, _ in fired] == [0.0, 0.02, 0.04, 0.06]
    assert all(elapsed >= delay for delay, elapsed in fired)


def test_a_timer_from_another_thread_interrupts_a_longer_wait(io: IOThread) -> None:
    io.call_later(3600, int)
    run(io, int)  # the thread now waits for an hour
    fired = threading.Event()
    io.call_later(0.01, fired.set)
    assert fired.wait(WAIT_S)


def test_a_cancelled_timer_never_fires(io: IOThread) -> None:
    fired: list[str] = []
    done = threading.Event()
    timer = io.call_later(0.01, fired.append, "cancelled")
    timer.cancel()
    timer.cancel()
    io.call_later(0.03, done.set)
    assert done.wait(WAIT_S)
    assert fired == []
    assert timer.cancelled_or_done


def test_timers_of_answered_requests_do_not_pile_up(io: IOThread) -> None:
    for _ in range(20):
        for timer in [io.call_later(3600, int) for _ in range(500)]:
            timer.cancel()
        run(io, int)
        run(io, io.call_later, 0.0, int)
        run(io, int)
    assert len(io._timers) < 2000


def test_a_readable_descriptor_is_reported_until_it_is_removed(io: IOThread) -> None:
    ours, theirs = socket.socketpair()
    got: list[bytes] = []
    arrived = threading.Event()

    def read() -> None:
        got.append(ours.recv(100))
        arrived.set()

    io.add_reader(ours.fileno(), read)
    for text in (b"a", b"b"):
        arrived.clear()
        theirs.send(text)
        assert arrived.wait(WAIT_S)
    io.remove_reader(ours.fileno())
    io.remove_reader(ours.fileno())
    theirs.send(b"c")
    run(io, int)
    run(io, int)
    assert got == [b"a", b"b"]
    for end in (ours, theirs):
        end.close()


def test_the_end_of_a_stream_is_reported(io: IOThread) -> None:
    read, write = os.pipe()
    ended = threading.Event()

    def at_end() -> None:
        if not os.read(read, 10):
            io.remove_reader(read)
            ended.set()

    io.add_reader(read, at_end)
    os.close(write)
    assert ended.wait(WAIT_S)
    os.close(read)


@pytest.mark.parametrize("error", [ValueError("broken"), SystemExit(3), KeyboardInterrupt()])
def test_an_exception_in_a_callback_is_reported_and_ends_nothing(error: BaseException) -> None:
    reported: list[BaseException] = []

    def fail() -> None:
        raise error

    with IOThread("failing", on_error=reported.append) as io:
        io.call_soon(fail)
        io.call_later(0.0, fail)
        assert run(io, io.in_thread)
        done = threading.Event()
        io.call_later(0.01, done.set)
        assert done.wait(WAIT_S)
    assert reported == [error, error]


def test_exceptions_are_logged_by_default_even_if_reporting_fails(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "lgroup.transport"):
        with IOThread("default") as io:
            io.call_soon(lambda: 1 / 0)
        with IOThread("worse", on_error=lambda error: 1 / 0) as io:
            io.call_soon(lambda: [][0])
    assert "ZeroDivisionError" in caplog.text
    assert "IndexError" in caplog.text


def test_close_runs_the_accepted_calls_and_refuses_later_ones() -> None:
    io = IOThread("closing")
    io.start()
    ran: list[int] = []
    for number in range(100):
        assert io.call_soon(ran.append, number)
    assert io.close()
    assert ran == list(range(100))
    assert not io.call_soon(ran.append, 100)
    io.call_later(0.0, ran.append, 101)
    assert len(ran) == 100
    with pytest.raises(RuntimeError, match="cannot start again"):
        io.start()


def test_calls_made_before_the_start_run_after_it() -> None:
    io = IOThread("late")
    done = threading.Event()
    io.call_soon(done.set)
    assert not done.is_set()
    with io:
        assert done.wait(WAIT_S)


def test_close_may_be_called_by_many_threads_and_by_the_thread_itself() -> None:
    io = IOThread("contended")
    io.start()
    io.call_soon(io.close)
    results: list[bool] = []
    threads = [threading.Thread(target=lambda: results.append(io.close(WAIT_S))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert results == [True] * 8


def test_a_thread_that_never_started_can_be_closed() -> None:
    io = IOThread("idle")
    assert io.close()
    assert io.close()


def test_a_callback_that_does_not_return_makes_close_give_up() -> None:
    io = IOThread("stuck")
    io.start()
    release = threading.Event()
    io.call_soon(release.wait, WAIT_S)
    assert not io.close(timeout_s=0.05)
    release.set()
    assert io.close(WAIT_S)


def test_opening_and_closing_leaves_no_descriptor_and_no_thread(nothing_left: None) -> None:
    for _ in range(20):
        with IOThread("cycle") as io:
            run(io, int)
            assert not io.context.closed


def test_a_fork_may_not_use_the_parents_thread() -> None:
    with IOThread("parent") as io:
        read, write = os.pipe()
        pid = os.fork()
        if not pid:
            refused = 0
            for use in (
                lambda: io.call_soon(int),
                io.start,
                io.close,
                lambda: io.call_later(0, int),
                lambda: io.context,
            ):
                try:
                    use()
                except RuntimeError:
                    refused += 1
            os.write(write, bytes([refused]))
            os._exit(0)
        os.close(write)
        assert os.read(read, 1) == bytes([5])
        os.close(read)
        os.waitpid(pid, 0)
