"""Algorithms on top of learner groups: behaviour cloning, PPO and IMPALA, and the actor that samples for them."""

from lgroup.algorithms.bc import BCConfig, BCLearner
from lgroup.algorithms.env_runner import EnvRunner, Rollout, concatenated
from lgroup.algorithms.environments import make_vector_env, reward_threshold_of, spaces_of
from lgroup.algorithms.impala import IMPALAConfig, IMPALALearner
from lgroup.algorithms.ppo import PPOConfig, PPOLearner, ppo_rows
from lgroup.algorithms.returns import Returns, gae, standardise, vtrace

__all__ = [
    "BCConfig",
    "BCLearner",
    "EnvRunner",
    "IMPALAConfig",
    "IMPALALearner",
    "PPOConfig",
    "PPOLearner",
    "Returns",
    "Rollout",
    "concatenated",
    "gae",
    "make_vector_env",
    "ppo_rows",
    "reward_threshold_of",
    "spaces_of",
    "standardise",
    "vtrace",
]
