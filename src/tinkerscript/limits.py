"""The bounds on all that a key's holder, a stranger, may send and make others hold.

Anything beyond a bound is refused before it is stored, with the bound and the remedy. `docs/protocol.md`
shows the table, and `make chaos` tests every bound.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple, cast

from tinkerscript.errors import GatewayError

__all__ = ["BOUNDS", "Bound", "Totals", "depth_is_beyond"]

# Only 200 (a claim that finds nothing) and 429 let a client retry.
Status = Literal[200, 400, 403, 413, 422, 429, 431]


class Bound(NamedTuple):
    name: str
    limit: int  # 0 if the setting `name` decides.
    unit: str
    status: Status
    scope: str
    remedy: str = ""
    code: str = "limit_exceeded"

    def check(self, amount: int, where: str = "") -> None:
        """`where` names the place in the request."""
        if amount > self.limit:
            raise self.refusal(amount, where)

    def refusal(self, amount: int, where: str = "") -> GatewayError:
        place = where or self.name
        message = f"{place}: {amount} {self.unit}; {self.name} allows {self.limit}: {self.remedy}"
        return GatewayError(self.status, self.code, message, param=place)


BOUNDS: dict[str, Bound] = {}
SECTION = "interchange_server"


def _bound(
    name: str,
    limit: int,
    unit: str,
    status: Status,
    scope: str,
    remedy: str = "",
    code: str = "limit_exceeded",
) -> Bound:
    bound = BOUNDS[name] = Bound(name, limit, unit, status, scope, remedy, code)
    return bound


def _setting(name: str, unit: str, status: Status, scope: str) -> Bound:
    return _bound(name, 0, unit, status, scope)


# Long heads take quadratic time, because the parser copies the head with each piece.
HEAD = _bound("request head", 2**16, "bytes of path and headers", 431, "request", "send shorter headers")

BODY = _bound("request body", 2**24, "bytes", 413, "request")


_CALL = "model call"

IDEMPOTENCY_KEY = _bound(
    "Idempotency-Key", 255, "characters", 400, _CALL, "use a shorter key", "invalid_idempotency_key"
)
MODEL_CHARS = _bound("model", 256, "characters", 400, _CALL, "use one of GET /v1/models")
MESSAGES = _bound("messages", 20_000, "messages", 400, _CALL, "shorten the conversation")
MESSAGE_NAME = _bound("messages.name", 256, "characters", 400, "message", "use a shorter name")
CALL_ID = _bound("tool_call_id", 1024, "characters", 400, "tool call or its result", "use a shorter id")
TOOL_CALLS = _bound("tool_calls", 1024, "tool calls", 400, "message", "write fewer calls into one message")
TOOL_NAME = _bound("tool name", 256, "characters", 400, "tool or tool call", "use a shorter name")
IMAGES = _bound("images", 32, "images", 400, _CALL, "send fewer images")
IMAGE_BYTES = _bound("image", 2**23, "bytes", 400, "image", "send a smaller file")
IMAGE_PIXELS = _bound("image's size", 2**24, "pixels", 400, "image", "send fewer pixels, such as 2048 x 2048")
TOOLS = _bound("tools", 1024, "tools", 400, _CALL, "offer fewer tools")
TOOLS_BYTES = _bound("tools as JSON", 2**20, "bytes", 400, _CALL, "offer fewer tools, or shorter ones")
TOOLS_DEPTH = _bound("tools nested", 64, "levels", 400, _CALL, "flatten the tools' schemas")
SCHEMA_BYTES = _bound("reply schema as JSON", 2**17, "bytes", 400, _CALL, "use a smaller schema")
SCHEMA_DEPTH = _bound("reply schema nested", 64, "levels", 400, _CALL, "flatten the schema")
CHOICES = _bound("n", 128, "choices", 400, _CALL, "ask for fewer choices, or send several requests")
STOPS = _bound("stop", 16, "stop strings", 400, _CALL, "use fewer of them")
STOP_CHARS = _bound("stop string", 4096, "characters", 400, _CALL, "use a shorter one")
STOP_IDS = _bound("stop_token_ids", 16, "ids", 400, _CALL, "use fewer of them")
MAX_TOKENS = _bound("max_tokens", 2**31 - 1, "tokens", 400, _CALL, "no context has room for more")
TOP_K = _bound("top_k", 2**31 - 1, "ids", 400, _CALL, "leave top_k out")
SEED = _bound("seed", 2**63 - 1, "in magnitude", 400, _CALL, "use a smaller seed")
TOP_LOGPROBS = _bound("top_logprobs", 20, "ids for each token", 400, _CALL, "ask for fewer")
LOGPROBS = _bound(
    "logprobs",
    2**20,
    "entries (n * max_tokens * (1 + top_logprobs))",
    400,
    _CALL,
    "ask for fewer choices, tokens or top_logprobs",
)
TEMPLATE_KWARGS = _bound("chat_template_kwargs", 64, "arguments", 400, _CALL, "use the run's")
PREVIOUS = _bound("previous_response_id", 256, "characters", 400, _CALL, "use the id of a response")


_CLAIM = "claim"
_OVER = "end or abort the episode"

CALLS = _bound("calls of a claim", 10_000, "recorded choices", 403, _CLAIM, _OVER, "claim_limit_exceeded")
_setting(f"{SECTION}.max_tokens_per_claim", "sampled tokens", 403, _CLAIM)
# Below the link's message limit, because a result travels with its claim's calls.
RECORDED_BYTES = _bound(
    "recorded bytes", 2**27, "bytes of messages and ids", 403, _CLAIM, _OVER, "claim_limit_exceeded"
)

# Calls count unless the engine was away or busy.
FAILED_CALLS = _bound("failed calls", 1000, "model calls", 403, _CLAIM, _OVER, "claim_limit_exceeded")

CALLS_AT_ONCE = _bound(
    "calls at once", 256, "model calls", 429, _CLAIM, "retry when some are answered", "claim_limit_reserved"
)
TRANSCRIPT = _bound("transcript", 2**20, "bytes, compressed", 413, _CLAIM)


_RESULT = "result"

OUTPUT_BYTES = _bound("workflow_output", 2**20, "bytes as JSON", 413, _RESULT)
_setting(f"{SECTION}.max_reward", "in magnitude", 422, "reward")
CALL_REWARDS = _bound("call_rewards", CALLS.limit, "model calls", 422, _RESULT)
METRICS = _bound("log_metrics", 256, "metrics", 422, _RESULT)
METRIC_DEPTH = _bound("log_metrics nested", 5, "levels", 422, _RESULT)
METRIC_NAME = _bound("log_metrics name", 400, "characters", 422, "metric")
METRIC = _bound("log_metrics value", 10**15, "in magnitude", 422, "metric")
METADATA_DEPTH = _bound("metadata nested", 64, "levels", 422, _RESULT)
FAILURE_KIND = _bound("failure.kind", 200, "characters", 422, "failure")


ID_CHARS = 200  # For uuids, clients' names and task ids.

_bound("client_uuid", ID_CHARS, "characters", 422, "request")
_bound("claim_request_id", ID_CHARS, "characters", 422, "request")
_bound("pool", ID_CHARS, "characters", 422, "request")
LEASE_S = _bound("allow_discard_timeout", 86_400, "seconds", 422, _CLAIM)
WAIT_S = _bound("wait_s", 60, "seconds", 422, "long poll")
EPISODES = _bound("max_episodes", 256, "claims", 422, "request")
CLAIMS = _bound("claims of a client", 4096, "claims held", 200, "client")
_setting(f"{SECTION}.clients.max_claims", "claims held or waited for", 429, "client with a token")


_SAMPLE = "registration"

_bound("episode_uuid", ID_CHARS, "characters", 422, _SAMPLE)
_bound("task_id", ID_CHARS, "characters", 422, _SAMPLE)
_bound("group_id", 2 * ID_CHARS, "characters", 422, _SAMPLE)
COPIES = _bound("copies", 1024, "episodes", 422, _SAMPLE)
GROUP_SIZE = _bound("group_size", 100_000, "episodes", 422, _SAMPLE)
REGISTRATIONS = _bound("episodes", 1000, "registrations", 422, "request")
REGISTERED = _bound("episodes with their copies", 4096, "episodes", 422, "request")
PAYLOAD_DEPTH = _bound("payload nested", 64, "levels", 422, _SAMPLE)
PAYLOAD_BYTES = _bound("payload", 2**22, "bytes as JSON", 422, _SAMPLE)
POOL_BYTES = _bound("payloads of the pool", 2**28, "bytes as JSON", 429, "client's own pool")
POOL_EPISODES = _bound("episodes of the pool", 20_000, "unfinished episodes", 429, "client's own pool")
ALL_POOLS_BYTES = _bound("memory of all pools", 2**30, "bytes", 429, "server")

# Otherwise tiny episodes could fill the server.
EPISODE_BYTES = 2**12


@dataclass(frozen=True, slots=True)
class Totals:
    calls: int = CALLS.limit  # Per claim.
    claims: int = CLAIMS.limit  # Per client.
    pool_episodes: int = POOL_EPISODES.limit
    all_pools_bytes: int = ALL_POOLS_BYTES.limit


# These are cut or left out instead of refused.

REASON_CHARS = 4000  # Of errors and failures.
CLAIMED_BYTES = 2**24  # The next request gets the remaining payloads.
PIPELINED = 16  # More queued requests close the connection.

# A served model's responses, for `previous_response_id`.
KEPT_CALLS = 10_000
KEPT_BYTES = 2**28
KEPT_S = 86_400  # Since the last use.

LOG_LINES = 100  # Per minute and kind.
LOG_CHARS = 4000


def depth_is_beyond(value: object, limit: int) -> bool:
    level = [value]
    for _ in range(limit):
        level = [item for each in level if isinstance(each, dict | list) for item in _items(each)]
        if not level:
            return False
    return any(isinstance(each, dict | list) for each in level)


def _items(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return cast("dict[str, object]", value).values()
    return cast("list[object]", value)
