"""A trainer whose sampler is a fake: registers episodes, answers samples, journals and acknowledges outcomes.

    python tests/chaos/trainer.py --run-dir DIR --link ADDRESS --episodes N --seed S

May be killed anywhere and started again: it goes on from its journal. Its log of samples is the oracle: for
each a nonce that no other sample has, and the exact ids that spell it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import re
import secrets
from pathlib import Path
from uuid import uuid4

from evidence import JOURNAL, ORACLE, Lines, read_lines

from tinkerscript.model_folder import TINY_MODEL
from tinkerscript.rollouts.call import pack_ids, pack_logprobs, unpack_ids
from tinkerscript.sampler import ProgressCallback, SampledSequence, SampleRequest, SampleResult
from tinkerscript.tokenizer import LightTokenizer
from tinkerscript.trainer_link.messages import EpisodeAccepted, NewEpisode, Outcome
from tinkerscript.trainer_link.trainer_end import TrainerLink

MARK = re.compile(r"\[(\S+) (\S+) turn (\d+)\]")
"""What a worker writes into its prompts: its name, the episode, the turn."""


class FakeSampler:
    """Answers with a fresh nonce, after a random delay."""

    def __init__(self, oracle: Lines, rng: random.Random, *, delay_s: float) -> None:
        self._oracle = oracle
        self._rng = rng
        self._delay_s = delay_s
        self._tokenizer = LightTokenizer(TINY_MODEL)
        self._stop = self._tokenizer.convert_tokens_to_ids("<|im_end|>")

    async def sample(self, request: SampleRequest, progress: ProgressCallback | None = None) -> SampleResult:
        nonce = secrets.token_hex(6)
        # Some spellings that the tokenizer itself would never choose: one token a character.
        spelled = [self._tokenizer.encode(char)[0] for char in nonce]
        ids = [*(self._tokenizer.encode(nonce) if self._rng.random() < 0.5 else spelled), self._stop]
        prompt = self._tokenizer.decode(unpack_ids(request.prompt).tolist())
        worker, episode, turn = MARK.findall(prompt)[-1]
        sample = secrets.token_hex(8)
        self._oracle.write(event="begin", sample=sample, worker=worker, episode=episode, turn=int(turn))
        try:
            await asyncio.sleep(self._rng.uniform(0.2, 1.8) * self._delay_s)
        except asyncio.CancelledError:
            self._oracle.write(event="cancelled", sample=sample)
            raise
        logprobs = [-self._rng.random() for _ in ids]
        self._oracle.write(
            event="end",
            sample=sample,
            nonce=nonce,
            prompt=request.prompt.hex(),
            sampled=pack_ids(ids).hex(),
            logprobs=pack_logprobs(logprobs).hex(),
        )
        sequence = SampledSequence(
            sampled=pack_ids(ids), logprobs=pack_logprobs(logprobs), stop_reason="stop"
        )
        return SampleResult(sequences=[sequence], policy_version=0, logprob_kind="processed")


def as_event(outcome: Outcome) -> dict[str, object]:
    """An outcome as a line of the journal."""
    if not isinstance(outcome, EpisodeAccepted):
        return {
            "event": "failed",
            "episode": outcome.episode_uuid,
            "pool": outcome.pool,
            "failures": outcome.failures,
        }
    calls = [
        {
            "call": call.call_id,
            "parent": call.parent_id,
            "new_prompt": call.new_prompt.hex(),
            "sampled": call.sampled.hex(),
            "logprobs": call.logprobs.hex(),
        }
        for call in outcome.calls
    ]
    return {
        "event": "ended",
        "episode": outcome.episode_uuid,
        "attempt": outcome.attempt,
        "client": outcome.client_uuid,
        "pool": outcome.pool,
        "reward": outcome.reward,
        "metadata": outcome.metadata,
        "calls": calls,
    }


async def train(options: argparse.Namespace) -> None:
    run_dir: Path = options.run_dir
    known = read_lines(run_dir / JOURNAL)
    journal = Lines(run_dir / JOURNAL)
    over = {line["episode"] for line in known if line["event"] in ("ended", "failed")}
    names = [f"e{number:05d}" for number in range(options.episodes)]
    rng = random.Random(secrets.randbits(32))
    sampler = FakeSampler(Lines(run_dir / ORACLE), rng, delay_s=options.delay_s)
    link = TrainerLink(options.link, trainer_id=uuid4().hex, model="fake", sampler=sampler.sample)
    async with link:
        # A name that is over already is registered again with the same content, which changes nothing.
        await link.register(
            [
                NewEpisode(
                    episode_uuid=name,
                    episode_type="train",
                    group_id=f"g{number // 8}",
                    payload=json.dumps({"name": name}).encode(),
                )
                for number, name in enumerate(names)
            ]
        )
        journal.write(event="registered", episodes=names)
        while True:
            if link.stop_requested.is_set():
                link.stop_requested.clear()
                journal.write(event="stopped")
            for outcome in await link.outcomes():
                if outcome.episode_uuid not in over:
                    over.add(outcome.episode_uuid)
                    journal.write(**as_event(outcome))
                await asyncio.sleep(rng.uniform(0, options.acknowledge_s))
                link.acknowledge([outcome.episode_uuid])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--link", required=True)
    parser.add_argument("--episodes", type=int, required=True)
    parser.add_argument("--delay-s", type=float, default=0.05, help="of a sample, on average")
    parser.add_argument(
        "--acknowledge-s", type=float, default=0.02, help="before an acknowledgement, at most"
    )
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    asyncio.run(train(options))


if __name__ == "__main__":
    main()
