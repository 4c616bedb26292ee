"""The ledger of a run that never ran, of any size: for the page's tests, its bench and its pictures.

Everything follows from the seed. The tokens are those of the tiny model.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from run_ledger import LedgerWriter
from tinkerscript.ledger.rows import (
    EvaluationRow,
    FindingRow,
    NoteRow,
    Row,
    StepRow,
    TokensRow,
    TrainedRow,
    TranscriptRow,
    Use,
)
from tinkerscript.ledger.tokens import TokenUse, TrainedSequence, packed_sequences
from tinkerscript.model_folder import model_folder
from tinkerscript.protocol import Failure
from tinkerscript.rollouts.call import Call, pack_ids, pack_logprobs
from tinkerscript.rollouts.merge import merge_calls
from tinkerscript.tokenizer import LightTokenizer
from written_run import Written, metric_rows

TOOLS = [{"type": "function", "function": {"name": "calculator", "description": "Evaluates an expression."}}]
WRITTEN_AT_ONCE = 20_000
"""Rows."""

LATE = Failure(
    kind="task_error",
    message="the shop's sandbox did not answer within 30 s",
    attempt=1,
    client_uuid="worker-2",
)


@dataclass(frozen=True)
class _Ended:
    """An episode that is made, and its number."""

    number: int
    episode: Written

    @property
    def has_tokens(self) -> bool:
        return not self.episode.emptied and self.episode.reward is not None


@dataclass
class MadeRun:
    """What to make. Episodes in all: `steps` * `groups` * `group_size`, and those of the evaluations."""

    folder: Path
    steps: int = 30
    groups: int = 8
    group_size: int = 8
    seed: int = 1
    evaluation_every: int = 10
    evaluation_samples: int = 40
    tokens_every: int = 1
    """Episodes of training that have their calls and tokens: one in so many. The others were emptied."""

    state: str = "finished"
    texts: list[str] = field(default_factory=list[str])
    """What models and clients say in some places, instead of what is made up."""

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._numbers = np.random.default_rng(self.seed)
        self._tokenizer = LightTokenizer(model_folder("tiny"))
        self._rows: list[Row] = []
        self._number = self._version = 0
        self._ended = 0.0
        self._now = time.time() - 60.0 * self.steps
        self._gone = self.calls(0, 1.0)

    def write(self) -> Path:
        """Write the ledger and the config; returns the folder."""
        config = {"task": {"name": "agents.py@shop"}, "training": {"steps": self.steps}}
        with LedgerWriter(self.folder, **config) as writer:
            self._writer = writer
            ends = self._now + 60.0 * self.steps
            about = {"step": self.steps, "steps": self.steps, "began": self._now, "last_step": ends}
            writer.status(state=self.state, failure="", **about)
            again = "worker 1 ended with code -9 and was started again (1 of 10)"
            self._rows.append(NoteRow(time=self._now, text="watch the run at http://127.0.0.1:10086"))
            self._rows.append(NoteRow(time=self._now + 720.0, text=again))
            self._evaluate("before", 0)
            for step in range(1, self.steps + 1):
                self._now += 60.0
                self._step(step)
                if step % self.evaluation_every == 0 and step < self.steps:
                    self._evaluate(f"step-{step}", step)
                if len(self._rows) >= WRITTEN_AT_ONCE:
                    self._put()
            self._evaluate("after", self.steps)
            self._put()
        return self.folder

    def _put(self) -> None:
        self._writer.put(*self._rows)
        self._rows = []

    def _skill(self, step: int) -> float:
        return 0.25 + 0.65 * (1 - math.exp(-2.5 * step / self.steps))

    def _step(self, step: int) -> None:
        self._version = step - 1
        groups = [
            [self._episode(step, (step * self.groups + group) % 500) for _ in range(self.group_size)]
            for group in range(self.groups)
        ]
        rewards = [each.episode.reward for group in groups for each in group]
        own = [reward for reward in rewards if reward is not None]
        for each in groups[0]:
            if each.has_tokens and each.episode.reward is not None:
                transcript = self.transcript(each.number, each.episode.reward)
                row = TranscriptRow(episode=each.number, attempt=each.episode.attempt, transcript=transcript)
                self._rows.append(row)
        trained = 0
        for group in groups:
            trained += self._train(step, group, trained)
        mean, failed = sum(own) / len(own), len(rewards) - len(own)
        self._rows += metric_rows(step, self._metrics(step, mean, failed, len(groups) - trained))
        counts: dict[str, Any] = {
            "accepted": len(own),
            "failed": failed,
            "trained": trained * self.group_size,
        }
        row = StepRow(step=step, time=self._now, policy_version=step, reward=mean, max_lag=step % 2, **counts)
        self._rows.append(row)
        if step % 7 == 3:
            about: dict[str, Any] = {
                "kind": "warning",
                "name": "no_stop_token",
                "episode": groups[0][0].episode.uuid,
            }
            self._rows.append(FindingRow(step=step, count=2, **about))

    def _train(self, step: int, group: Sequence[_Ended], place: int) -> bool:
        """What became of a group. Returns whether it has a gradient, and with it the `place`."""
        rewards = [each.episode.reward for each in group if each.episode.reward is not None]
        has_gradient = len(set(rewards)) > 1
        for each in group:
            reward = each.episode.reward
            if reward is None:
                about: dict[str, Any] = {"outcome": Use.LEFT_OUT, "reason": each.episode.failures[-1].message}
                self._rows.append(TrainedRow(episode=each.number, step=step, **about))
                continue
            advantage = reward - sum(rewards) / len(rewards)
            outcome, at = (Use.TRAINED, place) if has_gradient else (Use.SAME_REWARD, -1)
            about: dict[str, Any] = {"outcome": outcome, "place": at, "advantage": advantage}
            self._rows.append(TrainedRow(episode=each.number, step=step, **about))
            if each.has_tokens:
                self._rows.append(self._tokens(step, each, advantage if has_gradient else None))
        return has_gradient

    def _metrics(self, step: int, mean: float, failed: int, equal: int) -> dict[str, float]:
        noise = self._numbers.normal(0, 0.02, 8).tolist()
        late = step / self.steps
        counts = {
            **{"policy_version": step, "episodes/accepted": self.groups * self.group_size - failed},
            **{"episodes/failed": failed, "episodes/retried": step % 5 == 0, "episodes/stale": 0},
            **({"failure/task_error": failed} if failed else {}),
            **{"groups/trained": self.groups - equal, "groups/same_reward": equal, "groups/dropped": 0},
            **{"train/sequences": (self.groups - equal) * self.group_size, "alignment/truncated": step % 3},
            "alignment/calls": 2 * self.groups * self.group_size,
            "alignment/tokens_trained": round(12_000 + 4_000 * noise[0]),
        }
        return {
            **{name: float(count) for name, count in counts.items()},
            **{"reward/mean": mean, "reward/deviation": 0.4 - 0.2 * late + noise[0]},
            "train/entropy": 1.2 * math.exp(-2 * late) + abs(noise[1]),
            "train/loss": -0.05 * math.exp(-late) + noise[2],
            **{"train/grad_norm": 0.6 + noise[3] * 4, "train/clip_fraction": 0.04 + abs(noise[4])},
            "train/learning_rate": 3e-4 * (1 - 0.9 * late),
            **{"response_tokens/mean": 30 + 20 * late + 60 * noise[5], "turns/mean": 2.0 + noise[6] * 3},
            "alignment/max_abs_dlogp": 1e-5 * (1 + abs(noise[7]) * 20),
            "alignment/mean_abs_dlogp": 4e-7 * (1 + abs(noise[7]) * 20),
            **{"time/rollout_s": 40 + 60 * noise[1], "time/train_s": 15 + 20 * noise[2]},
            **{"time/publish_s": 1.2 + noise[3], "time/sample_s": 24 + 40 * noise[1]},
            **{"time/wait_stale_s": 3 + 20 * abs(noise[4]), "episode/cart/items": 3 + late + noise[0]},
            **{"episode/score/solved": mean, "episode/score/polite": 0.6 + 0.3 * late + noise[7]},
        }

    def _evaluate(self, label: str, step: int) -> None:
        self._version = step
        ended = [self._episode(step, 1000 + n, label=label) for n in range(self.evaluation_samples)]
        self._rows += [TrainedRow(episode=each.number, step=step, outcome=Use.EVALUATED) for each in ended]
        rewards = [each.episode.reward for each in ended if each.episode.reward is not None]
        score, failed = sum(rewards) / len(rewards), len(ended) - len(rewards)
        self._rows += metric_rows(step, {"eval/score": score, "eval/failed": float(failed)})
        about: dict[str, Any] = {"label": label, "step": step, "time": self._now, "policy_version": step}
        self._rows.append(EvaluationRow(**about, score=score, accepted=len(rewards), failed=failed))

    # Episodes

    def _episode(self, step: int, number: int, *, label: str = "") -> _Ended:
        roll = self._random.random()
        fails, retried = roll < 0.02, 0.02 <= roll < 0.04
        reward = None if fails else float(self._random.random() < self._skill(step) - 0.2 * (number % 3 - 1))
        emptied = not label and self._random.randrange(self.tokens_every) != 0
        calls = self._gone if emptied else self.calls(number, reward, forks=roll > 0.97)
        self._ended = max(self._now, self._ended + 0.4)
        explained = {"answer": str(number * 3), "explanation": self._text("The order's total must match.")}
        episode = Written(
            uuid=f"{self._random.getrandbits(128):032x}",
            step=step,
            label=label,
            group_id=f"eval-{label}/sample-{number}" if label else f"step-{step}/sample-{number}",
            task="agents.py@shop",
            sample={
                "id": f"order-{number}",
                "input": f"A customer buys {number} pens at 3 each. What is due?",
                "target": str(number * 3),
            },
            reward=reward,
            is_success=None if reward is None else bool(reward),
            attempt=2 if retried else 1,
            client=f"worker-{self._random.randrange(4)}",
            queued_s=None if fails else 0.5 * (number % 64),
            policy_version=self._version,
            ended=self._ended,
            calls={1: calls[:1]} if fails else {1: calls[:1], 2: calls} if retried else {1: calls},
            failures=[LATE] if fails or retried else [],
            metadata={"scores": {"solved": reward}, "explanations": {"solved": explained}},
            log_metrics={"score/solved": reward or 0.0, "model_calls": float(len(calls))},
            emptied=emptied,
        )
        self._number += 1
        self._rows += episode.rows(self._number)
        return _Ended(self._number, episode)

    def transcript(self, number: int, reward: float) -> bytes:
        """As the bridge packs what Inspect recorded of the episode."""
        at = datetime.fromtimestamp(self._now, UTC)
        spans = [("solvers", "s1", None), ("agent", "s2", "s1"), ("scorers", "s3", None)]
        names = {"s1": "solvers", "s2": "react", "s3": "scorers"}
        begun = {
            id: {"event": "span_begin", "id": id, "type": kind, "name": names[id], "parent_id": parent}
            for kind, id, parent in spans
        }
        arguments = {"expression": f"{number} * 3"}
        call = {"id": "t0", "type": "function", "function": self._text("calculator"), "arguments": arguments}
        question: dict[str, Any] = {"role": "user", "content": self._text("What is due?")}
        replies: list[dict[str, Any]] = [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "assistant", "content": self._text(f"That is {number * 3} in all.")},
        ]
        result = {"role": "tool", "content": str(number * 3), "tool_call_id": "t0"}
        models = [
            {"event": "model", "span_id": "s2", "model": "tinkerbridge/policy", "working_time": 1.25}
            | {
                "input": [],
                "input_refs": [[0, 1 + 2 * turn]],
                "tools": [],
                "tool_choice": "auto",
                "config": {},
            }
            | {"output": {"model": "policy", "choices": [{"message": reply, "stop_reason": "stop"}]}}
            for turn, reply in enumerate(replies)
        ]
        score = {"value": reward, "answer": str(number * 3)}
        score |= {"explanation": self._text("The order's total must match.")}
        events: list[dict[str, Any]] = [
            *(begun["s1"], begun["s2"], models[0]),
            {"event": "tool", "span_id": "s2", "id": "t0", "function": self._text("calculator")}
            | {"arguments": arguments, "result": self._text(str(number * 3)), "type": "function"},
            {"event": "store", "span_id": "s2"}
            | {"changes": [{"op": "add", "path": "/total", "value": number * 3}]},
            {"event": "sandbox", "span_id": "s2", "action": "exec", "cmd": self._text("cat order.json")}
            | {"result": 0, "output": self._text('{"pens": 3}')},
            models[1],
            *({"event": "span_end", "id": id} for id in ("s2", "s1")),
            begun["s3"],
            {
                "event": "score",
                "span_id": "s3",
                "scorer": "solved",
                "score": score,
                "target": str(number * 3),
            },
            {"event": "span_end", "id": "s3"},
        ]
        for place, event in enumerate(events):
            time_of = (at + timedelta(seconds=0.5 * place)).isoformat()
            event |= {"uuid": f"event-{place}", "timestamp": time_of, "working_start": 0.5 * place}
        messages = [question, replies[0], result]
        sample = {"events": events, "events_data": {"messages": messages}, "store": {"total": number * 3}}
        return zstandard.ZstdCompressor().compress(json.dumps(sample).encode())

    def _text(self, made_up: str) -> str:
        return self._random.choice(self.texts) if self.texts else made_up

    def calls(self, number: int, reward: float | None, *, forks: bool = False, turns: int = 2) -> list[Call]:
        """An agent that uses a tool; `forks`: it rewrites its history before the last turn."""
        calls: list[Call] = []
        question = f"A customer buys {number} pens at 3 each. What is due?"
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": "You keep a shop. Use the calculator."},
            {"role": "user", "content": self._text(question)},
        ]
        for turn in range(turns):
            last = turn == turns - 1
            reply: dict[str, Any] = {"role": "assistant", "content": ""}
            if last:
                answer = number * 3 if reward else number * 3 + 7
                reply["content"] = self._text(f"That is {answer} in all.")
                reply["reasoning_content"] = self._text("The tool's result is the total. No rebate applies.")
            else:
                arguments = json.dumps({"expression": f"{number} * 3 + {turn}"})
                called = {"name": self._text("calculator"), "arguments": arguments}
                reply["tool_calls"] = [{"id": f"t{turn}", "type": "function", "function": called}]
            restarts = forks and last and turn > 0
            parent = calls[-1] if calls and not restarts else None
            calls.append(self._call(parent, messages, reply, restarts))
            said = self._text(str(number * 3 + turn))
            messages = [{"role": "tool", "tool_call_id": f"t{turn}", "content": said}]
        return calls

    def _call(
        self, parent: Call | None, messages: list[dict[str, Any]], reply: dict[str, Any], restarts: bool
    ) -> Call:
        prompt = "".join(f"<|im_start|>{m['role']}\n{m.get('content') or ''}<|im_end|>\n" for m in messages)
        said = (reply.get("content") or json.dumps(reply.get("tool_calls"))) + "<|im_end|>"
        sampled = self._tokenizer.encode(said)
        logprobs = -np.abs(self._numbers.exponential(0.4, len(sampled)))
        return Call(
            call_id=f"{self._random.getrandbits(64):016x}",
            parent_id=parent.call_id if parent else None,
            new_prompt=pack_ids(self._tokenizer.encode(f"{prompt}<|im_start|>assistant\n")),
            sampled=pack_ids(sampled),
            logprobs=pack_logprobs(logprobs.astype(np.float32)),
            stop_reason="length" if self._random.random() < 0.01 else "stop",
            policy_version=max(0, self._version - self._random.randrange(2)),
            messages=json.dumps(messages),
            reply=json.dumps(reply),
            tools=json.dumps([] if parent else TOOLS),
            fork_reason="the assistant's last message is not the one that was sampled" if restarts else None,
            created=int(self._now),
        )

    def _tokens(self, step: int, ended: _Ended, advantage: float | None) -> TokensRow:
        """What the step computed for each token. `advantage`: None if it had no gradient."""
        found: list[TrainedSequence] = []
        calls = ended.episode.calls[ended.episode.attempt]
        merged = merge_calls(calls, episode_uuid=ended.episode.uuid, trains_constrained=False)
        for number, rollout in enumerate(merged):
            if advantage is None:
                left_out = bytes([TokenUse.LEFT_OUT])
                found.append(TrainedSequence(number=number, uses=left_out, reason=Use.SAME_REWARD))
                continue
            sampler = rollout.logprobs[rollout.sampled]
            uses = np.full(len(sampler), TokenUse.TRAINED, np.uint8)
            uses[2:5] = TokenUse.CONSTRAINED
            trainer = sampler + self._numbers.normal(0, 2e-6, len(sampler))
            found.append(
                TrainedSequence(
                    number=number,
                    trainer_logprobs=pack_logprobs(trainer.astype(np.float32)),
                    entropies=self._numbers.exponential(0.5, len(sampler)).astype("<f2").tobytes(),
                    advantages=pack_logprobs([advantage]),
                    uses=uses.tobytes(),
                )
            )
        return TokensRow(episode=ended.number, step=step, sequences=packed_sequences(found))

    # What is larger than a run has

    def long_episode(self, *, turns: int, tokens: int) -> str:
        """Add one episode with so many turns and at least as many tokens; returns its uuid."""
        each = -(-tokens // turns)
        calls: list[Call] = []
        words = "The quick brown fox counts pens, 12 at a time, and writes every sum down. "
        for turn in range(turns):
            sampled = self._tokenizer.encode(words * (each // 12 + 2))[:each]
            messages = [{"role": "user", "content": f"Go on, part {turn}."}]
            reply = {"role": "assistant", "content": self._tokenizer.decode(sampled)}
            calls.append(self._call(calls[-1] if calls else None, messages, reply, restarts=False))
        self._number += 1
        uuid = f"{self._random.getrandbits(128):032x}"
        episode = Written(
            uuid=uuid,
            step=self.steps,
            group_id=f"step-{self.steps}/long",
            client="worker-0",
            ended=time.time(),
            calls={1: calls},
        )
        row = TrainedRow(episode=self._number, step=self.steps, outcome=Use.TRAINED, advantage=0.5)
        tokens_row = self._tokens(self.steps, _Ended(self._number, episode), 0.5)
        with LedgerWriter(self.folder) as writer:
            writer.put(*episode.rows(self._number), row, tokens_row)
        return uuid
