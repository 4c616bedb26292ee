"""Failed episodes as an operator sees them: read, try again, drop.

Invariant: a failure that a trainer may have in its journal stands. It may from the moment that it is sent;
`offer` marks the episode, and the mark is committed before the sending.
"""

from __future__ import annotations

from operator import attrgetter

from tinkerscript.errors import ConflictError
from tinkerscript.protocol import TRAINER_POOL
from tinkerscript.server.episode import CANCELLED, Episode
from tinkerscript.server.ledger import Ledger, page


class DeadLetters:
    """The failed episodes of a ledger."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def page(self, *, after: int, limit: int) -> list[Episode]:
        """Failed episodes that nobody has dropped, by sequence, from the first one past `after`."""
        letters = sorted(self._ledger.dead_letters.values(), key=attrgetter("sequence"))
        return page(letters, after=after, limit=limit)

    def offer(self, uuid: str) -> Episode:
        """The failure is about to be sent to a trainer. Raises UnknownEpisodeError."""
        episode = self._ledger.get(uuid)
        if not episode.offered:
            episode.offered = True
            self._ledger.touch(episode)
        return episode

    def retry(self, uuid: str) -> Episode:
        """Register a failed episode again with a fresh budget of attempts; its failures are kept.

        Raises UnknownEpisodeError, or ConflictError for one that is not failed or whose failure stands.
        """
        episode = self._failed(uuid)
        if episode.acknowledged:
            raise ConflictError(
                f"the failure of episode {uuid!r} is in the trainer's journal and its group is closed: an "
                "episode ends exactly once"
            )
        if episode.offered:
            raise ConflictError(
                f"the failure of episode {uuid!r} was sent to the trainer, which may have it in its journal: "
                "an episode ends exactly once"
            )
        if episode.failures[-1].kind == CANCELLED:
            raise ConflictError(f"episode {uuid!r} was cancelled: {episode.failures[-1].message}")
        episode.forgiven = episode.attempt
        self._ledger.move(episode, "registered")
        return episode

    def drop(self, uuid: str) -> Episode:
        """Take a failed episode off the list. Repeated it changes nothing.

        One that the trainer has not acknowledged may go only if it is of a client's own pool: no trainer
        waits for that one, and the drop acknowledges it in the trainer's place.
        Raises UnknownEpisodeError, or ConflictError with the reason.
        """
        episode = self._failed(uuid)
        if not episode.acknowledged:
            if episode.pool == TRAINER_POOL:
                raise ConflictError(
                    f"the trainer registered episode {uuid!r} and has not acknowledged its failure yet: its "
                    "group waits for it"
                )
            self._ledger.acknowledge(episode)
        if not episode.dropped:
            episode.dropped = True
            del self._ledger.dead_letters[episode.sequence]
            self._ledger.touch(episode)
        return episode

    def _failed(self, uuid: str) -> Episode:
        episode = self._ledger.get(uuid)
        if episode.state != "failed":
            raise ConflictError(f"episode {uuid!r} is {episode.state}, not failed")
        return episode
