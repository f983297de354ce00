from __future__ import annotations

import pytest

from lgroup.workers import Cluster


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"bind": "tcp://0.0.0.0:0"}, "bind='tcp://0.0.0.0:0' is not possible"),
        ({"advertise": "tcp://10.0.0.1"}, "advertise=.* is for workers on other nodes"),
        ({"key_file": "/k"}, "key_file=.* is for workers on other nodes"),
        ({"local_slots": 0}, "local_slots=0: allowed"),
        ({"worker_output": "drop"}, "worker_output='drop': allowed"),
    ],
)
def test_a_setting_that_is_not_possible_is_refused_before_any_process_starts(
    setting: dict[str, object], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        Cluster(**setting)  # type: ignore[arg-type]


def test_cores_are_divided_among_workers_and_each_gets_one() -> None:
    with Cluster(local_slots=4) as cluster:
        assert [cluster.threads_per_worker(count) for count in (0, 1, 2, 3, 8)] == [4, 4, 2, 1, 1]
