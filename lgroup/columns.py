"""Names of batch columns, module ids and result keys. They are RLlib's, so that data and dashboards carry over."""

from __future__ import annotations

from typing import Final


class Columns:
    """Keys of a batch of one module. Axis 0 of every column is the row; axis 1, where there is one, is time."""

    OBS: Final = "obs"
    NEXT_OBS: Final = "new_obs"
    INFOS: Final = "infos"
    ACTIONS: Final = "actions"
    ACTIONS_FOR_ENV: Final = "actions_for_env"
    REWARDS: Final = "rewards"
    INTRINSIC_REWARDS: Final = "intrinsic_rewards"
    TERMINATEDS: Final = "terminateds"
    TRUNCATEDS: Final = "truncateds"

    EPS_ID: Final = "eps_id"
    AGENT_ID: Final = "agent_id"
    MODULE_ID: Final = "module_id"
    T: Final = "t"
    SEQ_LENS: Final = "seq_lens"
    LOSS_MASK: Final = "loss_mask"

    STATE_IN: Final = "state_in"
    STATE_OUT: Final = "state_out"
    NEXT_STATE_IN: Final = "next_state_in"
    NEXT_STATE_OUT: Final = "next_state_out"
    EMBEDDINGS: Final = "embeddings"

    ACTION_DIST: Final = "action_dist"
    ACTION_DIST_INPUTS: Final = "action_dist_inputs"
    ACTION_PROB: Final = "action_prob"
    ACTION_LOGP: Final = "action_logp"

    VF_PREDS: Final = "vf_preds"
    VALUES_BOOTSTRAPPED: Final = "values_bootstrapped"
    ADVANTAGES: Final = "advantages"
    VALUE_TARGETS: Final = "value_targets"
    RETURNS_TO_GO: Final = "returns_to_go"
    RETURNS_TO_GO_TARGETS: Final = "rtg_targets"

    WEIGHTS_SEQ_NO: Final = "weights_seq_no"


DEFAULT_MODULE_ID: Final = "default_policy"
DEFAULT_AGENT_ID: Final = "default_agent"
DEFAULT_OPTIMIZER: Final = "default_optimizer"
ALL_MODULES: Final = "__all_modules__"
WEIGHTS_SEQ_NO: Final = Columns.WEIGHTS_SEQ_NO

# Counters. "Lifetime" ones never go down; the others belong to one update.
NUM_ENV_STEPS_SAMPLED: Final = "num_env_steps_sampled"
NUM_ENV_STEPS_SAMPLED_LIFETIME: Final = "num_env_steps_sampled_lifetime"
NUM_ENV_STEPS_TRAINED: Final = "num_env_steps_trained"
NUM_ENV_STEPS_TRAINED_LIFETIME: Final = "num_env_steps_trained_lifetime"
NUM_MODULE_STEPS_TRAINED: Final = "num_module_steps_trained"
NUM_MODULE_STEPS_TRAINED_LIFETIME: Final = "num_module_steps_trained_lifetime"
MODULE_TRAIN_BATCH_SIZE_MEAN: Final = "module_train_batch_size_mean"
NUM_TRAINABLE_PARAMETERS: Final = "num_trainable_parameters"
NUM_NON_TRAINABLE_PARAMETERS: Final = "num_non_trainable_parameters"
DIFF_NUM_GRAD_UPDATES_VS_SAMPLER_POLICY: Final = "diff_num_grad_updates_vs_sampler_policy"

# Losses and what algorithms report beside them.
TOTAL_LOSS_KEY: Final = "total_loss"
POLICY_LOSS_KEY: Final = "policy_loss"
VF_LOSS_KEY: Final = "vf_loss"
ENTROPY_KEY: Final = "entropy"
LEARNING_RATE_KEY: Final = "learning_rate"

# Of episodes, as an env runner reports them.
EPISODE_RETURN_MEAN: Final = "episode_return_mean"
EPISODE_RETURN_MIN: Final = "episode_return_min"
EPISODE_RETURN_MAX: Final = "episode_return_max"
EPISODE_LEN_MEAN: Final = "episode_len_mean"
NUM_EPISODES: Final = "num_episodes"
NUM_EPISODES_LIFETIME: Final = "num_episodes_lifetime"
