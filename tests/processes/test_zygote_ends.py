from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from lgroup.workers import Cluster, WorkerSpec, WorkerStartError


class Actor:
    def pid(self) -> int:
        return os.getpid()


def test_workers_outlive_their_zygote_and_a_new_one_serves(
    inbox: Any, wait_gone: Callable[..., None], pytestconfig: pytest.Config
) -> None:
    with Cluster(pickle_by_value=[__name__], worker_output="log") as cluster:
        old = cluster.launch(WorkerSpec("old", Actor)).result(60)
        zygote = cluster.zygote_pid
        assert zygote is not None
        assert psutil.Process(zygote).num_threads() == 1
        os.kill(zygote, signal.SIGKILL)
        wait_gone([zygote])
        old.call("pid", on_reply=inbox.put)
        assert inbox.wait()[0].value == old.pid
        new = cluster.launch(WorkerSpec("new", Actor)).result(60)
        assert cluster.zygote_pid not in (zygote, None)
        assert psutil.Process(new.pid).ppid() == cluster.zygote_pid
        old.on_exit(inbox.put)
        os.kill(old.pid or 0, signal.SIGKILL)  # nobody can say how it ended, but that it did
        ended = inbox.wait(2)[1]
        assert ended.exit_code is None and "exit status is unknown" in ended.text


def test_a_zygote_killed_while_it_imports_is_started_again(wait_gone: Callable[..., None]) -> None:
    with Cluster(pickle_by_value=[__name__], worker_output="log") as cluster:
        launch = cluster.launch(WorkerSpec("actor", Actor))
        zygote = cluster.zygote_pid
        assert zygote is not None
        os.kill(zygote, signal.SIGKILL)
        worker = launch.result(60)
        assert worker.incarnation == 1 and cluster.zygote_pid != zygote


def test_a_zygote_that_cannot_import_fails_the_start_with_its_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "numpy.py").write_text("raise ImportError('this numpy is a joke')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with (
        Cluster(worker_output="log") as cluster,
        pytest.raises(WorkerStartError, match=r"the zygote .* exited with status 1(.|\n)*this numpy is a joke"),
    ):
        cluster.launch(WorkerSpec("actor", dict)).result(60)


def test_a_start_ends_at_its_deadline_whatever_the_zygote_does() -> None:
    with Cluster(pickle_by_value=[__name__], worker_output="log") as cluster:
        early = cluster.launch(WorkerSpec("early", Actor, start_timeout_s=0.05))
        with pytest.raises(WorkerStartError, match=r"did not start it within 0\.05 s: it is still importing"):
            early.result(10)
        cluster.launch(WorkerSpec("actor", Actor)).result(60)
        assert cluster.zygote_pid is not None
        os.kill(cluster.zygote_pid, signal.SIGSTOP)
        with pytest.raises(WorkerStartError, match=r"within 0\.3 s: it is still importing, or stuck"):
            cluster.launch(WorkerSpec("late", Actor, start_timeout_s=0.3)).result(10)
        cluster.launch(WorkerSpec("next", Actor)).result(60)  # by a new zygote
