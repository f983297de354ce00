from __future__ import annotations

import pickle

import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import distributions as td

from lgroup.errors import ConfigError
from lgroup.modules import Categorical, Deterministic, DiagGaussian, MultiCategorical, distribution_class_for
from lgroup.modules.distributions import Distribution

shapes = st.lists(st.integers(1, 4), min_size=0, max_size=2)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@settings(deadline=None, max_examples=40)
@given(lead=shapes, n=st.integers(1, 5))
def test_categorical_agrees_with_torch(lead: list[int], n: int) -> None:
    a, b = 3 * randn(*lead, n), 3 * randn(*lead, n).flip(-1)
    ours, other = Categorical.from_logits(a), Categorical.from_logits(b)
    theirs = td.Categorical(logits=a)
    value = ours.sample()
    assert value.shape == tuple(lead) and value.dtype == torch.int64
    torch.testing.assert_close(ours.logp(value), theirs.log_prob(value))
    torch.testing.assert_close(ours.entropy(), theirs.entropy())
    torch.testing.assert_close(ours.kl(other), td.kl_divergence(theirs, td.Categorical(logits=b)))
    torch.testing.assert_close(Categorical(probs=ours.probs).log_probs, ours.log_probs)


@settings(deadline=None, max_examples=40)
@given(lead=shapes, n=st.integers(1, 5))
def test_diag_gaussian_agrees_with_torch(lead: list[int], n: int) -> None:
    a, b = randn(*lead, 2 * n), randn(*lead, 2 * n).flip(-1)
    ours, other = DiagGaussian.from_logits(a), DiagGaussian.from_logits(b)
    theirs, their_other = (td.Independent(td.Normal(d.loc, d.scale), 1) for d in (ours, other))
    value = ours.sample()
    assert value.shape == (*lead, n)
    torch.testing.assert_close(ours.logp(value), theirs.log_prob(value))
    torch.testing.assert_close(ours.entropy(), theirs.entropy())
    torch.testing.assert_close(ours.kl(other), td.kl_divergence(theirs, their_other))


@settings(deadline=None, max_examples=40)
@given(lead=shapes, input_lens=st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_multi_categorical_is_the_sum_of_its_parts(lead: list[int], input_lens: list[int]) -> None:
    logits = randn(*lead, sum(input_lens))
    ours = MultiCategorical.from_logits(logits, input_lens=input_lens)
    parts = [Categorical(part) for part in logits.split(input_lens, dim=-1)]
    value = ours.sample()
    assert value.shape == (*lead, len(input_lens))
    torch.testing.assert_close(ours.logp(value), sum(p.logp(value[..., i]) for i, p in enumerate(parts)))
    torch.testing.assert_close(ours.entropy(), sum(p.entropy() for p in parts))
    torch.testing.assert_close(ours.kl(ours), torch.zeros(lead))


def test_samples_follow_the_probabilities() -> None:
    torch.manual_seed(0)
    drawn = Categorical(probs=torch.tensor([[0.1, 0.9], [0.5, 0.5]])).sample(sample_shape=(20_000,))
    torch.testing.assert_close(drawn.float().mean(0), torch.tensor([0.9, 0.5]), atol=0.02, rtol=0)
    gaussian = DiagGaussian(torch.tensor([1.0, -2.0]), torch.tensor([0.5, 2.0])).sample(sample_shape=(20_000,))
    torch.testing.assert_close(gaussian.std(0), torch.tensor([0.5, 2.0]), atol=0.05, rtol=0)


def test_a_forbidden_action_is_never_drawn_and_keeps_all_gradients_finite() -> None:
    logits = torch.tensor([[0.0, float("-inf"), 1.0]], requires_grad=True)
    dist = Categorical.from_logits(logits)
    assert not (dist.sample(sample_shape=(500,)) == 1).any()
    (dist.entropy() + dist.kl(Categorical.from_logits(logits.detach())) + dist.logp(torch.tensor([2]))).sum().backward()
    assert logits.grad is not None and logits.grad.isfinite().all()


def test_gradients_flow_through_rsample_but_not_through_sample() -> None:
    logits = torch.zeros(3, 4, requires_grad=True)
    assert DiagGaussian.from_logits(logits).rsample().requires_grad
    assert not DiagGaussian.from_logits(logits).sample().requires_grad
    for discrete in (Categorical.from_logits(logits), MultiCategorical.from_logits(logits, input_lens=[2, 2])):
        with pytest.raises(TypeError, match="discrete"):
            discrete.rsample()


def test_the_deterministic_form_gives_the_most_likely_action() -> None:
    assert Categorical(torch.tensor([[0.0, 5.0]])).to_deterministic().sample().tolist() == [1]
    assert DiagGaussian(torch.tensor([2.0]), torch.tensor([9.0])).to_deterministic().sample().tolist() == [2.0]
    multi = MultiCategorical.from_logits(torch.tensor([[0.0, 1.0, 3.0, 2.0]]), input_lens=[2, 2]).to_deterministic()
    assert multi.sample().tolist() == [[1, 0]]
    assert multi.sample(sample_shape=(3,)).shape == (3, 1, 2)
    assert multi.to_deterministic() is multi


@pytest.mark.parametrize("method", ["logp", "entropy", "kl"])
def test_a_deterministic_distribution_has_no_density(method: str) -> None:
    dist = Deterministic.from_logits(torch.zeros(2))
    with pytest.raises(TypeError):
        getattr(dist, method)(*([] if method == "entropy" else [dist]))


@pytest.mark.parametrize(
    ("space", "expected", "num_inputs"),
    [
        (spaces.Discrete(4), Categorical, 4),
        (spaces.Box(-1, 1, (3,)), DiagGaussian, 6),
        (spaces.MultiDiscrete([2, 5]), MultiCategorical, 7),
    ],
)
def test_each_action_space_has_its_distribution(
    space: spaces.Space, expected: type[Distribution], num_inputs: int
) -> None:
    chosen = distribution_class_for(space)
    assert issubclass(chosen, expected)
    assert chosen.required_input_dim(space) == num_inputs
    actions = chosen.from_logits(torch.zeros(5, num_inputs)).sample().numpy()
    assert actions.shape == (5, *space.shape)
    assert all(space.contains(action.astype(space.dtype)) or space.dtype.kind == "f" for action in actions)


@pytest.mark.parametrize("space", [spaces.Text(5), spaces.Dict({"a": spaces.Discrete(2)}), spaces.Box(0, 9, (2,), int)])
def test_other_action_spaces_are_refused(space: spaces.Space) -> None:
    with pytest.raises(ConfigError, match="action_space"):
        distribution_class_for(space)


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="either logits or probs"):
        Categorical()
    with pytest.raises(ValueError, match="input_lens"):
        MultiCategorical.from_logits(torch.zeros(1, 3), input_lens=[2])


def test_a_partial_class_can_be_told_apart_and_used_by_its_instances() -> None:
    partial = MultiCategorical.get_partial_dist_cls(input_lens=[1, 2])
    assert partial.__name__ == "MultiCategoricalWithInput_Lens"
    made = partial.from_logits(torch.zeros(4, 3))
    assert pickle.loads(pickle.dumps(made)).sample().shape == (4, 2)
