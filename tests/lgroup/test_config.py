from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest
import torch
from gymnasium import spaces
from torch import nn

from lgroup._config_checks import number
from lgroup.config import LearnerGroupConfig, NotProvided, PolicySpec
from lgroup.errors import ConfigError
from lgroup.learner import Learner
from lgroup.modules import DefaultActorCritic, DefaultModelConfig, MultiRLModuleSpec, RLModule, RLModuleSpec

OBS, ACTIONS = spaces.Box(-1, 1, (4,)), spaces.Discrete(2)


class SomeLearner:
    """As much of a learner class as the config looks at."""

    built = False

    def __init__(self, *, config: Any, module_spec: Any) -> None:
        self.config, self.module_spec = config, module_spec

    def build(self) -> None:
        self.built = True

    def compute_loss_for_module(self) -> None: ...


class OtherLearner(SomeLearner):
    pass


class Plain(nn.Module):
    def __init__(self, width: int = 2) -> None:
        super().__init__()
        self.width = width


class AlgoConfig(LearnerGroupConfig):
    """Written as a user would who knows RLlib."""

    checks = {"clip_param": number(above=0)}

    def __init__(self) -> None:
        super().__init__()
        self.clip_param = 0.3
        self.kl_coeff = 0.2
        self.lr = 5e-5

    def training(self, *, kl_coeff: float = NotProvided, **kwargs: Any) -> AlgoConfig:
        super().training(**kwargs)
        if kl_coeff is not NotProvided:
            self.kl_coeff = kl_coeff
        return self

    def get_default_learner_class(self) -> Any:
        return SomeLearner


def config() -> LearnerGroupConfig:
    return (
        LearnerGroupConfig()
        .training(learner_class=SomeLearner)
        .environment(observation_space=OBS, action_space=ACTIONS)
    )


def test_methods_set_attributes_and_can_be_chained() -> None:
    made = (
        LearnerGroupConfig()
        .environment("CartPole-v1", env_config={"a": 1})
        .learners(num_learners=2, num_gpus_per_learner=0.5, max_requests_in_flight_per_learner=4)
        .env_runners(num_env_runners=3, rollout_fragment_length="auto")
        .training(lr=0.1, grad_clip=1.0, minibatch_size=64, num_epochs=3, learner_class=SomeLearner)
        .rl_module(model_config={"x": 1})
        .multi_agent(policies={"a", "b"}, policies_to_train=["a"])
        .fault_tolerance(min_learners=2, on_nonfinite="raise")
        .reporting(log_gradients=True)
        .debugging(seed=3)
        .transport(max_bytes_in_flight=1000)
    )
    assert (made.env, made.num_learners, made.lr, made.minibatch_size, made.seed) == ("CartPole-v1", 2, 0.1, 64, 3)
    assert (made.max_bytes_in_flight, made.log_gradients, made.on_nonfinite) == (1000, True, "raise")
    assert made.learner_class is SomeLearner
    made.validate()


def test_defaults_are_rllibs() -> None:
    made = LearnerGroupConfig()
    rllib = {
        "env": None, "env_config": {}, "observation_space": None, "action_space": None,
        "num_learners": 0, "num_cpus_per_learner": "auto", "num_gpus_per_learner": 0,
        "max_requests_in_flight_per_learner": 3, "learner_config_dict": {},
        "num_env_runners": 0, "num_envs_per_env_runner": 1, "max_requests_in_flight_per_env_runner": 1,
        "rollout_fragment_length": 200,
        "gamma": 0.99, "lr": 0.001, "grad_clip": None, "grad_clip_by": "global_norm",
        "train_batch_size_per_learner": 32, "num_epochs": 1, "minibatch_size": None, "shuffle_batch_per_epoch": False,
        "log_gradients": False, "algorithm_config_overrides_per_module": {}, "policies_to_train": None,
        "seed": None,
    }  # fmt: skip
    assert {name: getattr(made, name) for name in rllib} == rllib


@pytest.mark.parametrize("name", LearnerGroupConfig().setting_names())
def test_every_setting_is_checked(name: str) -> None:
    assert LearnerGroupConfig.check_of(name) is not None
    with pytest.raises(ConfigError, match=rf"^{name}=<object.*allowed: "):
        setattr(LearnerGroupConfig(), name, object())


@pytest.mark.parametrize("name", LearnerGroupConfig().setting_names())
def test_every_setting_has_a_method_that_takes_it(name: str) -> None:
    places = [place for place, names in LearnerGroupConfig.sections() if name in names]
    assert places
    for place in places:
        made = LearnerGroupConfig()
        value = getattr(made, name)
        assert getattr(made, place.removesuffix("()"))(**{name: value}) is made


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_learners", -1), ("num_learners", 1.5), ("num_learners", True), ("num_learners", None),
        ("num_cpus_per_learner", "all"), ("lr", float("nan")), ("lr", -1.0), ("lr", [[0, 0.1]]), ("gamma", 1.1),
        ("grad_clip", 0), ("grad_clip_by", "l2"), ("minibatch_size", 0), ("num_epochs", 0), ("learner_class", "PPO"),
        ("learner_class", dict), ("env", 3), ("observation_space", 4), ("rl_module_spec", RLModule),
        ("model_config", DefaultModelConfig), ("policies", "p0"), ("policies_to_train", "p0"), ("min_learners", 0),
        ("update_timeout_s", 0), ("on_nonfinite", "ignore"), ("loss_reduction", None), ("seed", -3),
    ],
)  # fmt: skip
def test_a_value_that_is_not_allowed_is_refused_by_name(name: str, value: Any) -> None:
    made = LearnerGroupConfig()
    before = getattr(made, name)
    with pytest.raises(ConfigError, match=rf"^{name}=.*allowed: "):
        setattr(made, name, value)
    assert getattr(made, name) is before or getattr(made, name) == before


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda c: c.training(lrr=1), "no setting of training.. 'lrr'; did you mean 'lr'"),
        (lambda c: c.training(num_learners=1), "num_learners is not a setting of training.*learners()"),
        (lambda c: c.learners(num_learner=1), "did you mean 'num_learners'"),
        (lambda c: c.fault_tolerance(minlearners=1), "did you mean 'min_learners'"),
        (lambda c: setattr(c, "num_lerners", 1), "did you mean 'num_learners'"),
        (lambda c: setattr(c, "training", 1), "no setting of LearnerGroupConfig 'training'"),
        (lambda c: c.overrides(clip=1), "no setting of LearnerGroupConfig 'clip'"),
        (lambda c: c.update_from_dict({"lr_": 1}), "did you mean 'lr'"),
    ],
)
def test_an_unknown_name_is_answered_with_where_it_belongs_or_close_ones(
    call: Callable[[LearnerGroupConfig], Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        call(LearnerGroupConfig())


def test_contradictions_are_found_by_validate() -> None:
    contradictions = {
        "learner_class is not set": LearnerGroupConfig(),
        "min_learners=3 .*num_learners=2": config().learners(num_learners=2).fault_tolerance(min_learners=3),
        "minibatch_size_per_learner=8": config().training(minibatch_size=8, minibatch_size_per_learner=8),
        "module for policies_to_train: 'p1'": config().multi_agent(policies_to_train=["p1"]),
        "module for algorithm_config_overrides_per_module: 'p1'": config().rl_module(
            algorithm_config_overrides_per_module={"p1": {}}
        ),
        "num_epochs cannot differ for module 'default_policy'": config().rl_module(
            algorithm_config_overrides_per_module={"default_policy": {"num_epochs": 2}}
        ),
        "lr='fast'": config().rl_module(algorithm_config_overrides_per_module={"default_policy": {"lr": "fast"}}),
        "module_id='a/b'": config().multi_agent(policies=["a/b"]),
    }
    for words, made in contradictions.items():
        with pytest.raises(ConfigError, match=words):
            made.validate()
    config().validate()


def test_a_frozen_config_cannot_be_changed_but_its_copy_can() -> None:
    frozen = config().freeze()
    assert frozen.is_frozen and frozen.copy().is_frozen
    for change in (lambda: frozen.training(lr=1.0), lambda: setattr(frozen, "lr", 1.0)):
        with pytest.raises(ConfigError, match="frozen"):
            change()
    assert frozen.copy(copy_frozen=False).training(lr=1.0).lr == 1.0
    assert not config().copy().is_frozen and config().copy(copy_frozen=True).is_frozen


def test_a_copy_shares_nothing_that_can_be_edited() -> None:
    spec = MultiRLModuleSpec(rl_module_specs={"p0": RLModuleSpec(Plain, model_config={"width": 1})})
    made = config().environment(env_config={"deep": {"list": [1]}}).rl_module(rl_module_spec=spec)
    made.model_config = DefaultModelConfig()
    twin = made.copy()
    twin.env_config["deep"]["list"].append(2)
    twin.model_config.fcnet_hiddens.append(3)
    twin.rl_module_spec["p0"].model_config["width"] = 5
    twin.rl_module_spec.remove_modules("p0")
    assert made.env_config == {"deep": {"list": [1]}}
    assert made.model_config == DefaultModelConfig()
    assert spec["p0"].model_config == {"width": 1}


def test_it_travels_with_everything_in_it() -> None:
    class Local(AlgoConfig):
        def training(self, *, extra: int = NotProvided, **kwargs: Any) -> Local:
            assert extra is NotProvided
            return super().training(**kwargs)  # type: ignore[return-value]

    sent = Local().environment(lambda env_config: None).training(clip_param=0.1)
    sent.rl_module(rl_module_spec=RLModuleSpec.from_module(Plain(7)))
    got = cloudpickle.loads(cloudpickle.dumps(sent.copy(copy_frozen=True)))
    assert got.is_frozen and got.clip_param == 0.1
    assert got.get_multi_rl_module_spec().build()["default_policy"].width == 7
    assert got.copy(copy_frozen=False).training(lr=1.0).lr == 1.0, "NotProvided is still the same object"


def test_a_subclass_adds_settings_that_training_takes_and_checks() -> None:
    made = AlgoConfig().training(clip_param=0.1, kl_coeff=0.5, lr=0.1)
    assert (made.clip_param, made.kl_coeff, made.lr) == (0.1, 0.5, 0.1)
    assert AlgoConfig().lr == 5e-5 and AlgoConfig().learner_class is SomeLearner
    assert AlgoConfig().training(learner_class=OtherLearner).learner_class is OtherLearner
    with pytest.raises(ConfigError, match=r"clip_param=0 .*a number > 0"):
        AlgoConfig().training(clip_param=0)
    with pytest.raises(ConfigError, match="did you mean 'clip_param'"):
        AlgoConfig().training(clip_params=0.1)
    with pytest.raises(ConfigError, match="'clip_param'"):
        LearnerGroupConfig().training(clip_param=0.1)


def test_overrides_apply_to_their_module_only() -> None:
    made = (
        AlgoConfig()
        .multi_agent(policies={"p0": PolicySpec(config={"lr": 0.5, "clip_param": 0.7}), "p1": None})
        .rl_module(algorithm_config_overrides_per_module={"p0": AlgoConfig.overrides(lr=0.25)})
    )
    for each in (made, made.copy(copy_frozen=True)):
        special = each.get_config_for_module("p0")
        assert (special.lr, special.clip_param, special.is_frozen) == (0.25, 0.7, each.is_frozen)
        assert each.get_config_for_module("p1") is each
        assert each.lr == 5e-5


def test_a_frozen_config_computes_a_modules_config_once_and_a_copy_forgets_it() -> None:
    made = AlgoConfig().rl_module(algorithm_config_overrides_per_module={"default_policy": {"lr": 0.25}}).freeze()
    assert made.get_config_for_module("default_policy") is made.get_config_for_module("default_policy")
    changed = made.copy(copy_frozen=False)
    changed.algorithm_config_overrides_per_module["default_policy"] = {"lr": 0.125}
    assert changed.get_config_for_module("default_policy").lr == 0.125


def test_numbers_of_rows_and_steps_follow_from_one_another() -> None:
    made = LearnerGroupConfig().learners(num_learners=3).training(train_batch_size_per_learner=50)
    assert made.total_train_batch_size == 150
    assert made.total_minibatch_size is None
    assert made.copy().training(minibatch_size=7).total_minibatch_size == 7
    assert made.copy().training(minibatch_size_per_learner=7).total_minibatch_size == 21
    assert made.get_rollout_fragment_length() == 200
    made.env_runners(num_env_runners=2, num_envs_per_env_runner=8, rollout_fragment_length="auto")
    assert made.get_rollout_fragment_length() == 10
    assert LearnerGroupConfig().total_train_batch_size == 32


def test_without_a_spec_the_default_network_is_built_for_the_spaces() -> None:
    module = config().get_multi_rl_module_spec().build()
    assert isinstance(module["default_policy"], DefaultActorCritic)
    assert module["default_policy"].observation_space is OBS


def test_a_single_spec_serves_every_policy_in_copies() -> None:
    made = (
        config()
        .rl_module(rl_module_spec=RLModuleSpec(Plain), model_config={"width": 3})
        .multi_agent(policies=["a", "b"])
    )
    spec = made.get_multi_rl_module_spec()
    assert list(spec.rl_module_specs) == ["a", "b"] and made.is_multi_agent
    assert spec["a"] is not spec["b"]
    assert spec.build()["b"].width == 3
    assert made.rl_module_spec.model_config is None, "the user's own spec is left alone"


def test_a_multi_spec_keeps_its_class_and_settings_and_gains_missing_policies() -> None:
    class Multi(MultiRLModuleSpec().multi_rl_module_class):  # type: ignore[misc]
        pass

    given = MultiRLModuleSpec(
        multi_rl_module_class=Multi,
        model_config={"m": 1},
        rl_module_specs={"encoder": RLModuleSpec(Plain, model_config={"width": 9})},
    )
    made = config().rl_module(rl_module_spec=given)
    assert list(made.get_multi_rl_module_spec().rl_module_specs) == ["encoder"], "policies were left at their default"
    spec = made.multi_agent(policies=["p0"]).get_multi_rl_module_spec()
    built = spec.build()
    assert isinstance(built, Multi) and built.model_config == {"m": 1}
    assert list(built) == ["encoder", "p0"] == made.module_ids()
    assert built["encoder"].width == 9 and isinstance(built["p0"], DefaultActorCritic)


def test_a_spec_says_more_than_the_config_about_its_own_module() -> None:
    made = config().rl_module(
        model_config={"width": 3}, rl_module_spec=RLModuleSpec(Plain, "o", "a", model_config={"width": 4})
    )
    spec = made.get_multi_rl_module_spec(spaces={"default_policy": (OBS, ACTIONS)})["default_policy"]
    assert (spec.observation_space, spec.action_space, spec.model_config) == ("o", "a", {"width": 4})


def test_spaces_come_from_the_nearest_source() -> None:
    class Env:
        observation_space, action_space = spaces.Box(0, 1, (7,)), spaces.Discrete(7)

    class VectorEnv(Env):
        single_observation_space, single_action_space = spaces.Box(0, 1, (8,)), spaces.Discrete(8)

    made = config().multi_agent(policies={"p0": PolicySpec(action_space=spaces.Discrete(5)), "p1": None})

    def num_actions(**kwargs: Any) -> list[int]:
        return [int(spec.action_space.n) for spec in made.get_multi_rl_module_spec(**kwargs).rl_module_specs.values()]

    assert num_actions() == [5, 2]
    assert num_actions(env=Env()) == [5, 7]
    assert num_actions(env=VectorEnv()) == [5, 8]
    assert num_actions(env=Env(), spaces={"p0": (OBS, spaces.Discrete(3))}) == [3, 7]


def test_the_configs_own_environment_is_made_for_its_spaces_only_if_needed() -> None:
    named = LearnerGroupConfig().environment("CartPole-v1")
    assert named.get_multi_rl_module_spec()["default_policy"].action_space == spaces.Discrete(2)
    wrong = LearnerGroupConfig().environment("NoSuchEnv-v0")
    with pytest.raises(ConfigError, match="NoSuchEnv"):
        wrong.get_multi_rl_module_spec()
    wrong.rl_module(rl_module_spec=RLModuleSpec(Plain)).get_multi_rl_module_spec().build()


def test_for_inference_modules_of_learners_only_are_left_out() -> None:
    specs = {"p0": RLModuleSpec(DefaultActorCritic), "critic": RLModuleSpec(Plain, learner_only=True)}
    made = config().rl_module(rl_module_spec=MultiRLModuleSpec(rl_module_specs=specs))
    assert list(made.get_multi_rl_module_spec().build()) == ["p0", "critic"]
    light = made.get_multi_rl_module_spec(inference_only=True).build()
    assert list(light) == ["p0"] and not hasattr(light["p0"], "vf")


def test_a_spec_without_any_class_is_refused() -> None:
    class NoDefault(LearnerGroupConfig):
        def get_default_rl_module_spec(self) -> RLModuleSpec:
            return RLModuleSpec()

    with pytest.raises(ConfigError, match="'default_policy' has no module_class"):
        NoDefault().get_multi_rl_module_spec()


def test_a_shipped_instance_keeps_its_own_settings() -> None:
    made = config().rl_module(rl_module_spec=RLModuleSpec.from_module(Plain(5)), model_config={"width": 3})
    assert made.get_multi_rl_module_spec().build()["default_policy"].width == 5


def test_a_learner_is_built_with_a_frozen_copy() -> None:
    made = config()
    learner = made.build_learner()
    assert isinstance(learner, SomeLearner) and learner.built
    assert learner.config.is_frozen and learner.config is not made and not made.is_frozen
    assert list(learner.module_spec.rl_module_specs) == ["default_policy"]
    with pytest.raises(ConfigError, match="learner_class"):
        LearnerGroupConfig().build_learner()


def test_a_learner_group_is_built_with_the_spec_and_spaces_that_are_given() -> None:
    class Env:
        observation_space, action_space = OBS, spaces.Discrete(6)

    given = MultiRLModuleSpec(rl_module_specs={"p7": RLModuleSpec(DefaultActorCritic)})
    made = LearnerGroupConfig().training(learner_class=Learner).multi_agent(policies_to_train=["p7"])
    with made.build_learner_group(env=Env(), rl_module_spec=given) as group:
        assert group.get_weights()["p7"]["pi.0.bias"].shape == (6,)
    assert made.module_ids() == ["default_policy"], "the config itself is as before"


def test_its_repr_shows_what_differs_from_the_defaults() -> None:
    assert repr(AlgoConfig().training(lr=0.5)) == "AlgoConfig(lr=0.5)"
    assert "tensor" in repr(LearnerGroupConfig().learners(learner_config_dict={"x": torch.ones(2)}))


def test_settings_go_to_a_dict_and_back() -> None:
    made = AlgoConfig().training(clip_param=0.1, num_epochs=4)
    assert AlgoConfig().update_from_dict(made.to_dict()).to_dict() == made.to_dict()
    assert made.to_dict()["clip_param"] == 0.1
