"""The look at what a test left behind sees what it should."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def look(pytestconfig: pytest.Config) -> Any:
    return pytestconfig.pluginmanager.get_plugin(str(Path(__file__).parents[1] / "conftest.py"))


ORPHAN = """
import os, sys
if os.fork():
    os._exit(0)
os.setsid()
print(os.getpid(), flush=True)
sys.stdin.read()
"""


def test_an_orphan_in_a_session_of_its_own_is_found(look: Any, wait_gone: Callable[..., None]) -> None:
    before = look.Belongings.now()
    command = [sys.executable, "-c", ORPHAN]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdin
        assert parent.stdout
        orphan = int(parent.stdout.readline())
        wait_gone([parent.pid])
        assert orphan in look.marked_processes() - before.processes
        parent.stdin.close()
        wait_gone([orphan])


def test_a_thread_and_a_descriptor_are_found_and_named(look: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(look, "SETTLE_S", 0.01)
    before = look.Belongings.now()
    go_on = threading.Event()
    thread = threading.Thread(target=go_on.wait, name="forgotten")
    thread.start()
    read_end, write_end = os.pipe()
    left = look.left_since(before)
    os.close(read_end)
    os.close(write_end)
    go_on.set()
    thread.join()
    assert [what.split(" -> ")[0] for what in left] == [
        "thread forgotten",
        f"descriptor {read_end}",
        f"descriptor {write_end}",
    ]
    assert look.left_since(before) == []
