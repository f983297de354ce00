"""One rank's whole state into other ranks, over their process group: a manifest of sizes, then the bytes."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import numpy as np
import torch

from lgroup.learner import state_tree
from lgroup.learner.collective import Collective
from lgroup.transport import Kind, Message, decode, encode

if TYPE_CHECKING:
    from lgroup.learner.learner import Learner


def adopt_state(learner: Learner, collective: Collective, *, lead: int, behind: Collection[int]) -> None:
    """Have the ranks `behind` take over rank `lead`'s state. Every rank of the group must call it.

    Raises:
        CollectiveLost: if a peer leaves meanwhile.
        TypeError: on the lead, if its state holds something that no message can carry, with its path.
    """
    frames = _state_frames(learner) if collective.rank == lead else []
    count = torch.tensor([len(frames)], dtype=torch.int64)
    collective.broadcast(count, lead)
    sizes = torch.tensor([frame.size for frame in frames] or [0] * int(count), dtype=torch.int64)
    collective.broadcast(sizes, lead)
    contents = torch.empty(int(sizes.sum()), dtype=torch.uint8)
    if frames:
        np.concatenate(frames, out=contents.numpy())
    collective.broadcast(contents, lead)
    if collective.rank in behind:
        parts = [memoryview(part.numpy()) for part in contents.split(sizes.tolist())]
        state_tree.restore(learner, decode(parts).body)


def _state_frames(learner: Learner) -> list[np.ndarray[tuple[int], np.dtype[np.uint8]]]:
    message = Message(Kind.DATA, 0, state_tree.live_tree(learner))
    return [np.frombuffer(frame, dtype=np.uint8) for frame in encode(message)]
