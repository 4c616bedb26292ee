"""What answers a request: made of what was sampled, or made again of what was recorded.

Invariant: both give the same `Completion` for the same calls.
"""

from __future__ import annotations

from collections.abc import Iterable

from tinkerscript.gateway.dialects import Choice, Completion, ModelCall
from tinkerscript.gateway.messages import ChatMessage
from tinkerscript.gateway.retries import choice_id
from tinkerscript.gateway.sampler import SampledSequence
from tinkerscript.gateway.session import Session
from tinkerscript.rollouts.call import Call


def choice_of(sequence: SampledSequence | Call, message: ChatMessage) -> Choice:
    """The choice that was sampled, or recorded, as `message`."""
    called = sequence.stop_reason == "stop" and "tool_calls" in message
    is_new = isinstance(sequence, SampledSequence)
    return Choice(
        message=message,
        sampled=sequence.sampled,
        logprobs=sequence.logprobs,
        finish_reason="tool_calls" if called else sequence.stop_reason,
        top_ids=sequence.top_ids if is_new else b"",
        top_logprobs=sequence.top_logprobs if is_new else b"",
    )


def recorded_answer(
    call: ModelCall, call_id: str, calls: Iterable[Call], session: Session, model: str
) -> Completion | None:
    """The answer to `call` that was recorded as `call_id` and its siblings among `calls`.

    None where it cannot be made again: not all of its choices were recorded when the server ended, it showed
    the likeliest tokens, which are not recorded, or it answered several prompts.
    """
    if call.top_logprobs or len(call.prompts) > 1:
        return None
    ids = [choice_id(call_id, index) for index in range(call.n)]
    known = {each.call_id: each for each in calls if each.call_id in ids}
    if len(known) < len(ids):
        return None
    first = known[call_id]
    return Completion(
        call_id=call_id,
        created=first.created,
        model=model,
        prompt=session.prompt_of(call_id),
        choices=[choice_of(known[each], session.reply_of(each)) for each in ids],
        policy_version=first.policy_version,
    )
