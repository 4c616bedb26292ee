"""The indexes over a run's episodes: answered requests, what is on its way to the trainer, counts."""

from __future__ import annotations

from functools import partial

from tinkerscript.server.episodes.indexes import ClaimRequests, DeliveryWindow
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
        pool=pool,
        state=state,
        claimants=[*claims],
        request_ids=[*claims.values()],
    )


def test_the_window_bounds_what_is_on_its_way() -> None:
    now = [0.0]
    window = DeliveryWindow(clock=lambda: now[0], window=2)
    for uuid in "abc":
        window.add(uuid)
        window.add(uuid)
    assert window.take() == ["a", "b"]
    assert window.take() == []
    window.add("a")
    window.remove("a")
    now[0] = 5.0
    assert window.take() == ["c"]
    window.requeue(after_s=1.0)
    assert window.take() == ["b"]
    window.requeue()
    window.remove("c")
    assert window.take() == ["b"]
    assert len(window) == 1
    for change in (partial(window.remove, "b"), partial(window.add, "d"), window.requeue):
        window.changed.clear()
        change()
        assert window.changed.is_set(), f"the sender is not woken by {change}"


def test_what_is_on_its_way_is_not_sent_again_before_it_is_late() -> None:
    now = [0.0]
    window = DeliveryWindow(clock=lambda: now[0], window=3)
    for uuid in "ab":
        window.add(uuid)
    assert window.take() == ["a", "b"]
    now[0] = 1.0
    window.add("c")
    assert window.take() == ["c"]
    assert len(window) == 3
    window.requeue(after_s=1.0)
    window.add("d")
    assert window.take() == ["a", "b"], "the late ones, in their order; `c` holds the third place"
    window.remove("d")
    assert len(window) == 3
    window.remove("c")
    assert window.take() == []


def test_the_oldest_answers_are_forgotten_first() -> None:
    requests = ClaimRequests(remembered=1)
    requests.restore([episode("a", "ended", ann="r1"), episode("b", "ended", ann="r2")])
    assert requests.answered(("ann", "r1")) is None
    assert requests.answered(("ann", "r2")) == []
