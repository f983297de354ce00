"""The actor that samples: a copy of the module acting in several environments at once.

Invariant: one call of `sample` uses one version of the weights, from its first step to its last, and continues the
episodes where the call before left them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from lgroup.algorithms.environments import make_vector_env
from lgroup.columns import DEFAULT_MODULE_ID, Columns
from lgroup.errors import ConfigError
from lgroup.modules import RLModule, RLModuleSpec

if TYPE_CHECKING:
    from lgroup.config import LearnerGroupConfig
    from lgroup.modules import Distribution

Array = NDArray[Any]


class Rollout(TypedDict):
    """What one call of `EnvRunner.sample` returns: plain data, which travels without pickling.

    ``batch`` has rows of ``T + 1`` time steps, in the layout that `lgroup.algorithms.returns` draws: the last time
    step, and the one after an episode's end, hold only an observation, and ``loss_mask`` is False there.
    """

    batch: dict[str, Array]
    env_steps: int  # time steps with loss_mask
    weights_version: int
    episode_returns: Array  # float32, of the episodes that ended in this rollout, in order
    episode_lengths: Array  # int64


class EnvRunner:
    """Steps ``config.num_envs_per_env_runner`` copies of ``config.env`` with actions of the module.

    Args:
        config: what it uses are `env`, `env_config`, `num_envs_per_env_runner`, `rollout_fragment_length`, and the
            module's spec.
        module_spec: the module; by default the one of `config`.
        with_values: whether rollouts have the module's state values (``vf_preds``), which PPO needs.
        seed: of the environments' random generators. Actions come from torch's default generator.

    Raises:
        ConfigError: the environment cannot be made, or the module has no actions.
    """

    def __init__(
        self,
        config: LearnerGroupConfig,
        *,
        module_spec: RLModuleSpec | None = None,
        with_values: bool = False,
        seed: int | None = None,
    ) -> None:
        self.env = make_vector_env(config.env, config.env_config, config.num_envs_per_env_runner)
        self.module: Any = (module_spec or _module_spec(config, self.env)).build().eval()
        self.weights_version = 0
        self._fragment_length = config.get_rollout_fragment_length()
        self._with_values = with_values
        self._action_space: Any = self.env.single_action_space
        self._obs: Array = _compact(self.env.reset(seed=seed)[0])
        self._is_new = np.zeros(self.env.num_envs, np.bool_)  # the next step only resets this sub-environment
        self._returns = np.zeros(self.env.num_envs, np.float64)
        self._lengths = np.zeros(self.env.num_envs, np.int64)

    def sample(self, num_steps: int | None = None, *, explore: bool = True) -> Rollout:
        """Steps every environment `num_steps` times (default: ``rollout_fragment_length``).

        With `explore` actions are drawn from the policy's distribution, else the most likely one is taken.
        ``batch`` has, ``[num_envs, num_steps + 1, ...]`` each: obs, actions (as the policy gave them), rewards float32,
        terminateds, truncateds, loss_mask bool, action_dist_inputs, action_logp float32, and vf_preds on request.
        """
        steps = self._fragment_length if num_steps is None else num_steps
        recorder = _Recorder(self._obs, steps)
        finished: list[tuple[float, int]] = []
        with torch.inference_mode():
            for t in range(steps):
                inputs, actions = self._act(explore)
                obs, rewards, terminateds, truncateds, _ = self.env.step(self._for_env(actions))
                recorder.record(t, self._obs, actions, inputs, rewards, terminateds, truncateds, ~self._is_new)
                self._obs = _compact(obs)
                self._is_new = np.logical_or(terminateds, truncateds)
                self._count(rewards, recorder.valid(t), finished)
            recorder.record_last(self._obs)
            batch = self._with_policy_outputs(recorder.columns, explore)
        return Rollout(
            batch=batch,
            env_steps=int(batch[Columns.LOSS_MASK].sum()),
            weights_version=self.weights_version,
            episode_returns=np.array([episode[0] for episode in finished], np.float32),
            episode_lengths=np.array([episode[1] for episode in finished], np.int64),
        )

    def set_weights(self, weights: Mapping[str, Mapping[str, Any]], version: int) -> None:
        """Loads `weights`, ``{module_id: {name: tensor or array}}`` as ``LearnerGroup.get_weights`` gives them."""
        own = weights[DEFAULT_MODULE_ID]
        state = {name: v if isinstance(v, torch.Tensor) else torch.tensor(v) for name, v in own.items()}
        self.module.load_state_dict(state)
        self.weights_version = version

    def close(self) -> None:
        """Closes the environments."""
        self.env.close()

    def _act(self, explore: bool) -> tuple[torch.Tensor, Array]:
        out = _forward(self.module, self._obs, explore)
        inputs: torch.Tensor = out[Columns.ACTION_DIST_INPUTS]
        distribution = self._distribution(inputs, explore)
        actions = (distribution if explore else distribution.to_deterministic()).sample()
        return inputs, actions.numpy()

    def _distribution(self, inputs: torch.Tensor, explore: bool) -> Distribution:
        module = self.module
        kind = module.get_exploration_action_dist_cls() if explore else module.get_inference_action_dist_cls()
        result: Distribution = kind.from_logits(inputs)
        return result

    def _for_env(self, actions: Array) -> Array:
        """Policy outputs as the environments take them: bounded Box actions are scaled from [-1, 1] to their bounds."""
        space = self._action_space
        if hasattr(space, "nvec"):
            return actions + space.start if np.any(space.start) else actions
        if hasattr(space, "n"):
            return actions + space.start if space.start else actions
        unit = (np.clip(actions, -1.0, 1.0) + 1.0) * 0.5
        bounded = space.bounded_below & space.bounded_above
        low, high = np.where(bounded, space.low, 0.0), np.where(bounded, space.high, 0.0)
        scaled = np.where(bounded, low + unit * (high - low), actions)
        return np.clip(scaled, space.low, space.high).astype(space.dtype)

    def _count(self, rewards: Array, valid: Array, finished: list[tuple[float, int]]) -> None:
        self._returns += rewards * valid
        self._lengths += valid
        for index in np.flatnonzero(self._is_new):
            finished.append((float(self._returns[index]), int(self._lengths[index])))
            self._returns[index] = 0.0
            self._lengths[index] = 0

    def _with_policy_outputs(self, columns: dict[str, Array], explore: bool) -> dict[str, Array]:
        """Adds what is cheaper to compute for the whole rollout at once than in every step."""
        inputs = torch.from_numpy(columns[Columns.ACTION_DIST_INPUTS])
        logp = self._distribution(inputs, explore).logp(torch.from_numpy(columns[Columns.ACTIONS]))
        columns[Columns.ACTION_LOGP] = logp.numpy()
        if self._with_values:
            columns[Columns.VF_PREDS] = _values(self.module, columns[Columns.OBS])
        return columns


class _Recorder:
    """The columns of one rollout, filled step by step. They are new arrays each time: the rollout is sent as it is."""

    def __init__(self, obs: Array, steps: int) -> None:
        self._shape = (len(obs), steps + 1)
        self.columns: dict[str, Array] = {
            Columns.OBS: np.empty((*self._shape, *obs.shape[1:]), obs.dtype),
            Columns.REWARDS: np.zeros(self._shape, np.float32),
            Columns.TERMINATEDS: np.zeros(self._shape, np.bool_),
            Columns.TRUNCATEDS: np.zeros(self._shape, np.bool_),
            Columns.LOSS_MASK: np.zeros(self._shape, np.bool_),
        }

    def record(
        self,
        t: int,
        obs: Array,
        actions: Array,
        inputs: torch.Tensor,
        rewards: Array,
        terminateds: Array,
        truncateds: Array,
        valid: Array,
    ) -> None:
        columns = self.columns
        columns[Columns.OBS][:, t] = obs
        self._column(Columns.ACTIONS, actions)[:, t] = actions
        self._column(Columns.ACTION_DIST_INPUTS, inputs.numpy())[:, t] = inputs.numpy()
        columns[Columns.REWARDS][:, t] = rewards
        columns[Columns.TERMINATEDS][:, t] = terminateds
        columns[Columns.TRUNCATEDS][:, t] = truncateds
        columns[Columns.LOSS_MASK][:, t] = valid

    def record_last(self, obs: Array) -> None:
        self.columns[Columns.OBS][:, -1] = obs

    def valid(self, t: int) -> Array:
        return self.columns[Columns.LOSS_MASK][:, t]

    def _column(self, name: str, like: Array) -> Array:
        if name not in self.columns:
            self.columns[name] = np.zeros((*self._shape, *like.shape[1:]), like.dtype)
        return self.columns[name]


def _module_spec(config: LearnerGroupConfig, env: Any) -> RLModuleSpec:
    spaces = {DEFAULT_MODULE_ID: (env.single_observation_space, env.single_action_space)}
    specs = config.get_multi_rl_module_spec(spaces=spaces).rl_module_specs
    if set(specs) != {DEFAULT_MODULE_ID}:
        raise ConfigError(f"an EnvRunner acts with one module, {DEFAULT_MODULE_ID!r}, not with {sorted(specs)}")
    return specs[DEFAULT_MODULE_ID]


def _forward(module: nn.Module, obs: Array, explore: bool) -> Any:
    batch = {Columns.OBS: torch.from_numpy(obs)}
    if isinstance(module, RLModule):
        return module.forward_exploration(batch) if explore else module.forward_inference(batch)
    return module(batch)


def _values(module: Any, obs: Array) -> Array:
    values: torch.Tensor = module.compute_values({Columns.OBS: torch.from_numpy(obs)})
    return values.numpy()


def _compact(obs: Array) -> Array:
    """A private copy, in float32 if it was in float64: environments may reuse their buffers."""
    return np.array(obs, np.float32 if obs.dtype == np.float64 else obs.dtype)


def concatenated(rollouts: Sequence[Rollout]) -> dict[str, Array]:
    """The rollouts' batches as one, rows after rows."""
    first = rollouts[0]["batch"]
    if len(rollouts) == 1:
        return first
    return {name: np.concatenate([rollout["batch"][name] for rollout in rollouts]) for name in first}
