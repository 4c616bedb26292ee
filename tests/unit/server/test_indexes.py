"""The indexes over a run's episodes: answered requests, counts."""

from __future__ import annotations

from episode_records import record
from tinkerscript.server.episodes.indexes import ClaimRequests, Queues


def test_the_oldest_answers_are_forgotten_first() -> None:
    requests = ClaimRequests(remembered=1)
    asked = {"a": "r1", "b": "r2"}
    requests.restore(record(n, state="ended", claimants=["ann"], request_ids=[r]) for n, r in asked.items())
    assert requests.answered(("ann", "r1")) is None
    assert requests.answered(("ann", "r2")) == []


def test_evaluations_of_the_trainer_come_first_and_clients_episodes_in_their_order() -> None:
    for pool, wanted in (("", ["c", "d", "a", "b"]), ("ann", ["a", "b", "c", "d"])):
        kinds = {"a": "train", "b": "train", "c": "eval", "d": "eval"}
        made = {
            name: record(name, pool=pool, sequence=number, episode_type=kind)
            for number, (name, kind) in enumerate(kinds.items())
        }
        queues = Queues(made.__getitem__)
        for each in made.values():
            queues.put(each)
        found = [queues.oldest(pool, "any") for _ in made]
        assert [each and each.uuid for each in found] == wanted
        assert queues.oldest(pool, "any") is None
