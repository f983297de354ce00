"""One update on one learner: the steps of its plan, with one sum over the group in each.

A module's mean loss is multiplied, before backward, by this rank's share of the step's weight (its rows, or valid steps
under a mask), so that the plain sum of the ranks' gradients is the gradient of the whole minibatch, also for parameters
that modules share and where the ranks' weights differ. Every rank runs every step of the plan and takes part in its
sum, whether or not it has rows, so that no rank waits for one that is not coming.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lgroup.columns import NUM_MODULE_STEPS_TRAINED
from lgroup.data.batch import row_weights, take
from lgroup.data.plan import RankPlan, Step, leads_of, local_plan, num_rows
from lgroup.learner.flat_buffer import first_nonfinite
from lgroup.learner.learner import Learner
from lgroup.learner.metrics import Reduction
from lgroup.learner.undo import Undo

ModuleColumns = dict[str, dict[str, Any]]


class NonfiniteGradient(ArithmeticError):
    """The summed gradient was not finite. `parameter` is the first one that was so on this rank, None if none was."""

    def __init__(self, parameter: str | None) -> None:
        super().__init__(f"nonfinite gradient, on this rank in {parameter}")
        self.parameter = parameter


@dataclass(frozen=True, slots=True)
class Cut:
    """How data that lie on the ranks are cut into steps. The fields are those of `make_plan`."""

    num_epochs: int
    minibatch_size: int | None
    shuffle: bool
    seed: int


class Update:
    """One update under way on `learner`. `run` may raise anything that a hook raises; the caller then rolls back."""

    def __init__(self, learner: Learner, undo: Undo, timesteps: Mapping[str, Any], kwargs: Mapping[str, Any]) -> None:
        self.learner = learner
        self.undo = undo
        self.timesteps = dict(timesteps)
        self.kwargs = dict(kwargs)
        self.collective = learner._lgroup_collective

    def begin(self) -> None:
        """Make the update undoable."""
        learner = self.learner
        learner.metrics.begin()
        kind = type(learner)
        hooks_come_first = kind.before_gradient_based_update is not Learner.before_gradient_based_update
        self.undo.begin(everything=hooks_come_first or kind.build_batch is not Learner.build_batch)

    def run(self, plan: RankPlan, columns: ModuleColumns) -> bool:
        """Take all steps of `plan` on `columns`, this rank's gathered rows.

        Returns:
            Whether any module was trained.

        Raises:
            NonfiniteGradient: if the group's gradient was not finite in some step.
            CollectiveLost: if a peer left.
        """
        learner = self.learner
        columns = {module_id: to_tensors(own, learner) for module_id, own in columns.items()}
        learner.before_gradient_based_update(timesteps=self.timesteps, **self.kwargs)
        trained = set(learner.trained_modules(columns))
        self._log_rows(plan, trained)
        if type(learner).loss_weight is not Learner.loss_weight:
            plan = self._with_own_weights(plan, columns)
        for step in plan.steps:
            self._step({m: share for m, share in step.items() if m in trained}, columns)
        learner.after_gradient_based_update(timesteps=self.timesteps, **self.kwargs)
        if trained:
            self._log_optimizers(trained)
        return bool(trained)

    def _step(self, step: Step, columns: ModuleColumns) -> None:
        learner, flat = self.learner, self.learner.flat_buffer()
        batch, shares = self._minibatch(step, columns)
        gradients: Mapping[Any, Any] = {}
        if batch:
            fwd_out = learner.module.forward_train(batch)
            losses = learner.compute_losses(fwd_out=fwd_out, batch=batch)
            gradients = learner.compute_gradients(self._shared_losses(losses, shares))
        leads = [_lead(owners, step) for owners in flat.buffer_owners()]
        flat.fill(gradients, [lead == self.collective.rank for lead in leads])
        pending = self.collective.sum(flat.tensor)
        self.undo.copy_parameters()
        pending.wait()
        if not flat.is_finite():
            raise NonfiniteGradient(first_nonfinite(gradients, learner.parameter_names()))
        flat.adopt_buffers([lead >= 0 for lead in leads])
        learner.apply_gradients(learner.postprocess_gradients(flat.summed_gradients()))

    def _minibatch(self, step: Step, columns: ModuleColumns) -> tuple[ModuleColumns, dict[str, float]]:
        """This rank's rows of the step, and its share of the weight, for the modules in which it has any."""
        batch, shares, weights = {}, {}, {}
        for module_id, share in step.items():
            if share.weight > 0:
                batch[module_id] = take(columns[module_id], share.rows)
                shares[module_id] = share.weight / share.total
                weights[module_id] = share.weight
        self.learner.metrics.begin_step(weights)
        return batch, shares

    def _shared_losses(self, losses: Mapping[str, Any], shares: Mapping[str, float]) -> dict[str, torch.Tensor]:
        learner, result = self.learner, {}
        for module_id, loss in losses.items():
            if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
                what = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
                raise TypeError(f"the loss of module {module_id!r} is {what}; it must be a tensor of one element")
            by_sum = learner.config.get_config_for_module(module_id).loss_reduction == "sum"
            reduce: Reduction = "sum" if by_sum else "mean"
            learner.metrics.log_value((module_id, learner.TOTAL_LOSS_KEY), loss, reduce=reduce)
            share = 1.0 if by_sum else shares.get(module_id, 1.0)
            result[module_id] = loss.reshape(()) if share == 1.0 else loss.reshape(()) * share
        return result

    def _with_own_weights(self, plan: RankPlan, columns: ModuleColumns) -> RankPlan:
        """The plan with `loss_weight`'s answers, summed over the group."""
        weights = np.zeros((len(plan.steps), len(plan.gather)))
        for number, step in enumerate(plan.steps):
            for column, module_id in enumerate(plan.gather):
                if module_id in step and num_rows(step[module_id].rows):
                    rows = take(columns[module_id], step[module_id].rows)
                    weights[number, column] = self.learner.loss_weight(module_id, rows)
        return self._exchanged(plan, weights)

    def _exchanged(self, plan: RankPlan, weights: np.ndarray[Any, Any]) -> RankPlan:
        by_rank = self._gathered(weights)
        return plan.with_totals(by_rank.sum(axis=0), leads_of(by_rank), weights=weights)

    def _gathered(self, own: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Every rank's array of the same shape, ``[ranks, ...]``, float64."""
        table = torch.zeros((self.collective.world_size, *own.shape), dtype=torch.float64)
        table[self.collective.rank] = torch.as_tensor(own, dtype=torch.float64)
        self.collective.sum(table).wait()
        return table.numpy()

    def plan_own_data(self, columns: ModuleColumns, cut: Cut) -> RankPlan:
        """Plan for rows that lie on this rank: all ranks tell each other how many they have.

        Raises:
            ValueError: if `columns` has a module that the learner does not have.
        """
        modules = sorted(self.learner.module.keys())
        unknown = sorted(set(columns) - set(modules))
        if unknown:
            raise ValueError(f"build_batch returned rows for module {unknown[0]!r}; this learner has {modules}")
        own = np.array([_num_rows(columns.get(module_id)) for module_id in modules], dtype=np.float64)
        rows = [{m: int(n) for m, n in zip(modules, counts, strict=True)} for counts in self._gathered(own).tolist()]
        plan = local_plan(
            rows,
            self.collective.rank,
            num_epochs=cut.num_epochs,
            minibatch_size=cut.minibatch_size,
            shuffle=cut.shuffle,
            seed=cut.seed,
        )
        given = {module_id: weights for module_id, own in columns.items() if (weights := row_weights(own)) is not None}
        return self._exchanged(plan, plan.weight_table(given))

    def _log_rows(self, plan: RankPlan, trained: Collection[str]) -> None:
        """Log how many rows (valid steps, under a mask) this rank trains on, whatever `loss_weight` makes of them."""
        for module_id in sorted(trained):
            count = sum(step[module_id].weight for step in plan.steps if module_id in step)
            if count:
                self.learner.metrics.log_value((module_id, NUM_MODULE_STEPS_TRAINED), int(count), reduce="sum")

    def _log_optimizers(self, trained: Collection[str]) -> None:
        learner = self.learner
        for module_id in trained:
            for name, optimizer in learner.get_optimizers_for_module(module_id):
                rate = optimizer.param_groups[0].get("lr")
                if rate is not None:
                    learner.metrics.log_value((module_id, f"{name}_learning_rate"), float(rate), weight=1.0)


def _num_rows(columns: Mapping[str, Any] | None) -> int:
    if not columns:
        return 0
    first = next(iter(columns.values()))
    return _num_rows(first) if isinstance(first, Mapping) else int(first.shape[0])


def _lead(owners: Collection[str], step: Step) -> int:
    """The lowest rank with rows for any of the modules that own a buffer; -1 if there is none."""
    return min((step[m].lead for m in owners if m in step and step[m].lead >= 0), default=-1)


def to_tensors(columns: Mapping[str, Any], learner: Learner) -> dict[str, Any]:
    """Columns as torch tensors on the learner's device. Numpy's float64 becomes float32 unless the network is float64.

    Arrays on the CPU share memory with the tensors; they are the learner's own copies already.
    """
    return {name: _to_tensor(value, learner) for name, value in columns.items()}


def _to_tensor(value: Any, learner: Learner) -> Any:
    if isinstance(value, Mapping):
        return to_tensors(value, learner)
    if isinstance(value, np.ndarray):
        if value.dtype == np.float64 and not learner.is_double():
            value = value.astype(np.float32)
        elif not value.dtype.isnative:
            value = value.astype(value.dtype.newbyteorder("="))
        value = torch.from_numpy(value if value.flags.writeable else value.copy())
    return value.to(learner.device) if value.device != learner.device else value
