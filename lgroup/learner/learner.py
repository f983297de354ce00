"""The learner: a network, its optimizers, and the hooks that turn a batch into a step.

Users subclass `Learner`; the smallest useful subclass is one loss function. What happens in an update, in order::

    before_gradient_based_update
    for each minibatch:
        forward_train -> compute_losses -> (times this rank's share) -> compute_gradients
        -> (sum over the group) -> postprocess_gradients -> apply_gradients
    after_gradient_based_update

The order, the shares and the sum are `lgroup.learner.update`'s; this module holds what can be overridden.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from lgroup.columns import DEFAULT_MODULE_ID, DEFAULT_OPTIMIZER
from lgroup.errors import ConfigError
from lgroup.learner.collective import Collective, SingleRank
from lgroup.learner.flat_buffer import FlatBuffer, shared_buffers
from lgroup.learner.gradients import clip_gradients, global_norm
from lgroup.learner.learner_state import LearnerState
from lgroup.learner.metrics import Metrics
from lgroup.learner.module_slots import ModuleSlots
from lgroup.modules import SHARED_STATE, MultiRLModule, RLModuleSpec

if TYPE_CHECKING:
    from lgroup.config import LearnerGroupConfig
    from lgroup.modules import MultiRLModuleSpec

ParamRef = Hashable
ParamDict = dict[ParamRef, Any]


class Learner(LearnerState):
    """A network with its losses and optimizers, one of a group of identical ones.

    Attributes:
        config: The frozen `LearnerGroupConfig`.
        module: The `MultiRLModule`; ``module[module_id]`` is one network.
        device: Where the module and the batches are.
        rank, world_size: This learner's place in the group.
        metrics: Where hooks log numbers, see `Metrics`.

    Every other attribute whose name does not begin with ``_lgroup_`` and that is a tensor, array, number, string, a
    container of these, or has ``state_dict``, is part of the learner's state: it is undone with a failed update, and
    replacements and checkpoints get it.
    """

    framework: ClassVar[str] = "torch"
    TOTAL_LOSS_KEY: ClassVar[str] = "total_loss"

    def __init__(
        self,
        *,
        config: LearnerGroupConfig,
        module_spec: MultiRLModuleSpec | RLModuleSpec | None = None,
        module: MultiRLModule | None = None,
    ) -> None:
        self.config = config
        self.module_spec = module_spec
        self.metrics = Metrics()
        self.device = torch.device("cpu")
        self._lgroup_module = module
        self._lgroup_collective: Collective = SingleRank()
        self._lgroup_optimizers: dict[str, torch.optim.Optimizer] = {}
        self._lgroup_module_optimizers: dict[str, list[str]] = {}
        self._lgroup_params: dict[ParamRef, torch.nn.Parameter] = {}
        self._lgroup_registered: dict[str, Any] = {}
        self._lgroup_flat: FlatBuffer | None = None
        self._lgroup_slots: ModuleSlots | None = None
        self._lgroup_pass_through: bool | None = None

    # Building

    def build(self) -> None:
        """Build the module from its spec, then the optimizers. Called once, before the first update.

        Raises:
            ConfigError: if a parameter is sparse, or on another device than the learner.
        """
        if self._lgroup_module is None:
            self._lgroup_module = self._make_module()
        self._lgroup_module.to(self.device)
        self._lgroup_module.train()
        self._check_gradients_are_dense()
        self.configure_optimizers()

    def _check_gradients_are_dense(self) -> None:
        for name, part in self.module.named_modules():
            if isinstance(part, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and part.sparse:
                raise ConfigError(
                    f"{type(part).__name__} {name.removeprefix('_rl_modules.')!r} has sparse gradients; only dense "
                    "ones can be averaged over learners: set sparse=False"
                )

    def _make_module(self) -> MultiRLModule:
        spec = self.module_spec or self.config.get_multi_rl_module_spec()
        if isinstance(spec, RLModuleSpec):
            spec = spec.as_multi_rl_module_spec()
        module = spec.build()
        assert isinstance(module, MultiRLModule)
        return module

    @property
    def module(self) -> MultiRLModule:
        """The networks by module id. Available after `build`."""
        if self._lgroup_module is None:
            raise RuntimeError("the learner has no module yet: call build() first")
        return self._lgroup_module

    @property
    def rank(self) -> int:
        """This learner's number in the group, from 0."""
        return self._lgroup_collective.rank

    @property
    def world_size(self) -> int:
        """How many learners the group has."""
        return self._lgroup_collective.world_size

    # Optimizers

    def configure_optimizers(self) -> None:
        """Register optimizers for all modules; by default `configure_optimizers_for_module` for each, sorted by id.

        Parameters of the `MultiRLModule` that are in none of its modules get an Adam of their own.
        """
        for module_id in sorted(self.module.keys()):
            self.configure_optimizers_for_module(
                module_id=module_id, config=self.config.get_config_for_module(module_id)
            )
        shared = self.module.owned_parameters().get(SHARED_STATE, {}).values()
        parameters = [p for p in shared if p.requires_grad and self.get_param_ref(p) not in self._lgroup_params]
        if parameters:
            optimizer = torch.optim.Adam(parameters, lr=self.config.lr)
            self.register_optimizer(module_id=SHARED_STATE, optimizer=optimizer, params=parameters)

    def configure_optimizers_for_module(self, module_id: str, config: LearnerGroupConfig | None = None) -> None:
        """Register optimizers for one module: by default Adam with ``config.lr`` over its trainable parameters.

        A parameter that modules share belongs to the optimizer of the first of them.
        """
        config = config or self.config.get_config_for_module(module_id)
        parameters = [
            p
            for p in self.get_parameters(self.module[module_id])
            if p.requires_grad and self.get_param_ref(p) not in self._lgroup_params
        ]
        if parameters:
            optimizer = torch.optim.Adam(parameters, lr=config.lr)
            self.register_optimizer(module_id=module_id, optimizer=optimizer, params=parameters)

    def register_optimizer(
        self,
        *,
        module_id: str = DEFAULT_MODULE_ID,
        optimizer_name: str = DEFAULT_OPTIMIZER,
        optimizer: torch.optim.Optimizer,
        params: Sequence[torch.nn.Parameter],
        lr_or_lr_schedule: float | None = None,
    ) -> None:
        """Have `optimizer` step the parameters `params` with the group's gradients.

        Args:
            module_id: The module that the optimizer is listed under.
            optimizer_name: Its name there; the pair must be new.
            optimizer: A torch optimizer over `params`.
            params: Parameters, of a module or free ones.
            lr_or_lr_schedule: A learning rate to set; None leaves the optimizer's own.

        Raises:
            ValueError: if the name is taken, or `params` are not those that the optimizer steps.
            ConfigError: if a parameter is sparse or on another device.
        """
        name = f"{module_id}_{optimizer_name}"
        if name in self._lgroup_optimizers:
            raise ValueError(f"module {module_id!r} already has an optimizer {optimizer_name!r}")
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if stepped != {id(p) for p in params}:
            # One that the group does not sum would be stepped by each learner's own gradient.
            raise ValueError(
                f"optimizer {optimizer_name!r} of module {module_id!r} steps {len(stepped)} parameters, and params are "
                f"{len(params)} that are not the same: give it exactly those"
            )
        if lr_or_lr_schedule is not None:
            for group in optimizer.param_groups:
                group["lr"] = lr_or_lr_schedule
        self._lgroup_optimizers[name] = optimizer
        self._lgroup_module_optimizers.setdefault(module_id, []).append(name)
        for parameter in params:
            self._check_parameter(module_id, parameter)
            self._lgroup_params[self.get_param_ref(parameter)] = parameter
        self._lgroup_flat = self._lgroup_slots = self._lgroup_pass_through = None

    def _check_parameter(self, module_id: str, parameter: torch.Tensor) -> None:
        if parameter.layout is not torch.strided:
            raise ConfigError(
                f"module {module_id!r} has a parameter of layout {parameter.layout}; only dense ones (torch.strided) "
                "can be averaged over learners: set sparse=False"
            )
        if parameter.device.type != self.device.type:
            raise ConfigError(
                f"module {module_id!r} has a parameter on {parameter.device}; the learner is on {self.device}"
            )

    def flat_buffer(self) -> FlatBuffer:
        """The buffer that gradients and module buffers are summed in; made anew when parameters come or go."""
        if self._lgroup_flat is None:
            buffers = shared_buffers(dict(self.module.items()), self.module)
            self._lgroup_flat = FlatBuffer(self._lgroup_params, buffers, self.device)
        return self._lgroup_flat

    def slots(self) -> ModuleSlots:
        """Where the module keeps its parameters and buffers; found anew when parameters come or go."""
        if self._lgroup_slots is None:
            self._lgroup_slots = ModuleSlots(self.module)
        return self._lgroup_slots

    def is_double(self) -> bool:
        """Whether any parameter is float64: then float64 columns stay what they are."""
        return self.flat_buffer().tensor.dtype == torch.float64

    def parameter_names(self) -> dict[ParamRef, str]:
        """A name for every optimized parameter, for messages."""
        named = (*self.module.named_parameters(), *self.free_parameters())
        return {self.get_param_ref(p): name.removeprefix("_rl_modules.") for name, p in named}  # type: ignore[arg-type]

    def get_optimizers_for_module(self, module_id: str = DEFAULT_MODULE_ID) -> list[tuple[str, torch.optim.Optimizer]]:
        """The module's optimizers with their names, in order of registration."""
        names = self._lgroup_module_optimizers.get(module_id, [])
        return [(name.removeprefix(f"{module_id}_"), self._lgroup_optimizers[name]) for name in names]

    def get_optimizer(
        self, module_id: str = DEFAULT_MODULE_ID, optimizer_name: str = DEFAULT_OPTIMIZER
    ) -> torch.optim.Optimizer:
        """One optimizer by module and name.

        Raises:
            KeyError: if there is none, naming those there are.
        """
        name = f"{module_id}_{optimizer_name}"
        if name not in self._lgroup_optimizers:
            raise KeyError(f"no optimizer {name!r}; there are {sorted(self._lgroup_optimizers)}")
        return self._lgroup_optimizers[name]

    def get_parameters(self, module: torch.nn.Module) -> list[torch.nn.Parameter]:
        """The parameters of a module."""
        return list(module.parameters())

    def get_param_ref(self, param: torch.nn.Parameter) -> ParamRef:
        """What stands for a parameter as a key in gradient dicts: the parameter itself, by identity."""
        return param

    def filter_param_dict_for_optimizer(self, param_dict: Mapping[ParamRef, Any], optimizer: Any) -> ParamDict:
        """The part of a dict by parameter that belongs to `optimizer`."""
        refs = (self.get_param_ref(p) for group in optimizer.param_groups for p in group["params"])
        return {ref: param_dict[ref] for ref in refs if ref in param_dict}

    # Losses

    def should_module_be_updated(self, module_id: str, multi_agent_batch: Any = None) -> bool:
        """Whether this update trains the module: by default whatever ``config.policies_to_train`` says.

        It must give the same answer on every learner. `multi_agent_batch` is this learner's part of the data.
        """
        wanted = self.config.policies_to_train
        if wanted is None:
            return True
        if callable(wanted):
            return bool(wanted(module_id, multi_agent_batch))
        return module_id in wanted

    def build_batch(self, episodes: Sequence[Any]) -> dict[str, dict[str, Any]]:
        """Turn episodes into columns by module: by default one row per env step.

        The default runs in the coordinator, so that minibatches are cut from all episodes together. Overridden, it runs
        on each learner with that learner's episodes, and a minibatch takes an even part of each learner's rows.
        """
        from lgroup.data.episode import episodes_to_batch

        return episodes_to_batch(episodes)

    def loss_weight(self, module_id: str, batch: Mapping[str, Any]) -> float:
        """How much this learner's mean loss counts in the group's: its rows, or valid steps under a ``loss_mask``.

        The default is taken from the plan. Overridden, it is called for every minibatch before the first step, and the
        learners sum their answers, which costs one more reduction per update.
        """
        from lgroup.data.batch import row_weights

        weights = row_weights(batch)
        return float(weights.sum()) if weights is not None else float(len(next(iter(batch.values()))))

    def compute_losses(self, *, fwd_out: Mapping[str, Any], batch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """One loss per module of the minibatch; by default `compute_loss_for_module` for each."""
        return {
            module_id: self.compute_loss_for_module(
                module_id=module_id,
                config=self.config.get_config_for_module(module_id),
                batch=module_batch,
                fwd_out=fwd_out[module_id],
            )
            for module_id, module_batch in batch.items()
        }

    def compute_loss_for_module(
        self, *, module_id: str, config: LearnerGroupConfig, batch: dict[str, Any], fwd_out: Any
    ) -> torch.Tensor:
        """The loss of one module on this learner's rows of the minibatch. Subclasses must define it.

        Args:
            module_id: Which module.
            config: The config with this module's overrides.
            batch: Columns, torch tensors ``[rows, ...]`` on `device`.
            fwd_out: What the module's ``forward_train`` returned.

        Returns:
            A scalar: the mean over the rows (over the valid steps, where there is a ``loss_mask``).
        """
        raise TypeError(f"{type(self).__name__} must define compute_loss_for_module()")

    # Gradients

    def compute_gradients(self, loss_per_module: Mapping[str, torch.Tensor], **kwargs: Any) -> ParamDict:
        """This learner's gradients by parameter; None where the loss does not reach.

        The losses are already multiplied by this learner's share, and a plain sum of the learners' gradients follows.
        """
        for parameter in self._lgroup_params.values():
            parameter.grad = None  # what zero_grad does, at a tenth of its cost (it opens a profiler range)
        losses = list(loss_per_module.values())
        if losses:
            total = losses[0] if len(losses) == 1 else torch.stack(losses).sum()
            if total.requires_grad:
                total.backward()
        return {ref: parameter.grad for ref, parameter in self._lgroup_params.items()}

    def postprocess_gradients(self, gradients_dict: ParamDict) -> ParamDict:
        """Change the group's gradients before they are applied: by default `postprocess_gradients_for_module`."""
        if self._lgroup_gradients_pass_through():
            return gradients_dict
        result: ParamDict = {}
        for module_id in self._lgroup_module_optimizers:
            own = {}
            for _, optimizer in self.get_optimizers_for_module(module_id):
                own.update(self.filter_param_dict_for_optimizer(gradients_dict, optimizer))
            result.update(
                self.postprocess_gradients_for_module(
                    module_id=module_id,
                    config=self.config.get_config_for_module(module_id),
                    module_gradients_dict=own,
                )
            )
        return result

    def _lgroup_gradients_pass_through(self) -> bool:
        """Whether the default post-processing has nothing to do, for any module."""
        if self._lgroup_pass_through is None:
            configs = [self.config.get_config_for_module(module_id) for module_id in self._lgroup_module_optimizers]
            self._lgroup_pass_through = type(
                self
            ).postprocess_gradients_for_module is Learner.postprocess_gradients_for_module and all(
                config.grad_clip is None and not config.log_gradients for config in configs
            )
        return self._lgroup_pass_through

    def postprocess_gradients_for_module(
        self, *, module_id: str, config: LearnerGroupConfig | None = None, module_gradients_dict: ParamDict
    ) -> ParamDict:
        """Change one module's gradients: by default clip them as ``grad_clip`` and ``grad_clip_by`` say.

        With ``config.log_gradients`` their global norm before clipping is logged, for each optimizer.
        """
        config = config or self.config.get_config_for_module(module_id)
        result: ParamDict = {}
        for name, optimizer in self.get_optimizers_for_module(module_id):
            own = self.filter_param_dict_for_optimizer(module_gradients_dict, optimizer)
            if config.log_gradients:
                self.metrics.log_value((module_id, f"gradients_{name}_global_norm"), global_norm(own.values()))
            if config.grad_clip is not None:
                clip_gradients(own, config.grad_clip, config.grad_clip_by)
            result.update(own)
        return result

    def apply_gradients(self, gradients_dict: ParamDict) -> None:
        """Step every optimizer that has a gradient. Parameters without one keep their values and optimizer state."""
        for ref, parameter in self._lgroup_params.items():
            parameter.grad = gradients_dict.get(ref)
        for optimizer in self._lgroup_optimizers.values():
            if any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
                optimizer.step()

    # Around the update

    def before_gradient_based_update(self, *, timesteps: dict[str, Any]) -> None:
        """Called once per update, before the first minibatch. `timesteps` is what the caller gave to ``update``."""

    def after_gradient_based_update(self, *, timesteps: dict[str, Any]) -> None:
        """Called once per update, after the last minibatch: target networks, coefficients, schedules."""

    def group_mean(self, x: Any, weight: float = 1.0) -> Any:
        """The weighted mean of `x` over all learners of the group; the same value on each.

        Every learner must call it at the same point. With one learner it is `x` itself.

        Args:
            x: A number, or a float tensor of the same shape on every learner.
            weight: This learner's weight, such as its number of rows. A learner whose weight is 0 takes part; its `x`
                does not count.

        Returns:
            A float for a number, a new tensor for a tensor. NaN if all weights are 0.
        """
        value = torch.as_tensor(x, dtype=None if isinstance(x, torch.Tensor) else torch.float64).detach()
        scaled = value.to(torch.float64) * weight if weight else torch.zeros_like(value, dtype=torch.float64)
        flat = torch.cat([scaled.reshape(-1), torch.tensor([weight], dtype=torch.float64, device=value.device)])
        self._lgroup_collective.sum(flat).wait()
        mean = flat[:-1] / flat[-1]
        return mean.reshape(value.shape).to(value.dtype) if isinstance(x, torch.Tensor) else mean.item()

    def trained_modules(self, batch: Mapping[str, Any]) -> Collection[str]:
        """The modules of `batch` that this update trains."""
        return [module_id for module_id in batch if self.should_module_be_updated(module_id, batch)]


TorchLearner = Learner
