"""Cases about the queue and the account: nothing submitted is lost, doubled or seen by one learner alone."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any

import numpy as np
import psutil
import pytest
from group_learners import MODULE, Failing, Slow, adds_up, batch_of, config_of, same, seen_by, weights_of

import lgroup
from lgroup.workers import Cluster

SUBMISSIONS = 10_000


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster() as cluster:
        yield cluster


@pytest.fixture
def make(cluster: Cluster) -> Iterator[Callable[..., lgroup.LearnerGroup]]:
    """Makes groups in the shared cluster that end with the test."""
    groups: list[lgroup.LearnerGroup] = []

    def make(
        learner_class: type[lgroup.Learner] = Slow, delay_s: float = 0.0, queue: int = 3, **transport: Any
    ) -> lgroup.LearnerGroup:
        config = config_of(learner_class, learner_config_dict={"delay_s": delay_s})
        config.learners(max_requests_in_flight_per_learner=queue).transport(**transport)
        groups.append(lgroup.LearnerGroup(config=config, cluster=cluster))
        return groups[-1]

    yield make
    for group in groups:
        group.shutdown()


def accounts(group: lgroup.LearnerGroup) -> list[dict[str, Any]]:
    stats = group.get_stats()
    return [stats["updates"], stats["env_steps"]]


def test_ten_thousand_submissions_from_two_threads_are_all_accounted_for(make: Any) -> None:
    """The ledger at a thousand random instants, and no learner gets an update that another does not."""
    group = make(delay_s=0.001)
    wrong: list[Any] = []
    batch = batch_of(4)

    def produce(producer: int) -> list[lgroup.UpdateResult]:
        chance, results = random.Random(producer), []
        checks = set(chance.sample(range(SUBMISSIONS // 2), 500))
        for n in range(SUBMISSIONS // 2):
            on_full = "block" if chance.random() < 0.02 else "drop"
            results += group.update(batch=batch, who=[producer, n], async_update=True, on_full=on_full)
            if n in checks:
                wrong.extend(account for account in accounts(group) if not adds_up(account))
        return results

    with ThreadPoolExecutor(2) as pool:
        results = list(chain(*pool.map(produce, range(2))))
    results += group.drain()
    assert wrong == []
    updates, env_steps = accounts(group)
    assert adds_up(updates) and adds_up(env_steps)
    assert (updates["submitted"], updates["in_flight"], updates["failed"]) == (SUBMISSIONS, 0, {})
    assert env_steps["submitted"] == 4 * SUBMISSIONS
    assert sorted(result.seq for result in results) == list(range(1, SUBMISSIONS + 1))
    applied = [result for result in results if result.status == "applied"]
    assert len(applied) == updates["applied"] > 100
    assert {result.reason for result in results if result not in applied} == {"queue_full"}
    first, second = seen_by(group)
    assert first == second
    echoed = [(own[MODULE]["producer"], own[MODULE]["n"]) for own in (result.reduced for result in by_seq(applied))]
    assert echoed == first
    group.check_sync()


def by_seq(results: list[lgroup.UpdateResult]) -> list[lgroup.UpdateResult]:
    return sorted(results, key=lambda result: result.seq or 0)


def test_two_hundred_updates_that_nobody_polls_come_out_of_one_drain(make: Any, wait_until: Any) -> None:
    """Case C5 (ray#44668)."""
    group = make()
    group.update(batch=batch_of(64))
    # `update(async_update=True)` polls by itself, so these results are put back for the drain.
    polled, moved = [], []
    for _ in range(200):
        polled += group.update(batch=batch_of(64), async_update=True)
        moved.append(accounts(group)[0])
    drained = group.drain()
    results = polled + drained
    assert [result.seq for result in results] == list(range(2, 202))
    statuses = [result.status for result in results]
    assert set(statuses) <= {"applied", "dropped"}
    assert statuses.count("applied") + statuses.count("dropped") == 200
    assert all(adds_up(account) for account in moved)
    assert [account["submitted"] for account in moved] == list(range(2, 202))
    assert moved[-1]["applied"] + sum(moved[-1]["dropped"].values()) >= 197
    assert group.drain() == [] == group.poll()
    assert accounts(group)[0]["applied"] == 1 + statuses.count("applied")


def test_a_flood_of_large_batches_takes_no_more_memory_than_may_be_in_flight(make: Any) -> None:
    """Case C6 (verifiers#951, libzmq#4665), first half: 5,000 batches of 256 KB for learners that take their time."""
    group = make(delay_s=0.05)
    batch = batch_of(64, filler=np.zeros((64, 1024), np.float32))
    group.update(batch=batch)
    process = psutil.Process()
    before, peak, results = process.memory_info().rss, 0, []

    def flood() -> None:
        nonlocal peak
        for n in range(5_000):
            results.extend(group.update(batch=batch, async_update=True))
            if n % 100 == 0:
                peak = max(peak, process.memory_info().rss)
                assert adds_up(accounts(group)[0])

    producer = threading.Thread(target=flood)
    producer.start()
    producer.join()  # the caller's thread does nothing meanwhile
    results += group.drain(timeout=60.0)
    updates, env_steps = accounts(group)
    assert adds_up(updates) and adds_up(env_steps)
    assert (updates["submitted"], updates["in_flight"], len(results)) == (5_001, 0, 5_000)
    assert group.get_stats()["learner_group_ts_dropped_lifetime"] == 64 * updates["dropped"]["queue_full"]
    assert peak - before < 32e6  # all of them would be 1,280 MB; three in flight are below 1


def test_every_result_of_two_producers_echoes_its_own_submission(make: Any) -> None:
    """Case C9 (ray#59544): 500 updates from each of two threads."""
    group = make()
    batch = batch_of(4)

    def produce(producer: int) -> None:
        futures = [group.submit(batch=batch, who=[producer, n]) for n in range(500)]
        for n, future in enumerate(futures):
            metrics = future.result(60).reduced[MODULE]
            assert (metrics["producer"], metrics["n"]) == (producer, n)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(produce, range(2)))
    first, second = seen_by(group)
    assert first == second
    assert len(set(first)) == 1_000
    assert group.poll() == []  # a submission's result reaches its future only


def test_results_come_once_and_in_order_failed_and_dropped_ones_too(make: Any) -> None:
    group = make(Failing, queue=2)
    first = group.update(batch=batch_of(4), fail="loss", async_update=True, on_full="block")
    polled = [*first]
    for n in range(4):
        polled += group.update(batch=batch_of(4), async_update=True, on_full="block" if n % 2 else "drop")
    polled += group.update(batch={"nobody": batch_of(4)}, async_update=True)
    polled += group.update(batch=batch_of(0), async_update=True)
    results = polled + group.drain()
    assert [result.seq for result in results] == [1, 2, 3, 4, 5, 6, None]
    assert [result.status for result in results[-2:]] == ["dropped", "noop"]
    assert (results[0].status, results[0].reason) == ("failed", "user_error")
    assert isinstance(results[0].error, lgroup.UpdateFailed)
    assert "no more in loss" in str(results[0].error)
    assert results[-2].reason == "no_such_module"
    for result in results[1:-2]:
        assert result.status == "applied" or (result.status, result.reason) == ("dropped", "queue_full")
    assert group.drain() == []
    assert all(map(adds_up, accounts(group)))
    group.check_sync()


def test_a_full_queue_drops_or_blocks_as_the_caller_says(make: Any) -> None:
    group = make(delay_s=0.02, queue=1)
    futures = [group.submit(batch=batch_of(4)) for _ in range(5)]
    dropped = group.submit(batch=batch_of(4), on_full="drop")
    assert isinstance(dropped.exception(), lgroup.UpdateDropped)
    with pytest.raises(lgroup.UpdateDropped, match=r"queue_full.*on_full='block'"):
        dropped.result()
    assert [future.result().status for future in futures] == ["applied"] * 5
    with pytest.raises(lgroup.ConfigError, match="on_full"):
        group.submit(batch=batch_of(4), on_full="maybe")
    assert accounts(group)[0]["dropped"] == {"queue_full": 1}


def test_a_batch_over_the_limit_of_bytes_goes_alone(make: Any) -> None:
    group = make(delay_s=0.01, max_bytes_in_flight=1_000)
    large, small = batch_of(100), batch_of(4)
    futures = [group.submit(batch=large)]
    assert group.submit(batch=small, on_full="drop").exception().reason == "queue_full"
    futures += [group.submit(batch=small), group.submit(batch=large)]
    assert [future.result().status for future in futures] == ["applied"] * 3


def test_a_synchronous_update_waits_its_turn_behind_asynchronous_ones(make: Any) -> None:
    group = make(delay_s=0.01)
    for n in range(3):
        group.update(batch=batch_of(4), who=[0, n], async_update=True)
    result = group.update(batch=batch_of(4), who=[1, 0])
    assert (result.seq, result.weights_version, result.reduced[MODULE]["producer"]) == (4, 4, 1)
    assert seen_by(group)[0] == [(0, 0), (0, 1), (0, 2), (1, 0)]
    assert [earlier.seq for earlier in group.poll()] == [1, 2, 3]


def test_what_the_hooks_are_given_is_a_copy_too(make: Any) -> None:
    group = make(delay_s=0.01)
    who = np.zeros(2, np.int64)
    for n in range(6):
        who[:] = [5, n]
        group.submit(batch=batch_of(4), who=who)
    group.drain()
    assert seen_by(group)[0] == [(5, n) for n in range(6)]


def test_submissions_can_be_awaited_and_cancelling_an_await_cancels_no_update(make: Any, caplog: Any) -> None:
    group = make(delay_s=0.005)

    async def main() -> list[Any]:
        futures = [await group.submit_async(batch=batch_of(4), who=[0, n]) for n in range(10)]
        results = [await future for future in futures]
        slow = await group.submit_async(batch=batch_of(4), who=[0, 10])
        waiting = asyncio.ensure_future(_await(slow))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        results.append(await slow)
        # Awaits are given up whose updates fail, or outlive the loop.
        failed = await group.submit_async(batch=batch_of(4), who=[0])
        waiting = asyncio.ensure_future(_await(failed))
        await asyncio.sleep(0)
        waiting.cancel()
        assert failed.exception(10).cause_type == "IndexError"
        last = await group.submit_async(batch=batch_of(4), who=[0, 11])
        waiting = asyncio.ensure_future(_await(last))
        await asyncio.sleep(0)
        waiting.cancel()
        return [*results, last]

    *results, last = asyncio.run(main())
    assert [result.reduced[MODULE]["n"] for result in results] == list(range(11))
    assert last.result().status == "applied"
    assert last.cancel() is False
    assert group.poll() == []
    gc.collect()
    assert [record.getMessage() for record in caplog.records] == []


async def _await(future: Any) -> Any:
    return await future


def test_waiting_for_room_leaves_the_event_loop_free(make: Any) -> None:
    group = make(delay_s=0.02, queue=1)

    async def main() -> int:
        turns, ended = 0, False

        async def count() -> None:
            nonlocal turns
            while not ended:
                turns += 1
                await asyncio.sleep(0)

        counting = asyncio.ensure_future(count())
        for _ in range(4):
            await group.submit_async(batch=batch_of(4))
        ended = True
        await counting
        return turns

    assert asyncio.run(main()) > 20
    assert [account["submitted"] for account in accounts(group)] == [4, 16]


def test_leaving_normally_finishes_what_was_submitted_and_an_exception_drops_it(make: Any) -> None:
    with make(delay_s=0.01) as group:
        futures = [group.submit(batch=batch_of(4)) for _ in range(3)]
    assert [future.result(0).status for future in futures] == ["applied"] * 3
    with pytest.raises(KeyError), make(delay_s=5.0) as group:
        futures = [group.submit(batch=batch_of(4)) for _ in range(3)]
        raise KeyError
    assert {future.exception(0).reason for future in futures} == {"shutdown"}
    assert accounts(group)[0]["dropped"] == {"shutdown": 3}


def test_async_with_drains_or_drops_the_same_way(make: Any) -> None:
    async def drains() -> Any:
        async with make(delay_s=0.01) as group:
            return await group.submit_async(batch=batch_of(4))

    async def drops() -> None:
        async with make(delay_s=5.0) as group:
            futures.append(await group.submit_async(batch=batch_of(4)))
            raise KeyError

    futures: list[Any] = [asyncio.run(drains())]
    assert futures[0].result(0).status == "applied"
    with pytest.raises(KeyError):
        asyncio.run(drops())
    assert futures[1].exception(0).reason == "shutdown"


def test_a_group_that_is_shut_down_takes_no_more_calls_and_still_tells_what_became_of_all(make: Any) -> None:
    group = make(delay_s=1.0)
    weights = group.get_weights()
    group.update(batch=batch_of(4), async_update=True)
    group.shutdown()
    group.shutdown()
    for call in (
        lambda: group.update(batch=batch_of(4)),
        lambda: group.update(batch=batch_of(4), async_update=True),
        lambda: group.update(batch=batch_of(0)),
        lambda: group.update(batch={"nobody": batch_of(4)}),
        lambda: group.submit(batch=batch_of(4)),
        lambda: asyncio.run(group.submit_async(batch=batch_of(4))),
        group.get_weights,
        group.get_state,
        group.check_sync,
        lambda: group.set_weights(weights),
        lambda: group.foreach_learner(lambda learner: learner.rank),
    ):
        with pytest.raises(lgroup.LGroupError, match="shut down"):
            call()
    (result,) = group.drain()
    assert (result.status, result.reason) == ("dropped", "shutdown")
    assert adds_up(accounts(group)[0]) and group.get_stats()["phase"] == "closed"
    assert "closed" in repr(group)


def test_a_caller_waiting_for_room_is_told_when_the_group_shuts_down(make: Any, inbox: Any) -> None:
    group = make(delay_s=30.0, queue=1)
    group.submit(batch=batch_of(4))

    def submit() -> None:
        try:
            group.submit(batch=batch_of(4))
        except lgroup.LGroupError as error:
            inbox.put(str(error))

    thread = threading.Thread(target=submit)
    thread.start()
    group.shutdown()
    thread.join()
    assert "shut down" in inbox.wait()[0]


def test_what_cannot_be_sent_is_refused_and_leaves_the_group_as_it_was(make: Any) -> None:
    group = make()
    lock = threading.Lock()
    before = weights_of(group)
    with pytest.raises(TypeError):
        group.set_state({"learner": {"attributes": {"lock": lock}}})
    with pytest.raises(TypeError):
        group.foreach_learner(lambda learner: lock)
    with pytest.raises(TypeError):
        group.update(batch=batch_of(4), who=lock)
    with pytest.raises(TypeError):
        group.update(batch=batch_of(4), timesteps={"lock": lock})
    assert same(weights_of(group), before)
    assert group.update(batch=batch_of(4)).seq == 1
