"""The indexes over a run's episodes: answered requests, counts."""

from __future__ import annotations

from tinkerscript.server.episodes.indexes import ClaimRequests
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
