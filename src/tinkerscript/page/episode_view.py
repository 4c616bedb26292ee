from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
from pydantic import BaseModel, Field

from tinkerscript.errors import NotRecordedError
from tinkerscript.ledger.reader import LedgerReader
from tinkerscript.ledger.rows import Use
from tinkerscript.ledger.tokens import TokenUse, TrainedSequence
from tinkerscript.page.held_out import SampleContent, as_text, input_text, sample_of
from tinkerscript.page.lines import (
    EpisodeLine,
    StoredResult,
    episodes,
    line,
    lines,
    metrics_of,
    result_of,
)
from tinkerscript.rollouts.call import Call, unpack_ids, with_messages
from tinkerscript.rollouts.merge import merge_calls
from tinkerscript.rollouts.rollout import Rollout

EPISODE_TEXT_CHARS = 50_000

MAX_SIBLINGS = 256


class CallView(BaseModel):
    call_id: str
    parent_id: str | None = Field(description="The call that its prompt extends.")
    messages: list[dict[str, Any]] = Field(description="The prompt's new messages, in OpenAI's format.")
    reply: dict[str, Any]
    tools: list[Any] = Field(description="Tools of a new prompt; other calls have their parent's.")
    sequence: int | None = Field(
        description="The training sequence with this call; null in a failed attempt."
    )
    start: int | None = Field(description="The sequence's tokens [start, end) are the sampled ones.")
    end: int | None
    prompt_tokens: int = Field(description="Number of new prompt tokens.")
    sampled_tokens: int
    stop_reason: str
    policy_version: int
    policy_version_end: int | None = Field(description="The last version, if the weights changed during it.")
    fork_reason: str | None = Field(description="Why it does not extend an earlier call.")
    role: str = Field(description="The role that was called; empty for the policy.")
    side: bool = Field(description="Whether an agent made it for something other than its task.")
    ignored: list[str] = Field(description="Fields of the request that were ignored.")
    temperature: float
    created: int
    mean_logprob: float | None
    reward: float | None = Field(default=None, description="What the program said that this call earned.")


class Score(BaseModel):
    name: str
    value: Any
    answer: str | None
    explanation: str | None


class VerdictView(BaseModel):
    reward: float | None = Field(description="What it trains on; null: the judge failed.")
    words: str


class FailedAttempt(BaseModel):
    attempt: int
    client: str
    kind: str
    message: str
    turns: list[CallView] = Field(description="Its recorded calls.")


class SequenceLine(BaseModel):
    number: int
    role: str = Field(description="The trained role that sampled it; empty for the policy.")
    tokens: int
    sampled: int
    trained: int = Field(
        description="Tokens with loss; before any step used them, tokens that may have loss."
    )
    parent: int | None = Field(description="The sequence that it forks from.")
    fork: int = Field(description="Number of leading tokens shared with the parent.")
    fork_reason: str | None
    reason: str | None = Field(description="Why it did not train; null if it did, or if no step has used it.")


class EpisodeUse(BaseModel):
    step: int
    outcome: str
    advantage: float | None
    reason: str


class EpisodeView(BaseModel):
    run: str
    line: EpisodeLine
    queued_s: float | None = Field(
        description="Seconds that it waited for the claim that counts; null without a queue, or if unknown."
    )
    recorded: bool = Field(
        description="Whether its calls are still stored; the oldest are dropped (`recording_limit_mb`)."
    )
    task: str
    sample_id: str
    input: str
    target: Any
    turns: list[CallView]
    scores: list[Score]
    verdict: VerdictView | None = Field(description="Null: no judge saw its group.")
    metrics: dict[str, float]
    metadata: dict[str, Any]
    attempts: list[FailedAttempt]
    sequences: list[SequenceLine]
    uses: list[EpisodeUse] = Field(description="Several if it was replayed.")
    siblings: list[EpisodeLine] = Field(description="The episodes of its group, including itself.")
    previous: str | None = Field(description="The uuid of the episode that ended before it.")
    next: str | None
    is_chat: bool = Field(description="Whether it is a chat of supervised fine-tuning, which has no calls.")
    transcripts: list[int] = Field(description="The attempts with an Inspect transcript.")


def find_episode(ledger: LedgerReader, prefix: str) -> str:
    query = "SELECT uuid FROM episodes WHERE uuid >= ? AND uuid < ? AND end_number IS NOT NULL LIMIT 5"
    found = [uuid for (uuid,) in ledger.rows(query, (prefix, f"{prefix}\U0010ffff"))]
    if len(found) == 1 or prefix in found:
        return prefix if prefix in found else found[0]
    problem = f"several episodes begin with {prefix!r}: {', '.join(found)}"
    raise NotRecordedError(problem if found else f"no episode that ended begins with {prefix!r}")


def episode_view(run: str, ledger: LedgerReader, uuid: str) -> EpisodeView:
    found = episodes(ledger, "e.uuid = ?", (uuid,))
    if not found:
        raise NotRecordedError(f"the run has no episode {uuid!r} that ended")
    (episode,) = found
    own, number = line(ledger, episode), episode["sequence"]
    calls = ledger.calls(number, own.attempt) if own.status == "accepted" else []
    steps = ledger.sequences(number)
    sequences = sequences_of(uuid, calls, steps)
    sample = sample_of(ledger, own.sample) or SampleContent()
    result = result_of(ledger, number) if own.status == "accepted" else StoredResult()
    uses = ledger.rows(
        "SELECT step, outcome, advantage, reason FROM trained "
        "WHERE episode = ? AND role = ? AND undone = 0 AND outcome <> ? ORDER BY step",
        (number, "", Use.EVALUATED),
    )
    return EpisodeView(
        run=run,
        line=own,
        queued_s=episode["queued_s"] if own.status == "accepted" else None,
        recorded=not episode["emptied"],
        task=sample.task,
        sample_id=sample.id,
        input=input_text(sample.content),
        target=sample.content.get("target"),
        turns=_turns(calls, sequences, result.call_rewards),
        scores=_scores(result.metadata),
        verdict=_verdict(ledger, number),
        metrics=metrics_of(result),
        metadata=result.metadata,
        attempts=_attempts(ledger, number),
        sequences=_sequences(steps, sequences),
        uses=[EpisodeUse.model_validate(dict(use)) for use in uses],
        siblings=siblings(ledger, own),
        previous=_neighbor(ledger, "end_number < ? ORDER BY end_number DESC", own.number),
        next=_neighbor(ledger, "end_number > ? ORDER BY end_number", own.number),
        is_chat=bool(_chat_of(steps)),
        transcripts=ledger.transcribed(number),
    )


class EpisodeSequence(NamedTuple):
    role: str
    number: int  # From 0, by role.
    rollout: Rollout
    first: int

    def used_in(self, step: Iterable[TrainedSequence]) -> TrainedSequence | None:
        return next((each for each in step if (each.role, each.number) == (self.role, self.number)), None)


Steps = Mapping[int, Sequence[TrainedSequence]]  # By step.


def recorded_sequences(ledger: LedgerReader, uuid: str) -> tuple[list[EpisodeSequence], Steps] | None:
    """Return None if the tokens were dropped."""
    found = episodes(ledger, "e.uuid = ?", (uuid,))
    if not found or found[0]["emptied"]:
        return None
    (episode,) = found
    accepted = episode["status"] == "accepted"
    calls = ledger.calls(episode["sequence"], episode["attempt"]) if accepted else []
    steps = ledger.sequences(episode["sequence"])
    return sequences_of(uuid, calls, steps), steps


def _chat_of(steps: Steps) -> TrainedSequence | None:
    return next((each for step in steps.values() for each in step if each.chat), None)


def sequences_of(uuid: str, calls: Sequence[Call], steps: Steps) -> list[EpisodeSequence]:
    """Return the policy's training sequences, then each trained role's."""
    if chat := _chat_of(steps):
        tokens = unpack_ids(chat.chat)
        trained = np.frombuffer(chat.chat_trained, np.uint8).astype(np.bool_)
        nothing = np.full(len(tokens), np.nan, np.float32)
        return [EpisodeSequence("", 0, Rollout(uuid, tokens, trained, trained, nothing, segments=()), 0)]
    roles = {call.role for call in calls if not call.is_foreign}
    found: list[EpisodeSequence] = []
    for role in sorted(roles):
        first = len(found)
        merged = merge_calls(calls, episode_uuid=uuid, trains_constrained=False, role=role)
        found += [EpisodeSequence(role, number, each, first) for number, each in enumerate(merged)]
    return found


def siblings(ledger: LedgerReader, own: EpisodeLine) -> list[EpisodeLine]:
    """The group's episodes that count, or the undone ones for an undone episode."""
    # Without `+ 0` SQLite would scan all episodes of clients' samples.
    rest = "e.group_id = ? AND e.step + 0 = ? AND e.label = ? AND e.undone = ? ORDER BY e.end_number"
    given = (own.group_id, own.step, own.label, own.undone or 0)
    return lines(ledger, rest, given, limit=MAX_SIBLINGS)


def _neighbor(ledger: LedgerReader, where: str, number: int) -> str | None:
    row = ledger.row(f"SELECT uuid FROM episodes WHERE {where} LIMIT 1", (number,))
    return None if row is None else row[0]


def _verdict(ledger: LedgerReader, number: int) -> VerdictView | None:
    row = ledger.row("SELECT reward, words FROM verdicts WHERE episode = ?", (number,))
    return None if row is None else VerdictView.model_validate(dict(row))


def _turns(
    calls: list[Call], sequences: Sequence[EpisodeSequence], rewards: Mapping[str, float]
) -> list[CallView]:
    places = {
        segment.call.call_id: (at, segment.start, segment.end)
        for at, sequence in enumerate(sequences)
        for segment in sequence.rollout.segments
    }
    return [_turn(call, places.get(call.call_id), rewards.get(call.call_id)) for call in with_messages(calls)]


def _turn(call: Call, place: tuple[int, int, int] | None, reward: float | None = None) -> CallView:
    logprobs = call.sampled_logprobs
    return CallView(
        call_id=call.call_id,
        parent_id=call.parent_id,
        messages=[_message(each) for each in _items(_shortened(json.loads(call.messages)))],
        reply=_message(_shortened(json.loads(call.reply))),
        tools=_items(_shortened(json.loads(call.tools))),
        sequence=place and place[0],
        start=place and place[1],
        end=place and place[2],
        prompt_tokens=len(call.new_prompt) // 4 or call.reported_tokens[0],
        sampled_tokens=call.reply_tokens,
        stop_reason=call.stop_reason,
        policy_version=call.policy_version,
        policy_version_end=call.policy_version_end,
        fork_reason=call.fork_reason,
        role=call.role,
        side=call.side,
        ignored=call.ignored,
        temperature=call.temperature,
        created=call.created,
        mean_logprob=float(logprobs.mean()) if len(logprobs) else None,
        reward=reward,
    )


def _message(value: Any) -> dict[str, Any]:
    message: dict[str, Any] = {"content": as_text(value)}
    if isinstance(value, dict):
        message = dict(cast("dict[str, Any]", value))
    content, calls = message.get("content"), message.get("tool_calls")
    if isinstance(content, list):
        message["content"] = [
            part if isinstance(part, dict) else {"text": as_text(part)} for part in _items(content)
        ]
    elif content is not None:
        text, images = as_text(content), _items(message.get("images"))
        message["content"] = _with_images(text, images) if images else text
    if calls is not None:
        message["tool_calls"] = [
            call
            if isinstance(call, dict) and isinstance(call.get("function"), dict)
            else {"function": {"name": as_text(call)}}
            for call in _items(calls)
        ]
    for name in ("role", "name", "reasoning_content"):
        if message.get(name) is not None:
            message[name] = as_text(message[name])
    return message


def _with_images(content: str, images: list[Any]) -> list[dict[str, str]]:
    parts: list[dict[str, str]] = []
    begin = 0
    for image in (cast("dict[str, Any]", each) for each in images if isinstance(each, dict)):
        at = image.get("at")
        if isinstance(at, int):
            size = f"{as_text(image.get('width'))} x {as_text(image.get('height'))}"
            parts += {"text": content[begin:at]}, {"text": f"[image of {size} pixels]"}
            begin = at
    return [part for part in [*parts, {"text": content[begin:]}] if part["text"]]


def _items(value: Any) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else []


def _shortened(value: Any) -> Any:
    if isinstance(value, str):
        cut = len(value) - EPISODE_TEXT_CHARS
        return f"{value[:EPISODE_TEXT_CHARS]}… ({cut:,} more characters)" if cut > 0 else value
    if isinstance(value, list):
        return [_shortened(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, dict):
        return {key: _shortened(item) for key, item in value.items()}  # pyright: ignore[reportUnknownVariableType]
    return value


def _attempts(ledger: LedgerReader, sequence: int) -> list[FailedAttempt]:
    query = """
    SELECT attempt, client, failure FROM attempts WHERE episode = ? AND failure IS NOT NULL
        ORDER BY CASE WHEN attempt = 0 THEN 1 ELSE 0 END, attempt
    """
    return [
        _attempt(
            row["attempt"], row["client"], json.loads(row["failure"]), ledger.calls(sequence, row["attempt"])
        )
        for row in ledger.rows(query, (sequence,))
    ]


def _attempt(number: int, client: str, failure: dict[str, Any], calls: list[Call]) -> FailedAttempt:
    return FailedAttempt(
        attempt=number,
        client=client,
        kind=str(failure.get("kind")),
        message=str(failure.get("message")),
        turns=[_turn(call, None) for call in with_messages(calls)],
    )


def _scores(metadata: dict[str, Any]) -> list[Score]:
    values, words = metadata.get("scores"), metadata.get("explanations")
    found = values if isinstance(values, dict) else {}  # pyright: ignore[reportUnknownVariableType]
    explained: dict[str, Any] = words if isinstance(words, dict) else {}  # pyright: ignore[reportUnknownVariableType]
    return [_score(str(name), value, explained.get(str(name))) for name, value in found.items()]  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType, reportUnknownMemberType]


def _score(name: str, value: Any, said: Any) -> Score:
    words: dict[str, Any] = said if isinstance(said, dict) else {}  # pyright: ignore[reportUnknownVariableType]
    answer, explanation = words.get("answer"), words.get("explanation")
    return Score(
        name=name,
        value=value,
        answer=None if answer is None else str(answer),
        explanation=None if explanation is None else str(explanation),
    )


def _sequences(steps: Steps, sequences: Sequence[EpisodeSequence]) -> list[SequenceLine]:
    newest_first = [used for _, used in sorted(steps.items(), reverse=True)]
    lines: list[SequenceLine] = []
    for at, sequence in enumerate(sequences):
        rollout = sequence.rollout
        last = next(filter(None, map(sequence.used_in, newest_first)), None)
        lines.append(
            SequenceLine(
                number=at,
                role=sequence.role,
                tokens=len(rollout.tokens),
                sampled=int(rollout.sampled.sum()),
                trained=_tokens_trained(rollout, last),
                parent=None if rollout.parent is None else sequence.first + rollout.parent,
                fork=rollout.fork,
                fork_reason=rollout.segments[0].call.fork_reason if rollout.segments else None,
                reason=(last.reason or None) if last else None,
            )
        )
    return lines


def _tokens_trained(rollout: Rollout, trained: TrainedSequence | None) -> int:
    if trained is None or not trained.uses:
        return int(rollout.loss_mask.sum())
    count = trained.uses.count(TokenUse.TRAINED)
    return count * int(rollout.sampled.sum()) if len(trained.uses) == 1 else count
