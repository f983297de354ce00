"""What one call of ``update`` trains on: exactly one of several kinds of data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from lgroup.data.batch import MultiAgentBatch, concat_multi_agent, normalise
from lgroup.data.episode import SingleAgentEpisode, episodes_to_batch


@dataclass(frozen=True, eq=False)
class TrainingData:
    """Exactly one field is not None."""

    batch: Any = None
    """A `SampleBatch`, `MultiAgentBatch`, dict of columns, or dict of module id to one; see `normalise`."""
    batches: Sequence[Any] | None = None
    """Several batches: trained on as one, their rows joined in order."""
    batch_refs: Sequence[Any] | None = None
    episodes: Sequence[SingleAgentEpisode] | None = None
    episodes_refs: Sequence[Any] | None = None
    data_iterators: Sequence[Any] | None = None

    def validate(self) -> None:
        """Raises ValueError unless exactly one kind of data is given, of a kind that this version can train on."""
        given = [field.name for field in fields(self) if getattr(self, field.name) is not None]
        if len(given) != 1:
            allowed = ", ".join(field.name for field in fields(self))
            found = "none was" if not given else f"{' and '.join(given)} were"
            raise ValueError(f"an update trains on exactly one of {allowed}; {found} given")
        if given[0] not in ("batch", "batches", "episodes"):
            raise ValueError(f"{given[0]} cannot be trained on by this version; give batch, batches or episodes")

    def env_steps(self) -> int:
        """Env steps in the data: see `normalise` for batches; for episodes the sum of their lengths."""
        self.validate()
        if self.episodes is not None:
            return sum(map(len, self.episodes))
        return self.normalise().env_steps()

    def normalise(self) -> MultiAgentBatch:
        """The data as one checked batch. A single batch keeps the caller's arrays; joined ones are copies.

        Raises ValueError or TypeError for data that make no batch.
        """
        self.validate()
        if self.episodes is not None:
            return MultiAgentBatch(episodes_to_batch(self.episodes), self.env_steps())
        if self.batches is not None:
            return concat_multi_agent(map(normalise, self.batches))
        return normalise(self.batch)
