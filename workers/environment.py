"""What a worker may see of the coordinator's environment variables. Pure."""

from __future__ import annotations

from collections.abc import Mapping

# Set by torchrun, Slurm launchers and others for *their* process group. The coordinator may itself be one of their
# ranks; a learner that inherited these would join the wrong group (or wait for one).
RENDEZVOUS_NAMES = frozenset(
    {
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "ROLE_RANK",
        "ROLE_NAME",
        "ROLE_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "INIT_METHOD",
    }
)
RENDEZVOUS_PREFIXES = ("TORCHELASTIC_",)
THREAD_NAMES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")


# What a step frees it needs again in the next one. With glibc's defaults gradients go back to the kernel each time and
# come back as page faults: an update of 67 k parameters took 3.5 ms instead of 2.5 to 3.0. 32 MiB is the most that
# glibc takes for the mapping threshold.
MALLOC_DEFAULTS = {
    "MALLOC_TRIM_THRESHOLD_": str(128 << 20),
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TOP_PAD_": str(4 << 20),
}


def without_rendezvous(environment: Mapping[str, str]) -> dict[str, str]:
    """``environment`` without the variables that describe somebody else's process group."""
    return {
        name: value
        for name, value in environment.items()
        if name not in RENDEZVOUS_NAMES and not name.startswith(RENDEZVOUS_PREFIXES)
    }


def zygote_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables the zygote starts with, which are read once and so hold for its workers too.

    One thread per maths library, because numpy's import starts one per core otherwise, and a process with threads must
    not fork; and `MALLOC_DEFAULTS`, where the environment does not say otherwise.
    """
    return MALLOC_DEFAULTS | without_rendezvous(environment) | dict.fromkeys(THREAD_NAMES, "1")


def worker_environment(environment: Mapping[str, str], *, num_threads: int, extra: Mapping[str, str]) -> dict[str, str]:
    """The variables of a worker: the coordinator's, thread counts for what it loads or starts later, then ``extra``."""
    threads = dict.fromkeys(THREAD_NAMES, str(num_threads))
    return without_rendezvous(environment) | threads | without_rendezvous(extra)
