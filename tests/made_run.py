"""The record of a run that never ran, of any size: for the page's tests, its bench and its pictures.

Everything follows from the seed. The tokens are those of the tiny model.
"""

from __future__ import annotations

import json
import math
import random
import sqlite3
import time
from contextlib import closing
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from tinkerscript.config import RunConfig, dump_config
from tinkerscript.model_folder import model_folder
from tinkerscript.record.entries import (
    EpisodeDetail,
    RecordedEpisode,
    TokenUse,
    TrainedEpisode,
    TrainedSequence,
)
from tinkerscript.record.schema import RECORD_FILE
from tinkerscript.record.writer import RecordWriter
from tinkerscript.rollouts.call import Call, pack_ids, pack_logprobs
from tinkerscript.rollouts.merge import merge_calls
from tinkerscript.tokenizer import LightTokenizer

TOOLS = [{"type": "function", "function": {"name": "calculator", "description": "Evaluates an expression."}}]
WRITES_AHEAD = 4000
"""Entries that are given to the writer before it has written them."""


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
    """Episodes whose calls are recorded: one in so many."""

    state: str = "finished"
    texts: list[str] = field(default_factory=list[str])
    """What models and clients say in some places, instead of what is made up."""

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._numbers = np.random.default_rng(self.seed)
        self._tokenizer = LightTokenizer(model_folder("tiny"))
        self._given = self._version = 0
        self._ended = 0.0
        self._now = time.time() - 60.0 * self.steps

    def write(self) -> Path:
        """Write the record and the config; returns the folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        config = RunConfig.model_validate(
            {"task": {"name": "agents.py@shop"}, "training": {"steps": self.steps}}
        )
        (self.folder / "config.yaml").write_text(dump_config(config), encoding="utf-8")
        with RecordWriter(self.folder / RECORD_FILE) as writer:
            self._writer = writer
            writer.status(
                state=self.state,
                failure="",
                method="grpo",
                name=self.folder.name,
                model="tiny",
                tasks=["agents.py@shop"],
                recording="all",
                config=config.model_dump(mode="json"),
                step=self.steps,
                steps=self.steps,
                began=self._now,
                last_step=self._now + 60.0 * self.steps,
            )
            writer.note("watch the run at http://127.0.0.1:10086")
            writer.note("worker 1 ended with code -9 and was started again (1 of 10)")
            self._evaluate("before", 0)
            for step in range(1, self.steps + 1):
                self._now += 60.0
                self._step(step)
                if step % self.evaluation_every == 0 and step < self.steps:
                    self._evaluate(f"step-{step}", step)
            self._evaluate("after", self.steps)
            assert writer.flush(600)
            assert not writer.dropped, writer.failure
        self._spread_notes()
        return self.folder

    def _spread_notes(self) -> None:
        """The writer takes the time of day: put the notes where they would be in the run."""
        began = self._now - 60.0 * self.steps
        with closing(sqlite3.connect(self.folder / RECORD_FILE)) as database, database:
            database.execute("UPDATE notes SET time = ? + (number - 1) * 720", (began,))

    def _skill(self, step: int) -> float:
        return 0.25 + 0.65 * (1 - math.exp(-2.5 * step / self.steps))

    def _pace(self, entries: int = 1) -> None:
        self._given += entries
        if self._given >= WRITES_AHEAD:
            self._given = 0
            assert self._writer.flush(600)

    def _step(self, step: int) -> None:
        trained: list[TrainedEpisode] = []
        rewards: list[float] = []
        failed = equal = 0
        self._version = step - 1
        for group in range(self.groups):
            number = (step * self.groups + group) % 500
            made = [self._episode(step, number) for _ in range(self.group_size)]
            own = [episode.reward for episode, _ in made if episode.reward is not None]
            failed += self.group_size - len(own)
            rewards += own
            equal += len(set(own)) == 1
            for episode, sequences in made:
                with_tokens = bool(episode.detail.calls or episode.detail.failed_calls)
                self._writer.episode(episode, with_tokens=with_tokens)
                if sequences and group == 0:
                    self._writer.transcript(episode.uuid, episode.attempt, self.transcript(number, episode))
                self._pace()
                if episode.reward is not None:
                    trained.append(self._trained(episode, own, sequences))
        self._writer.trained(step, trained)
        mean = sum(rewards) / len(rewards)
        metrics = self._metrics(step, mean, failed, equal)
        self._writer.metrics(step, metrics)
        self._writer.step(
            step,
            policy_version=step,
            reward=mean,
            accepted=len(rewards),
            failed=failed,
            trained=sum(each.outcome == "trained" for each in trained),
            max_lag=step % 2,
        )
        if step % 7 == 3:
            uuid = trained[0].uuid
            self._writer.finding(
                step=step, kind="warning", name="no_stop_token", detail="", episode=uuid, count=2
            )
        self._pace(3)

    def _metrics(self, step: int, mean: float, failed: int, equal: int) -> dict[str, float]:
        noise = self._numbers.normal(0, 0.02, 8).tolist()
        late = step / self.steps
        return {
            "reward/mean": mean,
            "reward/deviation": 0.4 - 0.2 * late + noise[0],
            "policy_version": float(step),
            "episodes/accepted": float(self.groups * self.group_size - failed),
            "episodes/failed": float(failed),
            "episodes/retried": float(step % 5 == 0),
            "episodes/stale": 0.0,
            **({"failure/task_error": float(failed)} if failed else {}),
            "groups/trained": float(self.groups - equal),
            "groups/same_reward": float(equal),
            "groups/dropped": 0.0,
            "train/entropy": 1.2 * math.exp(-2 * late) + abs(noise[1]),
            "train/loss": -0.05 * math.exp(-late) + noise[2],
            "train/grad_norm": 0.6 + noise[3] * 4,
            "train/clip_fraction": 0.04 + abs(noise[4]),
            "train/learning_rate": 3e-4 * (1 - 0.9 * late),
            "train/sequences": float((self.groups - equal) * self.group_size),
            "response_tokens/mean": 30 + 20 * late + 60 * noise[5],
            "turns/mean": 2.0 + noise[6] * 3,
            "alignment/max_abs_dlogp": 1e-5 * (1 + abs(noise[7]) * 20),
            "alignment/mean_abs_dlogp": 4e-7 * (1 + abs(noise[7]) * 20),
            "alignment/calls": float(2 * self.groups * self.group_size),
            "alignment/truncated": float(step % 3),
            "alignment/tokens_trained": float(round(12_000 + 4_000 * noise[0])),
            "time/rollout_s": 40 + 60 * noise[1],
            "time/train_s": 15 + 20 * noise[2],
            "time/publish_s": 1.2 + noise[3],
            "episode/score/solved": mean,
            "episode/score/polite": 0.6 + 0.3 * late + noise[7],
            "episode/cart/items": 3 + late + noise[0],
        }

    def _evaluate(self, label: str, step: int) -> None:
        rewards: list[float] = []
        self._version = step
        for number in range(self.evaluation_samples):
            episode, _ = self._episode(step, 1000 + number, label=label)
            self._writer.episode(episode)
            self._pace()
            if episode.reward is not None:
                rewards.append(episode.reward)
        score = sum(rewards) / len(rewards)
        self._writer.metrics(
            step, {"eval/score": score, "eval/failed": float(self.evaluation_samples - len(rewards))}
        )
        self._writer.evaluation(
            label=label,
            step=step,
            policy_version=step,
            score=score,
            accepted=len(rewards),
            failed=self.evaluation_samples - len(rewards),
        )

    # Episodes

    def _episode(
        self, step: int, number: int, *, label: str = ""
    ) -> tuple[RecordedEpisode, list[TrainedSequence]]:
        roll = self._random.random()
        fails = roll < 0.02
        reward = None if fails else float(self._random.random() < self._skill(step) - 0.2 * (number % 3 - 1))
        with_tokens = bool(label) or self._random.randrange(self.tokens_every) == 0
        calls = self.calls(number, reward, forks=roll > 0.97) if with_tokens else []
        failure: dict[str, Any] = {
            "kind": "task_error",
            "message": "the shop's sandbox did not answer within 30 s",
            "attempt": 1,
            "client_uuid": "worker-2",
        }
        retried = 0.02 <= roll < 0.04
        self._ended = max(self._now, self._ended + 0.4)
        detail = EpisodeDetail(
            calls=[] if fails else calls,
            failed_calls={1: calls[:1]} if fails or retried else {},
            failures=[failure] if fails or retried else [],
            metadata={}
            if fails
            else {
                "scores": {"solved": reward},
                "explanations": {
                    "solved": {
                        "answer": str(number * 3),
                        "explanation": self._text("The order's total must match."),
                    }
                },
            },
            log_metrics={}
            if fails
            else {"score/solved": reward or 0.0, "model_calls": float(len(calls) or 2)},
        )
        episode = RecordedEpisode(
            uuid=f"{self._random.getrandbits(128):032x}",
            episode_type="eval" if label else "train",
            step=step,
            label=label,
            group_id=f"eval-{label}/sample-{number}" if label else f"step-{step}/sample-{number}",
            task="agents.py@shop",
            sample={
                "id": f"order-{number}",
                "input": f"A customer buys {number} pens at 3 each. What is due?",
                "target": str(number * 3),
            },
            status="failed" if fails else "accepted",
            reward=reward,
            is_success=None if reward is None else bool(reward),
            attempt=2 if retried else 1,
            client_uuid=f"worker-{self._random.randrange(4)}",
            queued_s=None if fails else 0.5 * (number % 64),
            ended=self._ended,
            detail=detail,
        )
        return episode, self._sequences(episode, reward) if with_tokens and not label and not fails else []

    def transcript(self, number: int, episode: RecordedEpisode) -> bytes:
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
            {
                "event": "model",
                "span_id": "s2",
                "model": "tinkerbridge/policy",
                "input": [],
                "input_refs": [[0, 1 + 2 * turn]],
                "tools": [],
                "tool_choice": "auto",
                "config": {},
                "output": {"model": "policy", "choices": [{"message": reply, "stop_reason": "stop"}]},
                "working_time": 1.25,
            }
            for turn, reply in enumerate(replies)
        ]
        score = {"value": episode.reward or 0.0, "answer": str(number * 3)}
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
                reply |= {
                    "content": self._text(f"That is {answer} in all."),
                    "reasoning_content": self._text("The tool's result is the total. No rebate applies."),
                }
            else:
                arguments = json.dumps({"expression": f"{number} * 3 + {turn}"})
                reply["tool_calls"] = [
                    {
                        "id": f"t{turn}",
                        "type": "function",
                        "function": {"name": self._text("calculator"), "arguments": arguments},
                    }
                ]
            restarts = forks and last and turn > 0
            calls.append(
                self._call(None if restarts else (calls[-1] if calls else None), messages, reply, restarts)
            )
            messages = [
                {"role": "tool", "tool_call_id": f"t{turn}", "content": self._text(str(number * 3 + turn))}
            ]
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

    def _sequences(self, episode: RecordedEpisode, reward: float | None) -> list[TrainedSequence]:
        del reward
        found: list[TrainedSequence] = []
        rollouts = merge_calls(episode.detail.calls, episode_uuid=episode.uuid, trains_constrained=False)
        for number, rollout in enumerate(rollouts):
            sampler = rollout.logprobs[rollout.sampled]
            uses = np.full(len(sampler), TokenUse.TRAINED, np.uint8)
            uses[2:5] = TokenUse.CONSTRAINED
            found.append(
                TrainedSequence(
                    number=number,
                    trainer_logprobs=pack_logprobs(
                        (sampler + self._numbers.normal(0, 2e-6, len(sampler))).astype(np.float32)
                    ),
                    entropies=self._numbers.exponential(0.5, len(sampler)).astype("<f2").tobytes(),
                    advantages=b"",
                    uses=uses.tobytes(),
                )
            )
        return found

    def _trained(
        self, episode: RecordedEpisode, rewards: list[float], sequences: list[TrainedSequence]
    ) -> TrainedEpisode:
        assert episode.reward is not None
        advantage = episode.reward - sum(rewards) / len(rewards)
        data = np.array([advantage], "<f4").tobytes()
        equal = len(set(rewards)) == 1
        fields = [
            TrainedSequence(
                number=each.number,
                trainer_logprobs=b"" if equal else each.trainer_logprobs,
                entropies=b"" if equal else each.entropies,
                advantages=b"" if equal else data,
                uses=bytes([TokenUse.LEFT_OUT]) if equal else each.uses,
                reason="same_reward" if equal else "",
            )
            for each in sequences
        ]
        return TrainedEpisode(
            uuid=episode.uuid,
            outcome="same_reward" if equal else "trained",
            advantage=advantage,
            sequences=fields,
        )

    # What is larger than a run has

    def long_episode(self, *, turns: int, tokens: int) -> str:
        """Add one episode with so many turns and at least as many tokens; returns its uuid."""
        each = -(-tokens // turns)
        calls: list[Call] = []
        words = "The quick brown fox counts pens, 12 at a time, and writes every sum down. "
        with RecordWriter(self.folder / RECORD_FILE) as writer:
            for turn in range(turns):
                said = self._tokenizer.encode(words * (each // 12 + 2))[:each]
                text = self._tokenizer.decode(said)
                messages = [{"role": "user", "content": f"Go on, part {turn}."}]
                reply = {"role": "assistant", "content": text}
                call = self._call(calls[-1] if calls else None, messages, reply, restarts=False)
                calls.append(call)
            uuid = f"{self._random.getrandbits(128):032x}"
            episode = RecordedEpisode(
                uuid=uuid,
                episode_type="train",
                step=self.steps,
                group_id=f"step-{self.steps}/long",
                status="accepted",
                reward=1.0,
                attempt=1,
                client_uuid="worker-0",
                ended=time.time(),
                detail=EpisodeDetail(calls=calls),
            )
            writer.episode(episode)
            writer.trained(self.steps, [self._trained(episode, [0.0, 1.0], self._sequences(episode, 1.0))])
            assert writer.flush(60)
        return uuid
