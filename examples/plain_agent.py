"""A rollout as an ordinary program: claim an episode, call the model, report a reward.

Run it next to a training run: `python examples/plain_agent.py`. TINKERSCRIPT_SERVER_URL names another server.
"""

from contextlib import suppress

from openai import OpenAI

from tinkerscript.client import Episode, tinkerjet_remote
from tinkerscript.errors import ClaimLostError


def answer(episode: Episode, question: str) -> str:
    """The model's answer. The episode's URL and key are valid for this claim only."""
    with OpenAI(base_url=episode.openai_base_url, api_key=episode.openai_api_key) as client:
        reply = client.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": question}]
        )
    return reply.choices[0].message.content or ""


def main() -> None:
    """Contribute episodes until interrupted."""
    while True:
        try:
            with tinkerjet_remote.begin_episode() as episode:
                sample = episode.payload["sample"]
                text = answer(episode, sample["input"])
                reward = 1.0 if text.strip() == str(sample["target"]) else 0.0
                tinkerjet_remote.end_episode(episode, reward, metadata={"answer": text})
                print(f"{episode.episode_type} {sample['input']!r} -> {text!r}: reward {reward}")
        except ClaimLostError as lost:
            print(f"lost the claim of an episode: {lost}")


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()
