"""verl's batch (github.com/volcengine/verl, `DataProto`): prompts padded on the left, responses on the right.

verl computes advantages from the scores of rows with the same `uid`, so an episode must be one row.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from tinkerscript.errors import ConversionError
from tinkerscript.rollouts.advantages import RolloutBatch
from tinkerscript.rollouts.convert.traits import only_sequence, reward_at_end

CARRIES = frozenset({"constrained", "several_calls", "token_rewards"})


def to_verl(
    batch: RolloutBatch,
    *,
    pad_token_id: int = 0,
    prompt_length: int | None = None,
    response_length: int | None = None,
    allow: Collection[str] = (),
) -> dict[str, Any]:
    """Convert a batch of B episodes for `DataProto.from_single_dict`; P and R are the given lengths, or those
    of the longest.

    Tensors: prompts int64 [B, P], left-padded; responses, response_mask int64 and rollout_log_probs,
    rm_scores float32 [B, R], right-padded; input_ids, attention_mask, position_ids int64 [B, P + R]. `uid` is
    an array of objects [B]: each row's group. `rm_scores` has the episode's reward at the last token with
    loss, or each token's share. Raises ConversionError, also for a prompt or response longer than its length,
    and ModuleNotFoundError without torch.
    """
    import torch  # noqa: PLC0415 (numpy is enough for the rest of the package)

    rows = [(group.group_id, episode) for group in batch.groups for episode in group.episodes]
    if not rows:
        raise ConversionError("the batch has no episodes")
    rollouts = [only_sequence(episode, "verl's batch", CARRIES, allow) for _, episode in rows]
    width_p = _width("prompt", [r.prompt_length for r in rollouts], prompt_length)
    width_r = _width("response", [len(r.response_tokens) for r in rollouts], response_length)
    shape_r = (len(rows), width_r)
    prompts = np.full((len(rows), width_p), pad_token_id, dtype=np.int64)
    responses = np.full(shape_r, pad_token_id, dtype=np.int64)
    mask, attention = np.zeros(shape_r, np.int64), np.zeros((len(rows), width_p + width_r), np.int64)
    logprobs, scores = np.zeros(shape_r, np.float32), np.zeros(shape_r, np.float32)
    for row, (_, episode) in enumerate(rows):
        rollout = rollouts[row]
        size = len(rollout.response_tokens)
        prompts[row, width_p - rollout.prompt_length :] = rollout.prompt_tokens
        responses[row, :size] = rollout.response_tokens
        mask[row, :size] = rollout.response_loss_mask
        logprobs[row, :size] = rollout.response_logprobs
        scores[row, :size] = reward_at_end(episode, rollout)
        attention[row, width_p - rollout.prompt_length : width_p + size] = 1
    arrays = {
        "prompts": prompts,
        "responses": responses,
        "response_mask": mask,
        "rollout_log_probs": logprobs,
        "rm_scores": scores,
        "input_ids": np.concatenate([prompts, responses], axis=1),
        "attention_mask": attention,
        "position_ids": np.maximum(attention.cumsum(axis=1) - 1, 0),
    }
    tensors: dict[str, Any] = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return tensors | {"uid": np.array([group_id for group_id, _ in rows], dtype=object)}


def _width(what: str, lengths: list[int], wanted: int | None) -> int:
    if wanted is not None and max(lengths) > wanted:
        raise ConversionError(
            f"a {what} has {max(lengths)} tokens, more than {what}_length={wanted}; "
            "truncating it would lose tokens"
        )
    return max(lengths) if wanted is None else wanted
