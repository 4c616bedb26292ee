"""`GET /fleet`: who works on what, for the page of a run.

Invariant: it changes nothing, and the work of a reply is bounded by the number of clients, not of episodes.
"""

from __future__ import annotations

from fastapi import APIRouter, Response

from tinkerscript.protocol import DeadLetter, Failure, FleetClaim, FleetClient, FleetResponse, FleetTotals
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


class FleetRoutes:
    """The route of an operator who looks on."""

    def __init__(self, *, interchange: Interchange, link: ServerLink) -> None:
        self._interchange = interchange
        self._book = interchange.book
        self._link = link

    def router(self) -> APIRouter:
        """The route; it needs the admin role."""
        router = APIRouter(tags=["operator"])
        router.get("/fleet", response_model=FleetResponse)(self.fleet)
        return router

    async def fleet(self) -> Response:
        """The engine, the batch, the claims, the clients and the failures, as they are now."""
        # Not the model itself: FastAPI would check the reply once more, at twice the cost.
        return Response(self._fleet().model_dump_json(), media_type="application/json")

    def _fleet(self) -> FleetResponse:
        engine, book = self._interchange.engine, self._book
        in_quarantine, quarantined = self._interchange.quarantined_clients(MAX_CLIENTS)
        return FleetResponse(
            engine_status=engine.status,
            policy_version=engine.policy_version,
            global_step=engine.global_step,
            run_finished=engine.run_finished,
            trainer_connected=self._link.connected,
            failure=engine.failure,
            episodes=book.counts.by_type(),
            waiting_clients=self._interchange.waiting_clients,
            batch=batch_progress(self._interchange, self._link),
            claims=[self._claim(episode) for episode in book.oldest_claims(MAX_CLAIMS)],
            clients=self._clients(quarantined),
            failed=[_failed(episode) for episode in book.latest_failed(MAX_FAILED)],
            totals=FleetTotals(
                claims=book.claims_in_all,
                clients=book.active_clients,
                quarantined=in_quarantine,
                failed=book.failed_in_all,
            ),
        )

    def _claim(self, episode: EpisodeRecord) -> FleetClaim:
        leases = self._book.leases
        return FleetClaim(
            episode_uuid=episode.uuid,
            group_id=episode.group_id,
            episode_type=episode.episode_type,
            pool=episode.pool,
            client_uuid=episode.client_uuid,
            attempt=episode.attempt,
            age_s=round(leases.age_s(episode), 1),
            lease_left_s=round(leases.lease_left_s(episode), 1),
            calls_in_flight=episode.calls_in_flight,
            policy_version=episode.policy_version,
        )

    def _clients(self, quarantined: dict[str, str]) -> list[FleetClient]:
        busiest = dict(self._book.busiest_clients(MAX_CLIENTS))
        claims = {client: self._book.claims_held(client) for client in quarantined} | busiest
        clients = [
            FleetClient(client_uuid=client, claims=number, quarantined=quarantined.get(client, ""))
            for client, number in claims.items()
        ]
        return sorted(clients, key=lambda each: (not each.quarantined, -each.claims))[:MAX_CLIENTS]


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
