"""Episodes and steps to record, for the tests of a run's record and of its page."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from rollout_helpers import make_call
from tinkerscript.record.entries import EpisodeDetail, RecordedEpisode, TokenUse, TrainedSequence
from tinkerscript.rollouts.call import Call, pack_logprobs


def said(
    parent: Call | None, prompt: list[int], sampled: list[int], question: str, answer: str, **extra: Any
) -> Call:
    """A call with its messages."""
    fields: dict[str, Any] = {
        "messages": json.dumps([{"role": "user", "content": question}]),
        "reply": json.dumps({"role": "assistant", "content": answer}),
        "created": 1000,
    }
    return make_call(parent, prompt, sampled, **fields | extra)


def episode(uuid: str, **fields: Any) -> RecordedEpisode:
    """An accepted training episode of step 1 with one call, unless `fields` say otherwise."""
    detail: dict[str, Any] = {"calls": [said(None, [1, 2], [3, 4, 5], f"ask {uuid}", f"reply {uuid}")]}
    detail |= fields.pop("detail", {})
    given: dict[str, Any] = {
        "uuid": uuid,
        "episode_type": "train",
        "step": 1,
        "group_id": "step-1/sample-0",
        "task": "sums",
        "sample": {"id": "s0", "input": "What is 1+1?", "target": "2"},
        "status": "accepted",
        "reward": 1.0,
        "attempt": 1,
        "client_uuid": "worker-1",
        "ended": 2000.0,
    }
    return RecordedEpisode(**given | fields, detail=EpisodeDetail(**detail))


def trained_sequence(number: int, sampled: int, **fields: Any) -> TrainedSequence:
    """A sequence whose `sampled` tokens all trained: the k-th has entropy k/4 and logprob -k."""
    given: dict[str, Any] = {
        "trainer_logprobs": pack_logprobs([-float(k) for k in range(sampled)]),
        "entropies": (np.arange(sampled) / 4).astype("<f2").tobytes(),
        "advantages": pack_logprobs([0.5]),
        "uses": bytes([TokenUse.TRAINED]),
    }
    return TrainedSequence(number=number, **given | fields)
