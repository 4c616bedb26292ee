"""The indexes over a run's episodes: answered requests, counts."""

from __future__ import annotations

from dataclasses import replace

from tinkerscript.server.episodes.indexes import ClaimRequests, Queues
from tinkerscript.server.episodes.record import EpisodeRecord, State


def episode(name: str, state: State = "registered", pool: str = "", **claims: str) -> EpisodeRecord:
    """An episode with claims, client -> request id."""
    return EpisodeRecord(
        uuid=name,
        sequence=1,
        episode_type="train",
        group_id="g",
        digest=b"",
        payload=b"",
        sample=b"",
        pool=pool,
        state=state,
        claimants=[*claims],
        request_ids=[*claims.values()],
    )


def test_the_oldest_answers_are_forgotten_first() -> None:
    requests = ClaimRequests(remembered=1)
    requests.restore([episode("a", "ended", ann="r1"), episode("b", "ended", ann="r2")])
    assert requests.answered(("ann", "r1")) is None
    assert requests.answered(("ann", "r2")) == []


def test_evaluations_of_the_trainer_come_first_and_clients_episodes_in_their_order() -> None:
    for pool, wanted in (("", ["c", "d", "a", "b"]), ("ann", ["a", "b", "c", "d"])):
        kinds = {"a": "train", "b": "train", "c": "eval", "d": "eval"}
        made = {
            name: replace(episode(name, pool=pool), sequence=number, episode_type=kind)
            for number, (name, kind) in enumerate(kinds.items())
        }
        queues = Queues(made.__getitem__)
        for each in made.values():
            queues.put(each)
        found = [queues.oldest(pool, "any") for _ in made]
        assert [each and each.uuid for each in found] == wanted
        assert queues.oldest(pool, "any") is None
