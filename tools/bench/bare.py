"""The bare loop: the same work in processes that have their data already and no coordinator.

This is the ceiling for any group that is driven from outside. Each rank is a process that blocks on its standard input
until it is told how many updates to do on how many rows; rank 0 answers with the seconds that each took.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType

import torch
import torch.distributed as dist

from tools.bench.work import LEARNERS, LR, Net, loss_of, make_batch


class BareLoop:
    """Two processes that train in step, for as long as this context is open."""

    def __init__(self, world_size: int = LEARNERS) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="bare-loop-")
        store = str(Path(self._directory.name) / "store")
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self._ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "tools.bench.bare", str(rank), str(world_size), store],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
            )
            for rank in range(world_size)
        ]

    def run(self, rows: int, updates: int) -> list[float]:
        """Do `updates` updates of `rows` rows over all ranks; the seconds that each took on rank 0."""
        for process in self._ranks:
            assert process.stdin
            process.stdin.write(f"{rows} {updates}\n")
            process.stdin.flush()
        answers = [self._answer(process) for process in self._ranks]
        return answers[0]

    def _answer(self, process: subprocess.Popen[str]) -> list[float]:
        assert process.stdout
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"a rank of the bare loop ended with exit code {process.wait()}")
        seconds: list[float] = json.loads(line)
        return seconds

    def close(self) -> None:
        """End the processes."""
        for process in self._ranks:
            process.communicate(timeout=30)
        self._directory.cleanup()

    def __enter__(self) -> BareLoop:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Rank:
    """One rank's network, optimizer and data."""

    def __init__(self, rank: int, world_size: int) -> None:
        torch.manual_seed(0)
        self.rank, self.world_size = rank, world_size
        self.net = Net()
        self.parameters = list(self.net.parameters())
        self.optimizer = torch.optim.Adam(self.parameters, lr=LR)
        self._shards: dict[int, dict[str, torch.Tensor]] = {}

    def shard(self, rows: int) -> dict[str, torch.Tensor]:
        """This rank's part of the batch of `rows` rows."""
        if rows not in self._shards:
            mine = slice(rows * self.rank // self.world_size, rows * (self.rank + 1) // self.world_size)
            self._shards[rows] = {name: torch.from_numpy(column[mine]) for name, column in make_batch(rows).items()}
        return self._shards[rows]

    def update(self, rows: int) -> float:
        """One update; the seconds it took."""
        batch = self.shard(rows)
        start = time.perf_counter()
        loss = loss_of(self.net(batch), batch)
        self.optimizer.zero_grad()
        loss.backward()
        self._reduce()
        self.optimizer.step()
        loss.item()
        return time.perf_counter() - start

    def _reduce(self) -> None:
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        flat = torch.cat([gradient.view(-1) for gradient in gradients])
        dist.all_reduce(flat)
        flat /= self.world_size
        parts = flat.split([gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))


def main() -> None:
    """One rank: arguments are rank, world size and the path of a file for the rendezvous."""
    rank, world_size, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    me = Rank(rank, world_size)
    for line in sys.stdin:
        rows, updates = map(int, line.split())
        print(json.dumps([me.update(rows) for _ in range(updates)]), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
