"""`TokenBuffer`: keeps the token ids of a conversation, so that each prompt extends what was sampled.

Invariant: while the history is unmodified, the next prompt is the previous prompt ids + sampled ids + newly
rendered ids; sampled text is never tokenized again. If the history was modified, the whole prompt is
rendered: a fork.
"""

from __future__ import annotations

from dataclasses import dataclass

import tinker
from tinker_cookbook.renderers import Message, RenderContext, Renderer


@dataclass(frozen=True)
class Prompt:
    """The ids of one model call."""

    ids: list[int]
    is_fork: bool
    """Whether it does not extend the previous prompt and its action: the history was modified, the solver
    switched conversations, or the renderer lacks the extension property."""


@dataclass(frozen=True)
class _Turn:
    """An answered prompt."""

    messages: list[Message]
    rendered: list[int]
    """`messages` rendered for generation, regardless of what was sampled."""

    ids: list[int]
    """The prompt ids that were sampled from, then the action."""

    reply: Message


class TokenBuffer:
    """Renders the successive prompts of one episode. One per episode, one call at a time."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        stops = renderer.get_stop_sequences()
        self._stop_ids = {stop for stop in stops if isinstance(stop, int)}
        self._turns: list[_Turn] = []
        self._pending: tuple[list[Message], list[int], list[int]] | None = None

    def render(self, messages: list[Message]) -> Prompt:
        """Render the prompt for the next assistant message. A trailing assistant message is its prefill."""
        rendered = self._render_all(messages)
        splices = (self._splice(turn, messages, rendered) for turn in reversed(self._turns))
        spliced = next((ids for ids in splices if ids is not None), None)
        ids = spliced or rendered
        self._pending = (messages, rendered, ids)
        previous = self._turns[-1].ids if self._turns else []
        return Prompt(ids=ids, is_fork=ids[: len(previous)] != previous)

    def record(self, action: list[int], reply: Message) -> None:
        """Record the action sampled for the last prompt, and `reply`, the message the solver got for it."""
        if self._pending is None:
            raise ValueError("record() needs a prompt; call render() first")
        messages, rendered, ids = self._pending
        self._turns.append(_Turn(messages, rendered, ids + action, reply))
        self._pending = None

    def _render_all(self, messages: list[Message]) -> list[int]:
        if messages and messages[-1]["role"] == "assistant":
            content = messages[-1]["content"]
            if isinstance(content, str):
                return _ids(self._renderer.build_generation_prompt(messages[:-1], prefill=content))
        return _ids(self._renderer.build_generation_prompt(messages))

    def _splice(self, turn: _Turn, messages: list[Message], rendered: list[int]) -> list[int] | None:
        """`turn`'s ids plus the rendering of what follows; None if the conversation does not extend it."""
        count = len(turn.messages)
        if not self._renderer.has_extension_property or messages[: count + 1] != [*turn.messages, turn.reply]:
            return None
        reply = self._rendered_reply(messages, count)
        start = turn.rendered + reply
        if not reply or reply[-1] not in self._stop_ids or rendered[: len(start)] != start:
            return None
        close = [] if turn.ids[-1] in self._stop_ids else [reply[-1]]
        return turn.ids + close + rendered[len(start) :]

    def _rendered_reply(self, messages: list[Message], index: int) -> list[int]:
        """Ids of the reply as rendered after its header, including the end of the message."""
        users = [at for at, message in enumerate(messages) if message["role"] == "user"]
        context = RenderContext(
            idx=index,
            is_last=index == len(messages) - 1,
            prev_message=messages[index - 1] if index else None,
            next_message=messages[index + 1] if index + 1 < len(messages) else None,
            last_user_index=max(users, default=-1),
            in_last_assistant_turn=not users or index > users[-1],
        )
        output = self._renderer.render_message(messages[index], context).output
        return _ids(tinker.ModelInput(chunks=list(output)))


def _ids(prompt: tinker.ModelInput) -> list[int]:
    """Token ids of a prompt. `to_ints` raises for images."""
    return list(prompt.to_ints())
