"""Cases about ending: at any moment, more than once, from anywhere, and nothing grows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from group_learners import FULL_SIZE, batch_of, config_of

import lgroup

HERE = Path(__file__).parent

CYCLES = """
import gc, json, os, random, signal, sys, threading, time
import psutil
from group_learners import Slow, adds_up, batch_of, config_of
import lgroup
from lgroup.workers import Cluster

cycles, own_clusters = int(sys.argv[1]), int(sys.argv[2])
chance, process, record = random.Random(23), psutil.Process(), []

def interrupt(reached, at):
    reached[at].wait()
    os.kill(os.getpid(), signal.SIGINT)

def cycle(number, cluster):
    config = config_of(Slow, learner_config_dict={"delay_s": 0.002})
    group = lgroup.LearnerGroup(config=config, cluster=cluster)
    reached = [threading.Event() for _ in range(6)]
    interrupter = threading.Thread(target=interrupt, args=(reached, chance.randrange(6)))
    closer = threading.Thread(target=group.shutdown)
    try:
        interrupter.start()
        for n in range(5):
            reached[n].set()
            group.update(batch=batch_of(64), async_update=n % 2 == 0)
        reached[5].set()
        interrupter.join()
        signal.pause()
    except KeyboardInterrupt:
        pass
    finally:
        begin = time.monotonic()
        closer.start()
        group.shutdown()
        closer.join()
        group.shutdown()
        seconds = time.monotonic() - begin
    updates = group.get_stats()["updates"]
    assert updates["in_flight"] == 0, updates
    assert adds_up(updates), updates
    return seconds

def measure(number, cluster):
    closing = cycle(number, cluster)
    gc.collect()
    record.append([closing, process.num_fds(), process.num_threads(), process.memory_info().rss])

with Cluster() as shared:
    for number in range(cycles):
        measure(number, shared)
    shared_record, record = record, []
for number in range(own_clusters):
    measure(number, None)
print(json.dumps([shared_record, record]))
"""


def test_cycles_of_open_train_and_close_leave_everything_as_it_was() -> None:
    """Case C23 (rl#4017): closed at a random point, twice, from another thread, after Ctrl-C; stderr stays empty.

    In full size, each of the thirty groups has a cluster of its own.
    """
    shared, own = (0, 30) if FULL_SIZE else (28, 2)
    done = subprocess.run(
        [sys.executable, "-c", CYCLES, str(shared), str(own)],
        cwd=HERE,
        env=os.environ | {"PYTHONPATH": f"{HERE.parents[1]}:{HERE}"},
        text=True,
        capture_output=True,
        timeout=400 if FULL_SIZE else 110,
        check=False,
    )
    assert (done.stderr, done.returncode) == ("", 0)
    for record in json.loads(done.stdout):
        if len(record) < 3:
            continue
        closing, descriptors, threads, memory = zip(*record, strict=True)
        assert max(closing) < 5.0
        assert descriptors[-1] <= descriptors[1]
        assert threads[-1] <= threads[1]
        assert memory[-1] - memory[1] < 8e6


def test_a_group_that_nobody_holds_any_more_ends_its_learners(wait_gone: Callable[..., None]) -> None:
    group = lgroup.LearnerGroup(config=config_of())
    pids = [row["pid"] for row in group.get_stats()["learners"]]
    future = group.submit(batch=batch_of(8))
    del group
    wait_gone(pids)
    assert future.exception(10) is None or isinstance(future.exception(), lgroup.UpdateDropped)


PROGRAM_ENDS = """
import sys
from group_learners import batch_of, config_of
import lgroup
group = lgroup.LearnerGroup(config=config_of())
print(*[row["pid"] for row in group.get_stats()["learners"]], flush=True)
group.update(batch=batch_of(8), async_update=True)
raise SystemExit(3)
"""


def test_a_program_that_forgets_to_shut_down_ends_quietly(wait_gone: Callable[..., None]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM_ENDS],
        env=os.environ | {"PYTHONPATH": f"{HERE.parents[1]}:{HERE}"},
        text=True,
        capture_output=True,
        timeout=110,
        check=False,
    )
    assert (done.stderr, done.returncode) == ("", 3)
    wait_gone([int(pid) for pid in done.stdout.split()], 3.0)
