"""Entry point of lgroup's worker side: ``python -m lgroup.worker``.

A coordinator starts its zygote by this file's path with ``--zygote-fd``. The zygote must watch its coordinator before
it imports anything heavy, so this module imports only the standard library at its top.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import select
import shutil
import signal
import socket
import sys
from collections.abc import Sequence
from typing import NoReturn

REMOTE = (
    "this version of lgroup runs workers on the coordinator's node only, so there is nothing to join from here: "
    "create lgroup.Cluster() or lgroup.LearnerGroup in your program and it starts its workers itself"
)
# What workers need, imported once for all of them. torch's first optimizer otherwise imports torch._dynamo: 0.9 s in
# each worker.
PRELOADED = ("numpy", "torch", "torch._dynamo", "lgroup")
WATCH_PERIOD_S = 0.25


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: the process's own); returns the exit code."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.zygote_fd is not None:
        serve_zygote(options.zygote_fd)
    if options.coordinator is None and options.connection_file is None:
        parser.print_usage(sys.stderr)
    print(f"{parser.prog}: {REMOTE}", file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m lgroup.worker",
        description="Hosts lgroup workers on this node. A coordinator on the same node starts this by itself. "
        "Joining a coordinator on another node is not possible in this version.",
    )
    not_yet = "(not possible in this version)"
    parser.add_argument("--coordinator", metavar="tcp://HOST:PORT", help=f"the coordinator to join {not_yet}")
    parser.add_argument("--key-file", metavar="FILE", help=f"the key that coordinator expects {not_yet}")
    parser.add_argument(
        "--connection-file", metavar="FILE", help=f"a file with address and key, written by the coordinator {not_yet}"
    )
    parser.add_argument(
        "--zygote-fd",
        type=int,
        metavar="N",
        help="internal: be the zygote of the coordinator at the other end of the inherited socket N",
    )
    return parser


def serve_zygote(descriptor: int) -> NoReturn:
    """Be the zygote of the coordinator at the other end of the socket ``descriptor``, until that ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the coordinator to handle
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    channel = socket.socket(fileno=descriptor)
    channel.set_inheritable(False)
    packet, descriptors, _, _ = socket.recv_fds(channel, 1 << 20, 1, socket.MSG_CMSG_CLOEXEC)
    if not packet:
        os._exit(0)  # the coordinator has ended already
    setup, coordinator = json.loads(packet), descriptors[0]
    sys.path[:] = setup["sys_path"]
    _import_under_watch(coordinator, setup["runtime_dir"])
    from lgroup.workers.zygote import Zygote, prepare_to_fork

    prepare_to_fork()
    Zygote(channel, coordinator, setup["runtime_dir"]).serve()
    os._exit(0)  # the interpreter's own way out of all that is imported takes 0.3 s


def _import_under_watch(coordinator: int, runtime_dir: str) -> None:
    """Import what workers need, and end this process if the coordinator ends meanwhile (it takes seconds)."""

    def look(*_: object) -> None:
        if select.select([coordinator], [], [], 0)[0]:
            shutil.rmtree(runtime_dir, ignore_errors=True)
            os._exit(0)

    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, WATCH_PERIOD_S, WATCH_PERIOD_S)
    gc.disable()  # nothing to collect yet, and looking for it costs a tenth of the time
    for name in PRELOADED:
        importlib.import_module(name)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)


if __name__ == "__main__":
    sys.exit(main())
