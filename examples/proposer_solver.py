"""Two policies that train in one run: a proposer picks the sums, and a solver answers them.

Both are the same model at the start. The proposer is paid for sums that carry, which are the hard ones; the
solver, which is the run's own policy, for right answers.

    tinkerscript train examples/proposer_solver.yaml
"""

import re
import zlib

import httpx
from openai import AsyncOpenAI

from tinkerscript.client import Episode, WorkflowOutput

HTTP = httpx.AsyncClient(timeout=120)


async def ask(episode: Episode, role: str, question: str) -> str:
    """What the model of a role replies; `policy` is the run's own."""
    model = episode.model(role)
    client = AsyncOpenAI(base_url=model.base_url, api_key=model.api_key, http_client=HTTP)
    reply = await client.chat.completions.create(
        model=model.name, messages=[{"role": "user", "content": question}], max_tokens=8
    )
    return (reply.choices[0].message.content or "").strip()


def is_held_out(a: int, b: int) -> bool:
    """Whether a+b is in the test split of arithmetic.py: then nobody may propose it."""
    low, high = sorted((a, b))
    return zlib.crc32(f"{low}+{high}".encode()) % 20 == 0


async def rollout(episode: Episode) -> WorkflowOutput:
    """One proposal and one answer. In an evaluation the solver answers the sample, as in `make demo`."""
    a, b = map(int, episode.payload["sample"]["id"].split("+"))
    picked = await ask(episode, "proposer", f"Pick a number to add to {a}.")
    allowed = bool(re.fullmatch(r"\d{1,2}", picked)) and not is_held_out(a, int(picked))
    carries = allowed and a % 10 + int(picked) % 10 >= 10
    if allowed and episode.episode_type == "train":
        b = int(picked)
    correct = await ask(episode, "policy", f"What is {a}+{b}?") == str(a + b)
    return WorkflowOutput(reward=float(correct), role_rewards={"proposer": float(carries)})
