"""The oracle: what a trainer received of an episode against what the scripted model logged.

Nothing here uses the session or the merge's own bookkeeping: every logged sequence is looked up, ids and log
probabilities, in the calls and in the merged training sequences.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from scripted_model import Logged

from tinkerscript.model_folder import TINY_MODEL
from tinkerscript.rollouts.alignment import AlignmentReport, find_errors, find_warnings
from tinkerscript.rollouts.call import Call, full_prompts
from tinkerscript.rollouts.merge import merge_calls
from tinkerscript.rollouts.rollout import EpisodeRollouts, Rollout
from tinkerscript.tokenizer import LightTokenizer

TOKENIZER = LightTokenizer(TINY_MODEL)
STOP_IDS = [TOKENIZER.encode(stop)[0] for stop in ("<|im_end|>", "<|endoftext|>")]


def check_exact(calls: Sequence[Call], log: Sequence[Logged], *, sequences: int) -> None:
    """Every sampled token is recorded once, with its log probability, after the prompt it was sampled from.

    `sequences` is how many training sequences there must be: 1 for a conversation that nobody edited.
    """
    prompts = full_prompts(calls)
    recorded = [Logged(prompts[call.call_id], call.sampled, call.logprobs) for call in calls]
    assert Counter(recorded) == Counter(log)
    rollouts = merge_calls(calls, episode_uuid="e")
    assert len(rollouts) == sequences, [call.fork_reason for call in calls]
    roots = [call.fork_reason for call in calls if call.parent_id is None]
    assert len(roots) == sequences, roots
    assert sequences > 1 or roots == [None]
    assert all(bool(call.matched_by) == bool(call.parent_id) for call in calls)
    trained = sum(int(rollout.sampled.sum()) for rollout in rollouts)
    assert trained == sum(len(entry.sampled) // 4 for entry in log)
    places = [place for entry in log for place in _places(entry, rollouts)]
    assert len(places) >= len(log)
    assert len(set(places)) == len(log), "a sampled sequence is in no training sequence, or in two"
    _check_clean(calls, rollouts)


def _places(entry: Logged, rollouts: Sequence[Rollout]) -> list[tuple[int, int]]:
    """Where a logged sequence trains: (training sequence, position). Empty if nowhere."""
    start, length = len(entry.prompt) // 4, len(entry.sampled) // 4
    found: list[tuple[int, int]] = []
    for number, rollout in enumerate(rollouts):
        end = start + length
        tokens = np.asarray(rollout.tokens[:end], dtype="<i4").tobytes()
        logprobs = np.asarray(rollout.logprobs[start:end], dtype="<f4").tobytes()
        if tokens == entry.prompt + entry.sampled and logprobs == entry.logprobs:
            assert rollout.sampled[start:end].all()
            found.append((number, start))
    return found


def _check_clean(calls: Sequence[Call], rollouts: tuple[Rollout, ...]) -> None:
    """The alignment report has no error and no warning."""
    report = AlignmentReport()
    report.add_episode(EpisodeRollouts("e", 1.0, rollouts, tuple(calls)))
    for rollout in rollouts:
        report.add_errors(find_errors(rollout, vocabulary=TOKENIZER.vocab_size, prompts=full_prompts(calls)))
        report.add_warnings(find_warnings(rollout, stop_ids=STOP_IDS, tokenizer=TOKENIZER.fingerprint))
    assert not report.whole.errors, dict(report.whole.errors)
    assert not report.whole.warnings, dict(report.whole.warnings)
