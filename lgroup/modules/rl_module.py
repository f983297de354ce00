"""The neural network that a learner trains: `RLModule`, and `RLModuleSpec`, the recipe that travels to each learner.

A module need not be an `RLModule`: any ``torch.nn.Module`` works whose ``forward`` takes the dict of columns.
"""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from lgroup.columns import DEFAULT_MODULE_ID
from lgroup.errors import ConfigError
from lgroup.modules import _module_state
from lgroup.modules.distributions import Distribution, distribution_class_for

if TYPE_CHECKING:
    from lgroup.modules.multi_rl_module import MultiRLModule, MultiRLModuleSpec


@runtime_checkable
class ValueFunctionAPI(Protocol):
    """What a module offers whose state values are trained, too."""

    def compute_values(self, batch: dict[str, Any], embeddings: Any = None) -> Tensor:
        """State values, ``[B]`` or ``[B, T]``. ``embeddings`` from the same batch's ``forward_train`` save work."""
        ...


class RLModule(nn.Module):
    """A network with a forward pass for training, for exploring and for acting at its best.

    Subclasses build their layers in ``setup()``, from ``self.model_config`` and the two spaces, and override
    ``_forward`` or the three methods like it. A batch is a dict of columns, ``{"obs": [B, ...], ...}``; what a forward
    pass returns is usually a dict of columns, too, and reaches the loss as it is.

    Args:
        observation_space: Gymnasium space of the observations, or None where nothing needs it.
        action_space: Gymnasium space of the actions, or None.
        inference_only: whether to leave out what choosing actions does not need (`get_non_inference_attributes`).
        learner_only: whether only learners have this module, and env runners do not.
        model_config: settings of the network: a dict, or a dataclass, kept as a dict.
        catalog_class: accepted for RLlib's sake and not used.

    Raises ValueError if both ``inference_only`` and ``learner_only`` are set.
    """

    framework = "torch"

    action_dist_cls: type[Distribution] | None = None
    """The action distribution's class; None: the one that fits the action space."""

    def __init__(
        self,
        *,
        observation_space: Any = None,
        action_space: Any = None,
        inference_only: bool | None = None,
        learner_only: bool = False,
        model_config: Any = None,
        catalog_class: Any = None,
    ) -> None:
        super().__init__()
        if inference_only and learner_only:
            raise ValueError("a module cannot be both inference_only and learner_only")
        self.observation_space = observation_space
        self.action_space = action_space
        self.inference_only = bool(inference_only)
        self.learner_only = bool(learner_only)
        self.model_config: dict[str, Any] = model_config_dict(model_config)
        self.catalog = None
        self.setup()
        if self.inference_only:
            _module_state.drop_non_inference_attributes(self)

    def setup(self) -> None:
        """Builds the layers. Called once, at the end of ``RLModule.__init__``."""

    def get_non_inference_attributes(self) -> list[str]:
        """Names of the attributes (dotted for deeper ones) that choosing actions does not need."""
        return []

    def forward(self, batch: dict[str, Any], **kwargs: Any) -> Any:
        """As torch has it, ``module(batch)``: the same as ``_forward``."""
        return self._forward(batch, **kwargs)

    def forward_train(self, batch: dict[str, Any], **kwargs: Any) -> Any:
        """The forward pass before the loss, with gradients. Override ``_forward_train`` instead."""
        return self._forward_train(batch, **kwargs)

    def forward_exploration(self, batch: dict[str, Any], **kwargs: Any) -> Any:
        """The forward pass of env runners that collect data. Override ``_forward_exploration`` instead."""
        return self._forward_exploration(batch, **kwargs)

    def forward_inference(self, batch: dict[str, Any], **kwargs: Any) -> Any:
        """The forward pass for acting at its best. Override ``_forward_inference`` instead."""
        return self._forward_inference(batch, **kwargs)

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> Any:
        """The forward pass in all three phases, unless one has its own. Without any of them, an empty dict."""
        return {} if type(self).forward is RLModule.forward else self.forward(batch, **kwargs)

    def _forward_train(self, batch: dict[str, Any], **kwargs: Any) -> Any:
        """The forward pass of training; by default ``_forward``."""
        return self._forward(batch, **kwargs)

    def _forward_exploration(self, batch: dict[str, Any], **kwargs: Any) -> Any:
        """The forward pass of exploring; by default ``_forward`` without gradients."""
        with torch.no_grad():
            return self._forward(batch, **kwargs)

    def _forward_inference(self, batch: dict[str, Any], **kwargs: Any) -> Any:
        """The forward pass of acting at its best; by default ``_forward`` without gradients."""
        with torch.no_grad():
            return self._forward(batch, **kwargs)

    def get_initial_state(self) -> Any:
        """The recurrent state of one new episode, as a tree of arrays without batch dimension; {} if there is none."""
        return {}

    def is_stateful(self) -> bool:
        """Whether the module carries recurrent state from step to step."""
        return bool(self.get_initial_state())

    def get_train_action_dist_cls(self) -> type[Distribution] | None:
        """The class that turns ``forward_train``'s "action_dist_inputs" into a distribution; None without actions."""
        if self.action_dist_cls is not None or self.action_space is None:
            return self.action_dist_cls
        return distribution_class_for(self.action_space)

    def get_exploration_action_dist_cls(self) -> type[Distribution] | None:
        """The same for ``forward_exploration``."""
        return self.get_train_action_dist_cls()

    def get_inference_action_dist_cls(self) -> type[Distribution] | None:
        """The same for ``forward_inference``; its ``to_deterministic()`` gives the best action."""
        return self.get_train_action_dist_cls()

    def get_state(
        self,
        components: str | Collection[str] | None = None,
        *,
        not_components: str | Collection[str] | None = None,
        inference_only: bool = False,
    ) -> dict[str, Any]:
        """A copy of the state, ``{name: CPU tensor}``, which fits ``load_state_dict``. A single module has no
        components, so the first two arguments change nothing; ``inference_only`` leaves non-inference attributes out.
        """
        return _module_state.get_module_state(self, inference_only=inference_only)

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Copies ``state`` (tensors or numpy arrays) into the module. ValueError if it does not fit."""
        _module_state.set_module_state(self, state)

    def as_multi_rl_module(self) -> MultiRLModule:
        """A `MultiRLModule` with this module (not a copy) as its only one."""
        from lgroup.modules.multi_rl_module import MultiRLModule

        multi = MultiRLModule()
        multi.add_module(DEFAULT_MODULE_ID, self)
        return multi

    def unwrapped(self) -> RLModule:
        """The module itself: lgroup wraps modules in nothing."""
        return self


TorchRLModule = RLModule


def run_forward(module: nn.Module, phase: str, batch: dict[str, Any], **kwargs: Any) -> Any:
    """The forward pass of any module: an `RLModule`'s method ``phase`` ("forward_train", "forward_exploration" or
    "forward_inference"); another ``torch.nn.Module`` is called, without gradients unless it is to train.
    """
    if isinstance(module, RLModule):
        return getattr(module, phase)(batch, **kwargs)
    with torch.set_grad_enabled(torch.is_grad_enabled() and phase == "forward_train"):
        return module(batch, **kwargs)


@dataclass
class RLModuleSpec:
    """The recipe for one module. A plain value: it can be copied, pickled and changed until ``build()``.

    Args:
        module_class: an `RLModule` subclass, or any callable that returns a ``torch.nn.Module`` (usually its class),
            called as ``module_class(**model_config)``. None: the algorithm's default.
        observation_space, action_space, inference_only, learner_only, catalog_class: see `RLModule`.
        model_config: a dict or a dataclass. None: what the config's ``rl_module(model_config=...)`` says.
        load_state_path: a file that ``torch.save`` wrote, with the state (``{name: tensor}``) to start from.
        instance: a finished module to copy instead of building one; see `from_module`.
    """

    module_class: Callable[..., nn.Module] | None = None
    observation_space: Any = None
    action_space: Any = None
    inference_only: bool = False
    learner_only: bool = False
    model_config: Any = None
    catalog_class: Any = None
    load_state_path: str | os.PathLike[str] | None = None
    instance: nn.Module | None = field(default=None, kw_only=True, repr=False, compare=False)

    @classmethod
    def from_module(cls, module: nn.Module) -> RLModuleSpec:
        """The recipe that copies ``module`` with the weights it has now (on the CPU). Later changes do not count.

        Raises ValueError for a `MultiRLModule`, and ConfigError if the module cannot be copied.
        """
        if is_multi(module):
            raise ValueError("this is a MultiRLModule; use MultiRLModuleSpec.from_module")
        return dataclasses.replace(cls.describing(module), instance=copy_of_module(module).cpu())

    @classmethod
    def describing(cls, module: nn.Module) -> RLModuleSpec:
        """What can be read off ``module`` itself, without its weights."""
        return cls(
            module_class=type(module),
            observation_space=getattr(module, "observation_space", None),
            action_space=getattr(module, "action_space", None),
            inference_only=bool(getattr(module, "inference_only", False)),
            learner_only=bool(getattr(module, "learner_only", False)),
            model_config=getattr(module, "model_config", None),
        )

    def build(self) -> nn.Module:
        """A new module. Errors in its constructor come through as they are; ConfigError if the recipe is incomplete."""
        module = self._construct() if self.instance is None else self._copy_instance(self.instance)
        if isinstance(module, RLModule):
            module.learner_only = self.learner_only
        if self.load_state_path is not None:
            _module_state.set_module_state(module, load_state_file(self.load_state_path))
        return module

    def _construct(self) -> nn.Module:
        if self.module_class is None:
            raise ConfigError("RLModuleSpec.module_class is not set; give an RLModule or torch.nn.Module class")
        if not _is_rl_module_class(self.module_class):
            module = self.module_class(**model_config_dict(self.model_config))
            if not isinstance(module, nn.Module):
                raise ConfigError.refused("module_class", self.module_class, "what returns a torch.nn.Module")
            return module
        return self.module_class(
            observation_space=self.observation_space,
            action_space=self.action_space,
            inference_only=self.inference_only,
            model_config=model_config_dict(self.model_config),
            catalog_class=self.catalog_class,
        )

    def _copy_instance(self, instance: nn.Module) -> nn.Module:
        module = copy_of_module(instance)
        if self.inference_only:
            _module_state.drop_non_inference_attributes(module)
        return module

    def copy(self) -> RLModuleSpec:
        """Another spec with the same values; changing its fields or its model_config does not change this one."""
        return dataclasses.replace(self, model_config=copy.deepcopy(self.model_config))

    def update(self, other: RLModuleSpec, override: bool = True) -> None:
        """Takes over the fields set in ``other``; with ``override=False`` only where this spec has none."""
        if not isinstance(other, RLModuleSpec):
            raise ValueError(f"an RLModuleSpec can be updated by another only, not by {type(other).__name__}")
        for name in (f.name for f in dataclasses.fields(self)):
            theirs, mine = getattr(other, name), getattr(self, name)
            is_flag = name in ("inference_only", "learner_only")
            if (theirs if is_flag else theirs is not None) and (override or (not is_flag and mine is None)):
                setattr(self, name, theirs)

    def as_multi_rl_module_spec(self) -> MultiRLModuleSpec:
        """The recipe for a `MultiRLModule` whose only module is this one."""
        from lgroup.modules.multi_rl_module import MultiRLModuleSpec

        return MultiRLModuleSpec(rl_module_specs={DEFAULT_MODULE_ID: self})


def model_config_dict(model_config: Any) -> dict[str, Any]:
    """A model config, given as a mapping, a dataclass or None, as a dict."""
    if model_config is None:
        return {}
    if dataclasses.is_dataclass(model_config) and not isinstance(model_config, type):
        return dataclasses.asdict(model_config)
    if isinstance(model_config, Mapping):
        return dict(model_config)
    raise ConfigError.refused("model_config", model_config, "a dict, a dataclass instance or None")


def is_multi(module: nn.Module) -> bool:
    """Whether the module is a `MultiRLModule`."""
    from lgroup.modules.multi_rl_module import MultiRLModule

    return isinstance(module, MultiRLModule)


def load_state_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The state in a file of ``torch.save``, on the CPU; nothing in it is executed. ConfigError if it is not one."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ConfigError(f"load_state_path={str(path)!r} cannot be read as a file of torch.save: {error}") from error
    if not isinstance(state, dict):
        raise ConfigError.refused("load_state_path", str(path), f"a file with a dict in it, not {type(state).__name__}")
    return state


def copy_of_module(module: nn.Module) -> nn.Module:
    """An independent copy with the same weights. ConfigError if the module cannot be copied."""
    try:
        return copy.deepcopy(module)
    except Exception as error:
        raise ConfigError(
            f"the module {type(module).__name__} cannot be copied ({error}); give its class and model_config instead"
        ) from error


def _is_rl_module_class(module_class: Callable[..., nn.Module]) -> bool:
    return isinstance(module_class, type) and issubclass(module_class, RLModule)
