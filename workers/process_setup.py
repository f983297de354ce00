"""What turns a fresh fork of the zygote into a worker: session, signals, streams, environment, threads, seeds."""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import gc
import io
import logging
import os
import random
import signal
import sys
import types
import weakref
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from lgroup.workers.seeds import worker_seed

# The I/O thread waits at most this long for the interpreter while user code computes in Python; 5 ms is the default.
SWITCH_INTERVAL_S = 0.0005
STACKS_SIGNAL = signal.SIGUSR2
_BLAS_SETTERS = (
    "scipy_openblas_set_num_threads64_",
    "scipy_openblas_set_num_threads",
    "openblas_set_num_threads64_",
    "openblas_set_num_threads",
    "MKL_Set_Num_Threads",
)


def detach(output: int) -> None:
    """Leave the zygote's session and signals; write to ``output`` instead of its streams."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the coordinator to handle
    for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.close(output)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)
    faulthandler.enable()
    faulthandler.register(STACKS_SIGNAL, all_threads=True)


def forget_exit_functions() -> None:
    """Run at this process's end only what it registers itself.

    What the zygote's imports registered is for the zygote, and takes 45 ms.
    """
    atexit._clear()
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    # Finalisers (of temporary directories, say) register this with atexit only once, and the zygote had one.
    atexit.register(weakref.finalize._exitfunc)  # type: ignore[attr-defined]
    atexit.register(logging.shutdown)


def adopt_surroundings(environment: Mapping[str, str], sys_path: Sequence[str], directory: str | None) -> None:
    """Take over the coordinator's environment, module search path and working directory."""
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = sys_path
    if directory is not None:
        os.chdir(directory)
    # What the coordinator's __main__ defines comes by value; this process's own __main__ is the zygote's.
    sys.modules["__main__"] = types.ModuleType("__main__")
    gc.enable()
    sys.setswitchinterval(SWITCH_INTERVAL_S)


def limit_threads(num_threads: int) -> None:
    """Let torch and the BLAS library of numpy use ``num_threads`` threads each (the zygote allowed them 1)."""
    torch.set_num_threads(num_threads)
    if num_threads == 1:
        return
    for path in _loaded_libraries("openblas", "libmkl_rt"):
        library = ctypes.CDLL(path)
        for setter in _BLAS_SETTERS:
            if hasattr(library, setter):
                getattr(library, setter)(num_threads)
                break


def _loaded_libraries(*words: str) -> list[str]:
    with open("/proc/self/maps") as maps:
        paths = {line.split(maxsplit=5)[5].strip() for line in maps if line.count("/")}
    return sorted(path for path in paths if any(word in os.path.basename(path) for word in words))


def seed_generators(seed: int | None, actor_index: int, incarnation: int) -> None:
    """Seed ``random``, numpy and torch. Without a seed from the system's entropy: forks share their parent's state."""
    chance = int.from_bytes(os.urandom(8), "big") >> 1
    value = chance if seed is None else worker_seed(seed, actor_index, incarnation)
    random.seed(value)
    np.random.seed(value & 0xFFFF_FFFF)
    torch.manual_seed(value)
