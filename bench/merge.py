"""Merging calls into training sequences: time and memory, against what the tokens cost unmerged.

    python bench/merge.py [--tokens N] [--rounds N]

Synthetic episodes, all of about `--tokens` tokens of conversation: one agent, one with sub-agents, one whose
client re-renders a fifth of its turns with other tokens (drift), one whose template strips thinking at every
turn. `whole prompts` gives the merger calls without parents, as a server's replies have them. The reference,
in the same run, is the concatenation of every call's prompt and sample, what training without merging
would hold. `alignment_report` is what the report costs in training. Also the peak of allocated memory at
50 to 400 turns of equal length. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import tracemalloc
from collections.abc import Callable
from itertools import count
from typing import Any

import msgspec
import numpy as np

from tinkerscript.config import TrainingConfig
from tinkerscript.rollouts.advantages import RolloutGroup
from tinkerscript.rollouts.alignment import AlignmentReport
from tinkerscript.rollouts.call import Call, full_prompts, pack_ids, pack_logprobs
from tinkerscript.rollouts.merge import merge_calls
from tinkerscript.rollouts.rollout import EpisodeRollouts, Rollout
from tinkerscript.train.learner import AlignmentCheck, TrainedModel

VOCABULARY = 150_000
PREAMBLE = 500
"""Tokens of the system prompt and tools."""

NAMES = count()


class Talk:
    """Makes the calls of one conversation as the gateway would record them."""

    def __init__(self, random: np.random.Generator, preamble: bytes) -> None:
        self.random = random
        self.history = preamble
        """Prompt and sampled ids so far."""

        self.tail: Call | None = None
        self.new = preamble

    def ids(self, number: int) -> bytes:
        return pack_ids(self.random.integers(0, VOCABULARY, number))

    def call(self, sampled: int) -> Call:
        made = Call(
            call_id=f"c{next(NAMES)}",
            parent_id=self.tail.call_id if self.tail else None,
            new_prompt=self.new,
            sampled=self.ids(sampled),
            logprobs=pack_logprobs(-self.random.exponential(0.5, sampled)),
            stop_reason="stop",
            policy_version=0,
        )
        self.history += made.sampled
        self.tail = made
        self.new = b""
        return made

    def observe(self, tokens: int) -> None:
        """A tool's result, or the user's next message."""
        fresh = self.ids(tokens)
        self.history += fresh
        self.new += fresh

    def rewrite(self, history: bytes) -> None:
        """The next prompt extends no call: its history is another one."""
        self.history = self.new = history
        self.tail = None


def agent(turns: int, tokens: int, random: np.random.Generator) -> list[Call]:
    talk = Talk(random, pack_ids(random.integers(0, VOCABULARY, PREAMBLE)))
    each = (tokens - PREAMBLE) // turns
    calls = [talk.call(each // 2)]
    for _ in range(turns - 1):
        talk.observe(each - each // 2)
        calls.append(talk.call(each // 2))
    return calls


def sub_agents(turns: int, tokens: int, random: np.random.Generator) -> list[Call]:
    """After every tenth turn a sub-agent of 3 calls, which shares the preamble alone."""
    preamble = pack_ids(random.integers(0, VOCABULARY, PREAMBLE))
    talk = Talk(random, preamble)
    each = (tokens - PREAMBLE) // turns
    calls: list[Call] = []
    for turn in range(turns):
        calls.append(talk.call(each // 2))
        talk.observe(each - each // 2)
        if turn % 10 == 9:
            helper = Talk(random, preamble)
            for _ in range(3):
                helper.observe(each // 2)
                calls.append(helper.call(each // 2))
    return calls


def drift(turns: int, tokens: int, random: np.random.Generator) -> list[Call]:
    """At one turn of five one token of the last sample comes back as another."""
    talk = Talk(random, pack_ids(random.integers(0, VOCABULARY, PREAMBLE)))
    each = (tokens - PREAMBLE) // turns
    calls: list[Call] = []
    for turn in range(turns):
        calls.append(talk.call(each // 2))
        if turn % 5 == 4:
            changed = talk.ids(1)
            place = len(talk.history) - 4 * (each // 4)
            talk.rewrite(talk.history[:place] + changed + talk.history[place + 4 :])
        talk.observe(each - each // 2)
    return calls


def think_strip(turns: int, tokens: int, random: np.random.Generator) -> list[Call]:
    """At every turn the first half of the last sample is left out of the history."""
    talk = Talk(random, pack_ids(random.integers(0, VOCABULARY, PREAMBLE)))
    each = (tokens - PREAMBLE) // turns
    calls: list[Call] = []
    for _ in range(turns):
        calls.append(talk.call(each // 2))
        end, half = len(talk.history), 4 * (each // 2)
        talk.rewrite(talk.history[: end - half] + talk.history[end - half // 8 * 4 :])
        talk.observe(each - each // 2)
    return calls


EPISODES: dict[str, tuple[int, Callable[[int, int, np.random.Generator], list[Call]]]] = {
    "20 turns": (20, agent),
    "20 turns, sub-agents": (20, sub_agents),
    "200 turns": (200, agent),
    "200 turns, sub-agents": (200, sub_agents),
    "200 turns, 20% drift": (200, drift),
    "200 turns, think-strip": (200, think_strip),
}


def unmerged(calls: list[Call]) -> bytes:
    """Every call as a sequence of its own, in one buffer: what merging saves."""
    prompts = full_prompts(calls)
    return b"".join(part for call in calls for part in (prompts[call.call_id], call.sampled))


def whole_prompts(calls: list[Call]) -> list[Call]:
    prompts = full_prompts(calls)
    return [msgspec.structs.replace(call, parent_id=None, new_prompt=prompts[call.call_id]) for call in calls]


def milliseconds(work: Callable[[], object], rounds: int) -> float:
    took: list[float] = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        took.append(1e3 * (time.perf_counter() - began))
    return round(statistics.median(took), 2)


def peak_bytes(work: Callable[[], object]) -> int:
    tracemalloc.start()
    work()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def measure(calls: list[Call], rounds: int) -> dict[str, Any]:
    rollouts = merge_calls(calls, episode_uuid="bench")
    whole = whole_prompts(calls)
    merged = sum(len(rollout.tokens) for rollout in rollouts)
    total = len(unmerged(calls)) // 4
    assert sum(int(r.sampled.sum()) for r in rollouts) == sum(len(c.sampled_ids) for c in calls)
    return {
        "unmerged_tokens": total,
        "merged_tokens": merged,
        "times_fewer": round(total / merged, 1),
        "times_fewer_last_only": round(total / into_the_last_only(calls), 1),
        "sequences": len(rollouts),
        "merge_ms": milliseconds(lambda: merge_calls(calls, episode_uuid="bench"), rounds),
        "merge_whole_prompts_ms": milliseconds(lambda: merge_calls(whole, episode_uuid="bench"), rounds),
        "unmerged_concatenation_ms": milliseconds(lambda: unmerged(calls), rounds),
        "alignment_report_ms": milliseconds(whole_report(rollouts, calls), rounds),
    }


def into_the_last_only(calls: list[Call]) -> int:
    """Tokens if a call were merged with the newest sequence or none: what looking at all of them saves."""
    prompts, last, closed = full_prompts(calls), b"", 0
    for call in calls:
        prompt = prompts[call.call_id]
        if not prompt.startswith(last):
            closed += len(last)
        last = prompt + call.sampled
    return (closed + len(last)) // 4


def whole_report(rollouts: tuple[Rollout, ...], calls: list[Call]) -> Callable[[], object]:
    """All that the alignment report does about an episode in training, the comparison included."""
    group = RolloutGroup("g", (EpisodeRollouts("bench", 1.0, rollouts, tuple(calls)),))
    model = TrainedModel(VOCABULARY, stop_ids={0, 1}, tokenizer="bench")
    check = AlignmentCheck(AlignmentReport(), TrainingConfig(), model)

    def work() -> None:
        sound = check.sound(group)
        items = list(sound.weighted())
        assert len(items) == len(rollouts)
        check.compare(items, [rollout.logprobs for rollout in rollouts], lags=None, step=1)

    return work


def memory(turns: int, tokens_a_turn: int) -> dict[str, Any]:
    """Peak memory of a merge beside that of the unmerged concatenation, of turns of equal length."""
    calls = agent(turns, PREAMBLE + turns * tokens_a_turn, np.random.default_rng(1))
    (rollout,) = merge_calls(calls, episode_uuid="bench")
    peak = peak_bytes(lambda: merge_calls(calls, episode_uuid="bench"))
    return {
        "turns": turns,
        "tokens": len(rollout.tokens),
        "peak_bytes_a_token": round(peak / len(rollout.tokens), 1),
        "unmerged_bytes_a_token": round(peak_bytes(lambda: unmerged(calls)) / len(rollout.tokens), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=50_000)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    results: dict[str, Any] = {}
    for name, (turns, make) in EPISODES.items():
        calls = make(turns, options.tokens, np.random.default_rng(7))
        results[name] = measure(calls, options.rounds)
    results["memory"] = [memory(turns, 250) for turns in (50, 100, 200, 400)]
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
