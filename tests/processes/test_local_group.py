"""A group without learner processes: one learner in this process, the same plan, account and learner."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from group_learners import MODULE, Failing, adds_up, batch_of, config_of, same, weights_of

import lgroup


@pytest.fixture
def group() -> Iterator[lgroup.LearnerGroup]:
    with lgroup.LearnerGroup(config=config_of(Failing, num_learners=0)) as group:
        yield group


def coefficient(group: lgroup.LearnerGroup) -> float:
    (value,) = (result.unwrap() for result in group.foreach_learner(lambda learner: learner.coefficient))
    return float(value)


def test_it_trains_here_and_says_so(group: lgroup.LearnerGroup) -> None:
    assert (group.is_local, group.is_remote, len(group), bool(group), group.cluster) == (True, False, 0, True, None)
    result = group.update(batch=batch_of(8))
    assert (result.status, result.seq, len(result), result.weights_version) == ("applied", 1, 1, 1)
    assert group.get_stats()["num_healthy_learners"] == 1
    assert group.submit(batch=batch_of(8)).result(0).seq == 2
    assert group.update(batch=batch_of(0)).status == "noop"
    assert "_rl_module_state_after_update" in group.update(batch=batch_of(8), return_state=True)[0]


def test_it_refuses_to_train_asynchronously(group: lgroup.LearnerGroup) -> None:
    with pytest.raises(ValueError, match="num_learners"):
        group.update(batch=batch_of(8), async_update=True)
    assert group.get_stats()["updates"]["submitted"] == 0


def test_the_callers_random_numbers_go_on_as_if_nothing_had_happened() -> None:
    def numbers() -> tuple[float, float, float]:
        return random.random(), float(np.random.random()), torch.rand(()).item()

    def seed() -> None:
        random.seed(3)
        np.random.seed(3)
        torch.manual_seed(3)

    seed()
    expected = [numbers() for _ in range(4)]
    seed()
    found = [numbers()]
    with lgroup.LearnerGroup(config=config_of(Failing, num_learners=0)) as group:
        found.append(numbers())
        group.update(batch=batch_of(8))
        found.append(numbers())
        with pytest.raises(lgroup.UpdateFailed):
            group.update(batch=batch_of(8), fail="loss")
        found.append(numbers())
    assert found == expected


@pytest.mark.parametrize("place", ["before", "loss", "apply", "after"])
def test_ctrl_c_in_a_hook_reaches_the_caller_and_leaves_the_state_as_it_was(
    group: lgroup.LearnerGroup, place: str
) -> None:
    group.update(batch=batch_of(8))
    before, digests = weights_of(group), group.check_sync()
    with pytest.raises(KeyboardInterrupt):
        group.update(batch=batch_of(8), fail=f"interrupt {place}")
    assert same(weights_of(group), before)
    assert group.check_sync() == digests
    assert coefficient(group) == 2.0
    updates = group.get_stats()["updates"]
    assert adds_up(updates)
    assert (updates["in_flight"], updates["failed"]) == (0, {"user_error": 1})
    assert group.get_stats()["phase"] == "running"
    assert group.update(batch=batch_of(8)).status == "applied"


@pytest.mark.parametrize("place", ["before", "loss", "apply", "after"])
def test_an_exception_in_a_hook_fails_the_update_and_leaves_the_state_as_it_was(
    group: lgroup.LearnerGroup, place: str
) -> None:
    digests = group.check_sync()
    with pytest.raises(lgroup.UpdateFailed, match=f"ValueError: no more in {place}") as caught:
        group.update(batch=batch_of(8), fail=place)
    assert caught.value.cause_type == "ValueError"
    assert group.check_sync() == digests
    assert group.update(batch=batch_of(8)).weights_version == 1


def test_threads_share_it_without_mixing_their_results(group: lgroup.LearnerGroup) -> None:
    rows: dict[int, list[int]] = {}

    def train(number: int) -> None:
        rows[number] = [group.update(batch=batch_of(number + 1)).rows for _ in range(20)]

    threads = [threading.Thread(target=train, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert rows == {number: [number + 1] * 20 for number in range(3)}
    assert group.get_stats()["updates"]["applied"] == 60


def test_weights_are_copies_and_a_batch_may_be_written_to(group: lgroup.LearnerGroup) -> None:
    weights = group.get_weights()
    kept = {name: tensor.clone() for name, tensor in weights[MODULE].items()}
    batch: dict[str, Any] = batch_of(8)
    original = batch["obs"].copy()
    group.update(batch=batch)
    assert all(torch.equal(weights[MODULE][name], tensor) for name, tensor in kept.items())
    assert np.array_equal(batch["obs"], original)
    latest = group.get_weights(wait=False)
    group.update(batch=batch)
    assert latest.version == 1
    assert group.get_weights(wait=False).version == 2


def test_it_takes_no_calls_after_shutdown(group: lgroup.LearnerGroup) -> None:
    group.shutdown()
    with pytest.raises(lgroup.LGroupError, match="shut down"):
        group.update(batch=batch_of(8))
    assert group.drain() == []
