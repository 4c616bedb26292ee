"""What `GET /fleet` answers: who works on what, for the page of a run.

Invariant: it changes nothing, and the work of a reply is bounded by the number of clients, not of episodes.
"""

from __future__ import annotations

from tinkerscript.protocol import DeadLetter, Failure, FleetClaim, FleetClient, FleetResponse, FleetTotals
from tinkerscript.server.episodes.book import EpisodeBook
from tinkerscript.server.episodes.record import EpisodeRecord
from tinkerscript.server.interchange import Interchange
from tinkerscript.server.routes.status import batch_progress
from tinkerscript.trainer_link.server_end import ServerLink

MAX_CLAIMS = 500
MAX_CLIENTS = 500
MAX_FAILED = 100
MAX_FAILURES = 10
"""Attempts of a failed episode."""

MAX_MESSAGE_CHARS = 2000


def fleet_response(interchange: Interchange, link: ServerLink) -> FleetResponse:
    """The engine, the batch, the claims, the clients and the failures, as they are now."""
    engine, book = interchange.engine, interchange.book
    in_quarantine, quarantined = interchange.quarantined_clients(MAX_CLIENTS)
    return FleetResponse(
        engine_status=engine.status,
        policy_version=engine.policy_version,
        global_step=engine.global_step,
        run_finished=engine.run_finished,
        trainer_connected=link.connected,
        failure=engine.failure,
        episodes=book.counts.by_type(),
        waiting_clients=interchange.waiting_clients,
        batch=batch_progress(interchange, link),
        claims=[_claim(book, episode) for episode in book.oldest_claims(MAX_CLAIMS)],
        clients=_clients(interchange, quarantined),
        failed=[_failed(episode) for episode in book.latest_failed(MAX_FAILED)],
        totals=FleetTotals(
            claims=book.claims_in_all,
            clients=book.active_clients,
            quarantined=in_quarantine,
            failed=book.failed_in_all,
        ),
    )


def _claim(book: EpisodeBook, episode: EpisodeRecord) -> FleetClaim:
    return FleetClaim(
        episode_uuid=episode.uuid,
        group_id=episode.group_id,
        episode_type=episode.episode_type,
        pool=episode.pool,
        client_uuid=episode.client_uuid,
        attempt=episode.attempt,
        age_s=round(book.leases.age_s(episode), 1),
        lease_left_s=round(book.leases.lease_left_s(episode), 1),
        calls_in_flight=episode.calls_in_flight,
        policy_version=episode.policy_version,
    )


def _clients(interchange: Interchange, quarantined: dict[str, str]) -> list[FleetClient]:
    """Those in quarantine, those with the most claims, those that came last."""
    book = interchange.book
    busiest = dict(book.busiest_clients(MAX_CLIENTS))
    names = dict.fromkeys([*quarantined, *busiest, *interchange.activity.latest(MAX_CLIENTS)])
    return [_client(interchange, name, quarantined.get(name, "")) for name in list(names)[:MAX_CLIENTS]]


def _client(interchange: Interchange, name: str, quarantined: str) -> FleetClient:
    client = FleetClient(client_uuid=name, claims=interchange.book.claims_held(name), quarantined=quarantined)
    found = interchange.activity.of(name)
    if found is None:
        return client
    figures = {"ended": found.ended, "failed": found.failed}
    rate = {"episodes_per_min": round(found.per_minute, 2), "idle_s": round(found.idle_s, 1)}
    return client.model_copy(update=figures | rate)


def _failed(episode: EpisodeRecord) -> DeadLetter:
    stands = episode.why_failure_stands()
    return DeadLetter(
        episode_uuid=episode.uuid,
        group_id=episode.group_id,
        episode_type=episode.episode_type,
        pool=episode.pool,
        failures=[_shown(failure) for failure in episode.failures[-MAX_FAILURES:]],
        acknowledged=episode.acknowledged,
        can_retry=not stands,
        why_not=stands,
    )


def _shown(failure: Failure) -> Failure:
    return failure.model_copy(update={"message": failure.message[:MAX_MESSAGE_CHARS]})
