"""Random numbers that do not depend on when or how often something is tried.

Every update seeds all generators from (seed, update, rank), so that a retry, or a replacement learner, computes the
same.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

_MASK = (1 << 64) - 1


def mixed(*numbers: int) -> int:
    """One well-mixed 63-bit number out of several: SplitMix64's finaliser over each in turn (Steele et al. 2014)."""
    state = 0x9E3779B97F4A7C15
    for number in numbers:
        state = (state ^ (number & _MASK)) & _MASK
        state = (state + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


def seed_everything(seed: int) -> None:
    """Seed torch's default generator, numpy's and Python's. 20 us; `torch.manual_seed` alone is 97 us."""
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed & 0xFFFF_FFFF)
    random.seed(seed)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Put the caller's random generators back afterwards."""
    kept = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(kept[0])
        np.random.set_state(kept[1])
        random.setstate(kept[2])
