"""A learner's hooks in one process: their order, optimizers, and what a step makes of losses and gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lgroup.columns import DEFAULT_MODULE_ID
from lgroup.config import LearnerGroupConfig
from lgroup.data.plan import make_plan
from lgroup.errors import ConfigError
from lgroup.learner.host import LearnerHost, describe
from lgroup.learner.learner import Learner
from lgroup.modules import SHARED_STATE, MultiRLModule, MultiRLModuleSpec, RLModuleSpec

torch.set_num_threads(1)  # on these small tensors two threads mostly wait for each other


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = nn.Linear(2, 2), nn.Linear(2, 1)

    def forward(self, batch: Mapping[str, Any]) -> torch.Tensor:
        return self.head(self.encoder(batch["obs"]))  # type: ignore[no-any-return]


class Squares(Learner):
    def compute_loss_for_module(
        self, *, module_id: str, config: LearnerGroupConfig, batch: dict[str, Any], fwd_out: Any
    ) -> torch.Tensor:
        return (fwd_out - 1.0).square().mean()


class Shared(MultiRLModule):
    """Both modules use the first one's encoder."""

    def setup(self) -> None:
        super().setup()
        self["b"].encoder = self["a"].encoder


class Outside(MultiRLModule):
    """An encoder that belongs to no module."""

    def setup(self) -> None:
        super().setup()
        self.common = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))

    def _forward_train(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {m: self[m]({"obs": self.common(columns["obs"])}) for m, columns in batch.items()}


def config_of(learner_class: type[Learner] = Squares, spec: Any = None, **training: Any) -> LearnerGroupConfig:
    return (
        LearnerGroupConfig()
        .training(learner_class=learner_class, **training)
        .rl_module(rl_module_spec=spec or RLModuleSpec(module_class=Linear))
    )


def two(multi: type[MultiRLModule]) -> MultiRLModuleSpec:
    return MultiRLModuleSpec(
        multi_rl_module_class=multi, rl_module_specs={m: RLModuleSpec(module_class=Linear) for m in ("b", "a")}
    )


def hosted(config: LearnerGroupConfig) -> LearnerHost:
    """A group of one."""
    host = LearnerHost(config.learner_class, config, config.get_multi_rl_module_spec(), seed=3)
    host.join(1, 0, 1, 0, ())
    return host


def rows(count: int = 4) -> dict[str, Any]:
    return {"obs": np.random.default_rng(count).normal(size=(count, 2)).astype(np.float32)}


def update(host: LearnerHost, columns: dict[str, dict[str, Any]], seq: int = 1, **plan: Any) -> dict[str, Any]:
    counts = {module_id: len(own["obs"]) for module_id, own in columns.items()}
    own = make_plan(counts, world_size=1, **plan).ranks[0]
    return host.update(
        1,
        {
            "seq": seq,
            "timesteps": {"t": 5},
            "kwargs": {},
            "return_state": False,
            "plan": own.to_wire(with_gather=False),
            "columns": columns,
        },
    )


# Order of the hooks


class Recorder(Squares):
    def build(self) -> None:
        super().build()
        self.calls: list[str] = []

    def before_gradient_based_update(self, *, timesteps: dict[str, Any]) -> None:
        self.calls.append(f"before {timesteps['t']}")

    def compute_losses(self, **kwargs: Any) -> Any:
        self.calls.append("losses")
        return super().compute_losses(**kwargs)

    def compute_loss_for_module(self, **kwargs: Any) -> torch.Tensor:
        self.calls.append(f"loss {kwargs['module_id']} {len(kwargs['batch']['obs'])}")
        return super().compute_loss_for_module(**kwargs)

    def compute_gradients(self, loss_per_module: Any, **kwargs: Any) -> Any:
        self.calls.append("gradients")
        return super().compute_gradients(loss_per_module, **kwargs)

    def postprocess_gradients(self, gradients_dict: Any) -> Any:
        self.calls.append("postprocess")
        return super().postprocess_gradients(gradients_dict)

    def postprocess_gradients_for_module(self, **kwargs: Any) -> Any:
        self.calls.append(f"postprocess {kwargs['module_id']}")
        return super().postprocess_gradients_for_module(**kwargs)

    def apply_gradients(self, gradients_dict: Any) -> None:
        self.calls.append("apply")
        super().apply_gradients(gradients_dict)

    def after_gradient_based_update(self, *, timesteps: dict[str, Any]) -> None:
        self.calls.append(f"after {timesteps['t']}")


def test_the_hooks_are_called_in_order_for_each_minibatch_with_modules_sorted() -> None:
    host = hosted(config_of(Recorder, two(MultiRLModule)))
    assert update(host, {"b": rows(3), "a": rows(5)}, minibatch_size=3)["outcome"] == "applied"
    step = ["gradients", "postprocess", "postprocess a", "postprocess b", "apply"]
    assert host.learner.calls == [  # type: ignore[attr-defined]
        "before 5",
        *("losses", "loss a 3", "loss b 3", *step),
        *("losses", "loss a 2", *step),
        "after 5",
    ]


def test_modules_that_are_not_trained_stay_as_they_are() -> None:
    host = hosted(config_of(Squares, two(MultiRLModule)).multi_agent(policies_to_train=["a"]))
    before = host.digests()
    reply = update(host, {"a": rows(), "b": rows()})
    assert reply["outcome"] == "applied"
    assert {path[0] for path, *_ in reply["metrics"]} == {"a"}
    changed = {path for path, digest in host.digests().items() if before.get(path) != digest}
    assert changed and not any("_rl_modules.b" in path for path in changed)
    assert update(host, {"b": rows()}, seq=2)["outcome"] == "noop"


def test_an_update_of_the_same_number_draws_the_same_random_numbers() -> None:
    class Noisy(Squares):
        def after_gradient_based_update(self, *, timesteps: dict[str, Any]) -> None:
            self.noise = (float(torch.rand(())), float(np.random.rand()))

    host = hosted(config_of(Noisy))
    noise = []
    for seq in (1, 2, 1):
        update(host, {DEFAULT_MODULE_ID: rows()}, seq=seq)
        noise.append(host.learner.noise)  # type: ignore[attr-defined]
    assert noise[0] == noise[2] != noise[1]


def test_what_is_void_is_not_looked_at() -> None:
    host = hosted(config_of())
    assert (
        host.update(2, {})
        == host.change(0, b"")
        == host.set_state(2, {})
        == host.read(0, "x", {})
        == {"outcome": "void"}
    )


def test_after_an_exception_the_learner_has_left_its_group_until_it_joins_again() -> None:
    host = hosted(config_of())
    before = host.digests()
    bad = {DEFAULT_MODULE_ID: {"obs": np.zeros((2, 7), dtype=np.float32)}}
    reply = update(host, bad)
    assert (reply["outcome"], reply["error"]["type"]) == ("raised", "RuntimeError")
    assert "forward" in reply["error"]["traceback"]
    assert update(host, {DEFAULT_MODULE_ID: rows()}) == {"outcome": "void"}
    host.join(2, 0, 1, 0, ())
    assert host.digests() == before


def test_an_exception_that_cannot_say_what_it_is_is_described_all_the_same() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    assert describe(Mute())["message"] == "(its __str__ raised RuntimeError)"
    assert "Mute" in describe(Mute())["traceback"]


def test_a_learner_in_a_process_of_its_own_that_cannot_be_put_back_ends_it() -> None:
    class Stuck:
        def state_dict(self) -> dict[str, int]:
            return {"n": 1}

        def load_state_dict(self, state: dict[str, int]) -> None:
            raise OSError("cannot load")

    host = hosted(config_of())
    host.learner.stuck = Stuck()  # type: ignore[attr-defined]
    host._open_group = lambda *args: pytest.fail("not asked for")  # type: ignore[assignment]
    with pytest.raises(SystemExit, match=r"(?s)could not be put back after a failure: .*cannot load"):
        update(host, {DEFAULT_MODULE_ID: {"obs": np.zeros((2, 7), dtype=np.float32)}})


# Losses and gradients


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (torch.zeros(3), r"the loss of module 'default_policy' is \(3,\); it must be a tensor of one element"),
        (0.5, "the loss of module 'default_policy' is float"),
    ],
)
def test_a_loss_that_is_not_one_number_is_refused(loss: Any, words: str) -> None:
    class Odd(Learner):
        def compute_loss_for_module(self, **kwargs: Any) -> Any:
            return loss

    reply = update(hosted(config_of(Odd)), {DEFAULT_MODULE_ID: rows()})
    assert reply["outcome"] == "raised"
    with pytest.raises(TypeError, match=words):
        raise TypeError(reply["error"]["message"])


def test_a_learner_without_a_loss_says_what_to_define() -> None:
    reply = update(hosted(config_of(Learner)), {DEFAULT_MODULE_ID: rows()})
    assert reply["error"]["message"] == "Learner must define compute_loss_for_module()"


def test_steps_without_any_loss_and_losses_without_gradient_change_nothing() -> None:
    class Idle(Squares):
        def compute_losses(self, **kwargs: Any) -> Any:
            return {}

    class Constant(Squares):
        def compute_loss_for_module(self, **kwargs: Any) -> torch.Tensor:
            return torch.tensor(1.0)

    for learner_class in (Idle, Constant):
        host = hosted(config_of(learner_class))
        before = host.digests()
        assert update(host, {DEFAULT_MODULE_ID: rows()})["outcome"] == "applied"
        assert host.digests() == before


def test_a_nonfinite_gradient_is_undone_and_named() -> None:
    host = hosted(config_of())
    update(host, {DEFAULT_MODULE_ID: rows()})
    before = host.digests()
    bad = rows(6)
    bad["obs"][5] = np.nan
    reply = update(host, {DEFAULT_MODULE_ID: bad}, minibatch_size=2)
    assert reply["outcome"] == "nonfinite" and reply["parameter"].startswith("default_policy.")
    assert host.digests() == before
    assert update(host, {DEFAULT_MODULE_ID: rows()})["outcome"] == "applied"


def test_gradients_are_clipped_for_each_module_by_its_own_config() -> None:
    config = config_of(Squares, two(MultiRLModule), grad_clip=0.5).rl_module(
        algorithm_config_overrides_per_module={"b": LearnerGroupConfig.overrides(grad_clip=None)}
    )
    learner = config.reporting(log_gradients=True).build_learner()
    gradients = {p: torch.full_like(p, 10.0) for p in learner.module.parameters()}
    clipped = learner.postprocess_gradients(dict(gradients))
    norm = {m: float(torch.cat([clipped[p].flatten() for p in learner.module[m].parameters()]).norm()) for m in "ab"}
    assert norm["a"] == pytest.approx(0.5, abs=1e-4) and norm["b"] == pytest.approx(30.0)
    assert learner.metrics.peek(("a", "gradients_default_optimizer_global_norm")) == pytest.approx(30.0)


def test_the_mean_over_one_learner_is_the_number_itself() -> None:
    learner = config_of().build_learner()
    assert learner.group_mean(0.1) == 0.1
    assert learner.group_mean(torch.tensor([1.5, 2.0]), weight=3.0).tolist() == [1.5, 2.0]
    assert np.isnan(learner.group_mean(5.0, weight=0.0))


def test_the_weight_of_a_batch_is_its_rows_or_its_valid_steps() -> None:
    learner = config_of().build_learner()
    assert learner.loss_weight("m", {"obs": np.zeros((3, 2))}) == 3.0
    mask = torch.tensor([[True, False], [True, True], [False, False]])
    assert learner.loss_weight("m", {"obs": torch.zeros(3, 2), "loss_mask": mask}) == 3.0


def test_doubles_are_narrowed_only_where_the_network_is_single() -> None:
    class Seen(Squares):
        def compute_loss_for_module(self, **kwargs: Any) -> torch.Tensor:
            self.seen = {name: value.dtype for name, value in kwargs["batch"].items()}  # no state: dtypes are neither
            return super().compute_loss_for_module(**kwargs)

    class Wide(Linear):
        def __init__(self) -> None:
            super().__init__()
            self.double()

    for net, wanted in ((Linear, torch.float32), (Wide, torch.float64)):
        host = hosted(config_of(Seen, RLModuleSpec(module_class=net)))
        columns = {"obs": np.ones((2, 2)), "n": np.arange(2), "swapped": np.arange(2, dtype=">i4")}
        assert update(host, {DEFAULT_MODULE_ID: columns})["outcome"] == "applied"
        assert host.learner.seen == {"obs": wanted, "n": torch.int64, "swapped": torch.int32}  # type: ignore[attr-defined]


# Optimizers


def test_each_module_has_its_optimizer_and_a_shared_parameter_is_in_one_only() -> None:
    learner = config_of(Squares, two(Shared)).build_learner()
    a, b = learner.get_optimizer("a"), learner.get_optimizer("b")
    held = [[id(p) for group in optimizer.param_groups for p in group["params"]] for optimizer in (a, b)]
    assert not set(held[0]) & set(held[1])
    assert held[0] == [id(p) for p in learner.module["a"].parameters()]
    assert held[1] == [id(p) for p in learner.module["b"].head.parameters()]
    assert learner.get_optimizers_for_module("b") == [("default_optimizer", b)]
    assert learner.get_optimizers_for_module("nobody") == []
    with pytest.raises(KeyError, match=r"no optimizer 'c_default_optimizer'; there are .*'a_default_optimizer'"):
        learner.get_optimizer("c")


def test_parameters_and_buffers_outside_of_all_modules_are_trained_and_shared_too() -> None:
    host = hosted(config_of(Squares, two(Outside)))
    before = host.digests()
    update(host, {"b": rows()})
    changed = {path.rpartition("/")[2] for path, digest in host.digests().items() if before.get(path) != digest}
    assert {"common.0.weight", "common.1.running_mean"} <= changed
    assert host.learner.get_optimizer(SHARED_STATE).state
    assert frozenset("ab") in host.learner.flat_buffer().buffer_owners()


class WithTemperature(Squares):
    """An optimizer for each part of the network, and one for a parameter that is in no module."""

    def configure_optimizers_for_module(self, module_id: str, config: Any = None) -> None:
        net = self.module[module_id]
        for name, part in (("encoder", net.encoder), ("head", net.head)):
            parameters = list(part.parameters())
            self.register_optimizer(
                module_id=module_id,
                optimizer_name=name,
                optimizer=torch.optim.SGD(parameters, lr=1.0),
                params=parameters,
                lr_or_lr_schedule={"encoder": 0.1, "head": 0.0}[name],
            )
        self.log_alpha = nn.Parameter(torch.zeros(()))
        self.register_optimizer(
            module_id=module_id,
            optimizer_name="alpha",
            optimizer=torch.optim.Adam([self.log_alpha], lr=0.01),
            params=[self.log_alpha],
        )

    def compute_loss_for_module(self, **kwargs: Any) -> torch.Tensor:
        return super().compute_loss_for_module(**kwargs) + self.log_alpha.exp()


def test_several_optimizers_and_parameters_outside_of_modules_step_undo_and_travel() -> None:
    host, other = hosted(config_of(WithTemperature)), hosted(config_of(WithTemperature))
    learner: Any = host.learner
    assert [name for name, _ in learner.get_optimizers_for_module()] == ["encoder", "head", "alpha"]
    before = host.digests()
    assert update(host, {DEFAULT_MODULE_ID: rows()})["outcome"] == "applied"
    after = host.digests()
    changed = {path for path in after if before.get(path) != after[path]}
    assert any("encoder" in path for path in changed) and not any("head.weight" in path for path in changed)
    assert learner.log_alpha.item() == pytest.approx(-0.01)
    assert "/free_parameters/free_0" in changed
    bad = {DEFAULT_MODULE_ID: {"obs": np.full((2, 2), np.nan, dtype=np.float32)}}
    assert update(host, bad)["outcome"] == "nonfinite"
    assert host.digests() == after
    other.set_state(1, learner.get_state())
    assert other.digests() == after
    assert "parameter free_0" in learner.get_state("tensors")["tensors"]


def test_optimizers_that_cannot_be_kept_in_step_are_refused() -> None:
    learner = config_of().build_learner()
    own = list(learner.module.parameters())
    with pytest.raises(ValueError, match="module 'default_policy' already has an optimizer 'default_optimizer'"):
        learner.register_optimizer(optimizer=torch.optim.SGD(own, lr=1.0), params=own)
    with pytest.raises(ValueError, match="steps 4 parameters, and params are 1 that are not the same"):
        learner.register_optimizer(optimizer_name="second", optimizer=torch.optim.SGD(own, lr=1.0), params=own[:1])
    foreign = [nn.Parameter(torch.zeros(1, device="meta"))]
    with pytest.raises(ConfigError, match="module 'default_policy' has a parameter on meta; the learner is on cpu"):
        learner.register_optimizer(optimizer_name="third", optimizer=torch.optim.SGD(foreign, lr=1.0), params=foreign)


def test_sparse_gradients_are_refused_when_the_learner_is_built() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10, 2, sparse=True)

    with pytest.raises(ConfigError, match=r"Embedding 'default_policy\.table' has sparse gradients.*set sparse=False"):
        config_of(Squares, RLModuleSpec(module_class=Words)).build_learner()


def test_a_learner_that_is_not_built_says_so() -> None:
    learner = Squares(config=config_of())
    with pytest.raises(RuntimeError, match=r"no module yet: call build\(\) first"):
        learner.module  # noqa: B018
