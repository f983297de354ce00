"""A process group that is interrupted, even where gloo never says so."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from lgroup.learner.collective import CollectiveLost, GlooGroup


class StuckWork:
    """What gloo leaves behind where a peer died in the middle of a message: it times out, and is never completed."""

    def __init__(self, waited: threading.Event) -> None:
        self._waited = waited

    def wait(self, timeout: timedelta) -> None:
        self._waited.set()
        raise RuntimeError("Operation timed out!")

    def is_completed(self) -> bool:
        return False


def group_of_one() -> GlooGroup:
    return GlooGroup(dist.HashStore(), 0, 1, connect_s=5.0, collective_s=5.0)


def test_a_rank_leaves_a_collective_that_will_never_complete_when_it_is_interrupted() -> None:
    group, waited = group_of_one(), threading.Event()
    interrupter = threading.Thread(target=lambda: (waited.wait(), group.interrupt()))
    interrupter.start()
    with pytest.raises(CollectiveLost):
        group._wait(StuckWork(waited))
    interrupter.join()
    assert group.lost


def test_a_collective_that_completes_is_a_sum_whatever_slices_it_is_waited_for_in() -> None:
    group = group_of_one()
    flat = torch.arange(4.0)
    group.sum(flat).wait()
    assert flat.tolist() == [0.0, 1.0, 2.0, 3.0]
    group.close()
    with pytest.raises(CollectiveLost):
        group.sum(flat)
