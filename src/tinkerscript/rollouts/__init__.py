"""From recorded calls to training data: `Call` -> `merge_calls` -> `Rollout` -> `RolloutGroup` ->
`WeightedRollout`.
"""

from tinkerscript.rollouts.advantages import (
    AdvantageRule,
    RolloutBatch,
    RolloutGroup,
    TrainingBatch,
    WeightedRollout,
    at_end,
    by_call,
    discounted,
    evenly,
)
from tinkerscript.rollouts.call import (
    Call,
    FloatArray,
    IntArray,
    LogprobKind,
    Prompts,
    StopReason,
    TokenConstraint,
    full_prompts,
    pack_ids,
    pack_logprobs,
    unpack_ids,
    unpack_logprobs,
    vocabulary_fingerprint,
)
from tinkerscript.rollouts.merge import merge_calls
from tinkerscript.rollouts.rollout import BoolArray, EpisodeRollouts, Rollout, Segment

__all__ = [
    "AdvantageRule",
    "BoolArray",
    "Call",
    "EpisodeRollouts",
    "FloatArray",
    "IntArray",
    "LogprobKind",
    "Prompts",
    "Rollout",
    "RolloutBatch",
    "RolloutGroup",
    "Segment",
    "StopReason",
    "TokenConstraint",
    "TrainingBatch",
    "WeightedRollout",
    "at_end",
    "by_call",
    "discounted",
    "evenly",
    "full_prompts",
    "merge_calls",
    "pack_ids",
    "pack_logprobs",
    "unpack_ids",
    "unpack_logprobs",
    "vocabulary_fingerprint",
]
