"""`LearnerGroupConfig`: everything that can be set about a learner group, with RLlib's names and defaults.

Each value is checked when it is set, and all of them against each other by ``validate()``, before any process starts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from lgroup._config_modules import ModuleSources, Policies, PolicySpec, Spaces, complete_spec, module_ids_of, policy_of
from lgroup._config_modules import spaces_of as _spaces_of
from lgroup._config_settings import NotProvided, Settings, section
from lgroup.columns import DEFAULT_MODULE_ID
from lgroup.errors import ConfigError
from lgroup.modules.default_nets import DefaultActorCritic
from lgroup.modules.multi_rl_module import MultiRLModuleSpec
from lgroup.modules.rl_module import RLModuleSpec

if TYPE_CHECKING:
    from typing_extensions import Self

    from lgroup.learner import Learner
    from lgroup.learner_group import LearnerGroup
    from lgroup.workers import WorkerEvent

__all__ = ["LearnerGroupConfig", "NotProvided", "PolicySpec"]

PER_MODULE_SETTINGS = frozenset(
    {"gamma", "grad_clip", "grad_clip_by", "learner_config_dict", "log_gradients", "loss_reduction", "lr"}
)
"""Settings of `LearnerGroupConfig` that can differ between modules; those that subclasses add all can."""


class LearnerGroupConfig(Settings):
    """Settings of a learner group, and of the env runners beside it.

    The methods set what they are given and return the config, so that calls can be chained; every setting is an
    attribute, too. Whoever uses a config takes a frozen copy. Subclasses set further attributes in ``__init__``, which
    ``training()`` then takes as well, and may give them ``checks``.

    A name or value that is not allowed raises ConfigError.
    """

    def __init__(self) -> None:
        super().__init__()
        self.env: str | Callable[..., Any] | None = None
        self.env_config: dict[str, Any] = {}
        self.observation_space: Any = None
        self.action_space: Any = None
        self.num_learners: int = 0
        self.num_cpus_per_learner: str | float = "auto"
        self.num_gpus_per_learner: float = 0
        self.max_requests_in_flight_per_learner: int = 3
        self._learner_class: type[Learner] | None = None
        self.learner_config_dict: dict[str, Any] = {}
        self.num_env_runners: int = 0
        self.num_envs_per_env_runner: int = 1
        self.max_requests_in_flight_per_env_runner: int = 1
        self.rollout_fragment_length: int | str = 200
        self.gamma: float = 0.99
        self.lr: float = 0.001
        self.grad_clip: float | None = None
        self.grad_clip_by: str = "global_norm"
        self.train_batch_size_per_learner: int = 32
        self.num_epochs: int = 1
        self.minibatch_size: int | None = None
        self.minibatch_size_per_learner: int | None = None
        self.shuffle_batch_per_epoch: bool = False
        self.loss_reduction: str = "mean"
        self.log_gradients: bool = False
        self.model_config: Any = {}
        self._rl_module_spec: RLModuleSpec | MultiRLModuleSpec | None = None
        self.algorithm_config_overrides_per_module: dict[str, Mapping[str, Any]] = {}
        self.policies: Policies = {DEFAULT_MODULE_ID: PolicySpec()}
        self.policy_mapping_fn: Callable[..., str] | None = None
        self.policies_to_train: Collection[str] | Callable[..., bool] | None = None
        self.restart_failed_learners: bool = True
        self.min_learners: int = 1
        self.max_restarts: int = 100
        self.restart_window_s: float = 3600.0
        self.update_retries: int = 1
        self.update_timeout_s: float = 600.0
        self.heartbeat_timeout_s: float = 10.0
        self.snapshot_every: int | None = None
        self.max_staleness: int | None = None
        self.on_nonfinite: str = "skip"
        self.on_worker_died: Callable[[WorkerEvent], object] | None = None
        self.on_worker_restarted: Callable[[WorkerEvent], object] | None = None
        self.log_dir: str | os.PathLike[str] | None = None
        self.seed: int | None = None
        self.max_bytes_in_flight: int = 1 << 30

    @section
    def environment(
        self,
        env: str | Callable[..., Any] | None = NotProvided,
        *,
        env_config: dict[str, Any] = NotProvided,
        observation_space: Any = NotProvided,
        action_space: Any = NotProvided,
    ) -> Self:
        """What the env runners step, and the spaces that modules are built for.

        Args:
            env: a name registered with Gymnasium, or a callable that takes ``env_config`` and returns an environment.
            env_config: keyword arguments of a named environment.
            observation_space, action_space: Gymnasium spaces; None: those of ``env``.
        """
        return self._set(locals())

    @section
    def learners(
        self,
        *,
        num_learners: int = NotProvided,
        num_cpus_per_learner: str | float = NotProvided,
        num_gpus_per_learner: float = NotProvided,
        max_requests_in_flight_per_learner: int = NotProvided,
        learner_class: type[Learner] | None = NotProvided,
        learner_config_dict: dict[str, Any] = NotProvided,
    ) -> Self:
        """How many processes train, with what.

        Args:
            num_learners: processes; 0: one learner in the caller's own process.
            num_cpus_per_learner: cores, and so torch threads, of each; "auto": the machine's cores shared evenly.
            num_gpus_per_learner: GPUs of each; 0: train on the CPU.
            max_requests_in_flight_per_learner: updates that may be admitted and not finished.
            learner_class, learner_config_dict: see `training`.
        """
        return self._set(locals())

    @section
    def env_runners(
        self,
        *,
        num_env_runners: int = NotProvided,
        num_envs_per_env_runner: int = NotProvided,
        max_requests_in_flight_per_env_runner: int = NotProvided,
        rollout_fragment_length: int | str = NotProvided,
    ) -> Self:
        """How many processes sample, with what.

        Args:
            num_env_runners: processes; 0: one env runner in the caller's own process.
            num_envs_per_env_runner: environments that each steps at once.
            max_requests_in_flight_per_env_runner: sample requests that each may have waiting.
            rollout_fragment_length: steps of each environment in one request; "auto": so many that one request to every
                env runner gives ``total_train_batch_size`` (see `get_rollout_fragment_length`).
        """
        return self._set(locals())

    @section
    def training(
        self,
        *,
        gamma: float = NotProvided,
        lr: float = NotProvided,
        grad_clip: float | None = NotProvided,
        grad_clip_by: str = NotProvided,
        train_batch_size_per_learner: int = NotProvided,
        num_epochs: int = NotProvided,
        minibatch_size: int | None = NotProvided,
        minibatch_size_per_learner: int | None = NotProvided,
        shuffle_batch_per_epoch: bool = NotProvided,
        loss_reduction: str = NotProvided,
        learner_class: type[Learner] | None = NotProvided,
        learner_config_dict: dict[str, Any] = NotProvided,
        **algorithm_settings: Any,
    ) -> Self:
        """How a batch is trained on.

        Args:
            gamma: discount of rewards.
            lr: learning rate.
            grad_clip: limit of the gradients; None: no clipping.
            grad_clip_by: what is limited: "global_norm" of all of a module's gradients (for each optimizer), "norm" of
                each tensor, or "value" of each element.
            train_batch_size_per_learner: rows that whoever collects batches should collect, per learner.
            num_epochs: passes over each batch.
            minibatch_size: rows of one optimizer step over the whole group; None: the batch.
            minibatch_size_per_learner: the same in rows per learner, as RLlib counts; at most one of both.
            shuffle_batch_per_epoch: whether each pass takes the rows in a new random order; needs a minibatch size.
            loss_reduction: whether a learner's loss is the "mean" over its rows, or a "sum".
            learner_class: subclass of `lgroup.Learner`; None: the algorithm's.
            learner_config_dict: whatever the learner class wants to find in ``config.learner_config_dict``.
            **algorithm_settings: further attributes of this config, such as PPO's ``clip_param``.
        """
        return self._set(locals() | algorithm_settings)

    @section
    def rl_module(
        self,
        *,
        model_config: Any = NotProvided,
        rl_module_spec: RLModuleSpec | MultiRLModuleSpec | None = NotProvided,
        algorithm_config_overrides_per_module: dict[str, Mapping[str, Any]] = NotProvided,
    ) -> Self:
        """The network.

        Args:
            model_config: settings of the network, a dict or a dataclass; those in a spec come first.
            rl_module_spec: the recipe; None: the algorithm's.
            algorithm_config_overrides_per_module: ``{module_id: LearnerGroupConfig.overrides(lr=...)}``.
        """
        return self._set(locals())

    @section
    def multi_agent(
        self,
        *,
        policies: Policies = NotProvided,
        policy_mapping_fn: Callable[..., str] | None = NotProvided,
        policies_to_train: Collection[str] | Callable[..., bool] | None = NotProvided,
        algorithm_config_overrides_per_module: dict[str, Mapping[str, Any]] = NotProvided,
    ) -> Self:
        """Several modules.

        Args:
            policies: the module ids, or a dict of them to `PolicySpec` or None.
            policy_mapping_fn: ``(agent_id, episode) -> module_id``, for env runners of your own.
            policies_to_train: the ids of the modules to train, or ``(module_id, batch) -> bool``; None: all.
            algorithm_config_overrides_per_module: see `rl_module`.
        """
        return self._set(locals())

    @section
    def fault_tolerance(
        self,
        *,
        restart_failed_learners: bool = NotProvided,
        min_learners: int = NotProvided,
        max_restarts: int = NotProvided,
        restart_window_s: float = NotProvided,
        update_retries: int = NotProvided,
        update_timeout_s: float = NotProvided,
        heartbeat_timeout_s: float = NotProvided,
        snapshot_every: int | None = NotProvided,
        max_staleness: int | None = NotProvided,
        on_nonfinite: str = NotProvided,
    ) -> Self:
        """What happens when learners die, hang or compute nonsense. Times are in seconds.

        A learner in the caller's own process (``num_learners=0``) has no process to lose: only ``max_staleness`` and
        ``on_nonfinite`` concern it.

        Args:
            restart_failed_learners: whether a dead learner is replaced.
            min_learners: with fewer, training waits for replacements; with as many as ``num_learners``, the outcome of
                a run does not depend on which learners died, bit for bit, if ``update_retries`` are enough.
            max_restarts, restart_window_s: no more restarts than this within the window.
            update_retries: how often an update is tried again after a learner died in it. One that kills its learner
                each time by the learner's own doing (a crash, an exit, the memory limit) fails as "poison".
            update_timeout_s: how long one update may take, from the moment it is the first in line. A learner that
                computes has that long, even if it holds the interpreter's lock.
            heartbeat_timeout_s: how long a learner may be silent that is stopped, or uses no CPU time.
            snapshot_every: updates between two copies of the state in the caller's memory, which all learners go back
                to if all die at once; None: 100. What was trained since is trained again, as far as its data fit into
                256 MiB.
            max_staleness: commits by which a batch's weights version may lag behind when its turn comes; it is dropped
                otherwise. None: any number.
            on_nonfinite: whether an update with a nonfinite gradient only fails ("skip"), or raises, too ("raise").
        """
        return self._set(locals())

    @section
    def reporting(self, *, log_gradients: bool = NotProvided) -> Self:
        """What results contain: ``log_gradients`` adds each optimizer's gradient norm before clipping."""
        return self._set(locals())

    @section
    def callbacks(
        self,
        *,
        on_worker_died: Callable[[WorkerEvent], object] | None = NotProvided,
        on_worker_restarted: Callable[[WorkerEvent], object] | None = NotProvided,
    ) -> Self:
        """Functions of this process that are told, once each, of learners that died and of replacements that are up.

        They are called on a thread of their own with a `WorkerEvent`; what they raise is logged.
        """
        return self._set(locals())

    @section
    def debugging(
        self, *, seed: int | None = NotProvided, log_dir: str | os.PathLike[str] | None = NotProvided
    ) -> Self:
        """Random numbers, and what is written down.

        Args:
            seed: fixes the random numbers of every process; None: different ones each time.
            log_dir: a folder for one JSON file per incident (``post-mortem-0001.json``) and, if the group makes its own
                cluster, one file per worker with what that wrote; None: the log folder of the cluster, if it has one.
        """
        return self._set(locals())

    @section
    def transport(self, *, max_bytes_in_flight: int = NotProvided) -> Self:
        """``max_bytes_in_flight``: training data admitted and not finished, in bytes; a larger batch goes alone."""
        return self._set(locals())

    @property
    def learner_class(self) -> type[Learner] | None:
        """The class of the learners: the one that was set, else the algorithm's."""
        return self._learner_class or self.get_default_learner_class()

    @learner_class.setter
    def learner_class(self, value: type[Learner] | None) -> None:
        self._learner_class = value

    @property
    def rl_module_spec(self) -> RLModuleSpec | MultiRLModuleSpec:
        """The recipe of the network: the one that was set, else the algorithm's."""
        return self._rl_module_spec or self.get_default_rl_module_spec()

    @rl_module_spec.setter
    def rl_module_spec(self, value: RLModuleSpec | MultiRLModuleSpec | None) -> None:
        self._rl_module_spec = value

    def get_default_learner_class(self) -> type[Learner] | None:
        """The algorithm's learner class. Subclasses override it."""
        return None

    def get_default_rl_module_spec(self) -> RLModuleSpec | MultiRLModuleSpec:
        """The algorithm's network. Subclasses may override it."""
        return RLModuleSpec(module_class=DefaultActorCritic)

    @property
    def is_multi_agent(self) -> bool:
        """Whether there is any module but "default_policy"."""
        return self.module_ids() != [DEFAULT_MODULE_ID]

    @property
    def total_train_batch_size(self) -> int:
        """``train_batch_size_per_learner`` times the number of learners (one if local)."""
        return self.train_batch_size_per_learner * max(1, self.num_learners)

    @property
    def total_minibatch_size(self) -> int | None:
        """Rows of one optimizer step over the whole group, whichever way they were set; None: the batch."""
        if self.minibatch_size_per_learner is not None:
            return self.minibatch_size_per_learner * max(1, self.num_learners)
        return self.minibatch_size

    def get_rollout_fragment_length(self) -> int:
        """``rollout_fragment_length``; for "auto" ``total_train_batch_size`` over all environments, rounded up."""
        if isinstance(self.rollout_fragment_length, int):
            return self.rollout_fragment_length
        num_envs = self.num_envs_per_env_runner * max(1, self.num_env_runners)
        return -(-self.total_train_batch_size // num_envs)

    def module_ids(self) -> list[str]:
        """The ids of all modules."""
        return module_ids_of(self.policies, self.rl_module_spec)

    def get_config_for_module(self, module_id: str) -> Self:
        """The config with the module's overrides applied; the same object if it has none."""
        if module_id in self._cache:
            special: Self = self._cache[module_id]
            return special
        overrides = self._overrides_of(module_id)
        config = self._with_overrides(module_id, overrides) if overrides else self
        if self.is_frozen:
            self._cache[module_id] = config
        return config

    @classmethod
    def overrides(cls, **settings: Any) -> dict[str, Any]:
        """Checked ``settings`` as a dict, for ``algorithm_config_overrides_per_module``."""
        cls().update_from_dict(settings)
        return dict(settings)

    def get_multi_rl_module_spec(
        self,
        *,
        env: Any = None,
        spaces: Mapping[str, Spaces] | None = None,
        inference_only: bool = False,
    ) -> MultiRLModuleSpec:
        """The complete recipe of the network: every module with its class, settings and spaces.

        Args:
            env: an environment, or vector of environments, whose spaces to use.
            spaces: ``{module_id: (observation space, action space)}``; they come before those of ``env``. A module
                that neither has takes the config's own spaces, else those of its ``env``.
            inference_only: whether to leave out what only training needs.

        Raises ConfigError if the environment cannot be made or a module has no class.
        """
        sources = ModuleSources(
            spec=self.rl_module_spec,
            default_spec=self.get_default_rl_module_spec(),
            policies=self.policies,
            model_config=self.model_config,
            spaces=spaces or {},
            common_spaces=(self.observation_space, self.action_space) if env is None else _spaces_of(env),
            make_spaces=self._spaces_of_own_env,
        )
        return complete_spec(sources, inference_only=inference_only)

    def build_learner(self, *, env: Any = None, spaces: Mapping[str, Spaces] | None = None) -> Learner:
        """A learner in this process, built. For the arguments see `get_multi_rl_module_spec`."""
        self.validate()
        learner_class = self._required_learner_class()
        module_spec = self.get_multi_rl_module_spec(env=env, spaces=spaces)
        learner = learner_class(config=self.copy(copy_frozen=True), module_spec=module_spec)
        learner.build()
        return learner

    def build_learner_group(
        self,
        *,
        env: Any = None,
        spaces: Mapping[str, Spaces] | None = None,
        rl_module_spec: RLModuleSpec | MultiRLModuleSpec | None = None,
        cluster: Any = None,
    ) -> LearnerGroup:
        """A `LearnerGroup` with these settings, with ``rl_module_spec`` in place of the config's own if it is given.
        For ``env`` and ``spaces`` see `get_multi_rl_module_spec`.
        """
        from lgroup.learner_group import LearnerGroup

        config = self.copy(copy_frozen=False)
        if rl_module_spec is not None:
            config.rl_module(rl_module_spec=rl_module_spec)
        config.validate()
        module_spec = config.get_multi_rl_module_spec(env=env, spaces=spaces)
        return LearnerGroup(config=config, module_spec=module_spec, cluster=cluster)

    def validate(self) -> None:
        """Raises ConfigError if settings contradict each other. A subclass calls ``super().validate()``, too."""
        self._required_learner_class()
        if self.min_learners > max(1, self.num_learners):
            raise ConfigError.refused("min_learners", self.min_learners, f"at most num_learners={self.num_learners}")
        if self.minibatch_size is not None and self.minibatch_size_per_learner is not None:
            raise ConfigError.refused(
                "minibatch_size_per_learner",
                self.minibatch_size_per_learner,
                f"None, since minibatch_size={self.minibatch_size} is set (rows over the whole group)",
            )
        self._validate_modules()

    def _validate_modules(self) -> None:
        ids = self.module_ids()
        to_train = self.policies_to_train
        mentioned = {
            "algorithm_config_overrides_per_module": self.algorithm_config_overrides_per_module,
            "policies_to_train": () if to_train is None or callable(to_train) else to_train,
        }
        for name, some_ids in mentioned.items():
            for module_id in some_ids:
                if module_id not in ids:
                    raise ConfigError.unknown(f"module for {name}:", module_id, ids)
        for module_id in ids:
            self.get_config_for_module(module_id)

    def _required_learner_class(self) -> type[Learner]:
        if self.learner_class is None:
            raise ConfigError(
                "learner_class is not set; give a subclass of lgroup.Learner with training(learner_class=...), "
                "or use a config of lgroup.algorithms, such as PPOConfig"
            )
        return self.learner_class

    def _overrides_of(self, module_id: str) -> dict[str, Any]:
        by_policy = policy_of(self.policies, module_id).config
        return {**by_policy, **self.algorithm_config_overrides_per_module.get(module_id, {})}

    def _with_overrides(self, module_id: str, overrides: Mapping[str, Any]) -> Self:
        for name in overrides:
            if name in _SETTINGS_OF_BASE - PER_MODULE_SETTINGS:
                allowed = f"settings of one module: {', '.join(sorted(PER_MODULE_SETTINGS))}, or the algorithm's own"
                raise ConfigError(f"{name} cannot differ for module {module_id!r}; allowed: {allowed}")
        config = self.copy(copy_frozen=False).update_from_dict(overrides)
        return config.freeze() if self.is_frozen else config

    def _spaces_of_own_env(self) -> Spaces:
        if self.env is None:
            return None, None
        from lgroup.algorithms.environments import spaces_of

        return spaces_of(self.env, self.env_config)


_SETTINGS_OF_BASE = frozenset(LearnerGroupConfig().setting_names())
