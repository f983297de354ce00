"""The seeds of a worker's random generators. Pure."""

from __future__ import annotations

import hashlib


def worker_seed(seed: int, actor_index: int, incarnation: int) -> int:
    """A 63-bit seed that differs between actors and between the incarnations of one actor, and never by chance."""
    text = f"lgroup {seed} {actor_index} {incarnation}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
