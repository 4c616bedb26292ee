"""The response object of OpenAI Responses: output items, status, usage, and the request's fields.

Ids are the call's id behind a prefix: `resp_` for the response; `rs_`, `msg_`, and `fc_` for its items. They
identify the call when a conversation is sent back.

Source: https://platform.openai.com/docs/api-reference/responses/object
"""

from __future__ import annotations

from typing import Any

from tinkerscript.gateway.dialects.dialect import Choice, Completion, ReplyHeader, reasoning_tokens
from tinkerscript.gateway.dialects.openai import logprob_entries
from tinkerscript.gateway.dialects.responses.items import RESPONSE_PREFIX, encrypt
from tinkerscript.gateway.dialects.responses.request import ResponsesCall
from tinkerscript.gateway.sampler import SampledTokens
from tinkerscript.gateway.tokenizer import LightTokenizer
from tinkerscript.rollouts.call import unpack_ids

Item = dict[str, Any]


class ResponseWriter:
    """Writes the response to one request."""

    def __init__(self, tokenizer: LightTokenizer, call: ResponsesCall) -> None:
        self._tokenizer = tokenizer
        self._call = call

    def pending(self, header: ReplyHeader) -> dict[str, Any]:
        """The response before anything is sampled."""
        return {
            "id": f"{RESPONSE_PREFIX}{header.call_id}",
            "object": "response",
            "created_at": header.created,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "model": header.model,
            "output": [],
            "usage": None,
            **self._call.echo,
        }

    def response(self, completion: Completion) -> dict[str, Any]:
        """The whole response."""
        (choice,) = completion.choices
        response = self.pending(completion)
        complete = choice.finish_reason != "length"
        response["status"] = "completed" if complete else "incomplete"
        if not complete:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        response["output"] = self.items(completion.call_id, choice)
        response["usage"] = self._usage(completion.prompt_tokens, choice)
        if self._call.return_token_ids:
            response["prompt_token_ids"] = unpack_ids(completion.prompt).tolist()
            response |= choice.token_fields()
        return response

    def items(self, call_id: str, choice: Choice) -> list[Item]:
        """The output: reasoning, if any; text, unless there are only tool calls; tool calls."""
        message, items = choice.message, list[Item]()
        if reasoning := message.get("reasoning_content"):
            items.append(self.reasoning(call_id, reasoning))
        calls: list[dict[str, Any]] = message.get("tool_calls", [])
        if message["content"] or not calls:
            items.append(self.message(call_id, message["content"], self.entries(choice)))
        items += [self._function_call(call_id, call, number) for number, call in enumerate(calls)]
        if choice.finish_reason == "length":
            items[-1]["status"] = "incomplete"
        return items

    def reasoning(self, call_id: str, text: str) -> Item:
        item: Item = {
            "id": f"rs_{call_id}",
            "type": "reasoning",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": text}],
            "status": "completed",
        }
        return item | ({"encrypted_content": encrypt(text)} if self._call.encrypted_reasoning else {})

    def message(self, call_id: str, text: str, logprobs: list[dict[str, Any]]) -> Item:
        part: Item = {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
        return {
            "id": f"msg_{call_id}",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [part],
        }

    def entries(self, tokens: SampledTokens) -> list[dict[str, Any]]:
        """One logprob entry per sampled id, markup and stop token included; none unless requested."""
        return logprob_entries(self._tokenizer, self._call, tokens) if self._call.logprobs else []

    def _usage(self, inputs: int, choice: Choice) -> dict[str, Any]:
        outputs = choice.num_tokens
        return {
            "input_tokens": inputs,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": outputs,
            "output_tokens_details": {"reasoning_tokens": reasoning_tokens(self._tokenizer, choice)},
            "total_tokens": inputs + outputs,
        }

    def _function_call(self, call_id: str, call: dict[str, Any], number: int) -> Item:
        name = call["function"]["name"]
        namespace, name = self._call.namespaces.get(name, (None, name))
        item: Item = {
            "id": f"fc_{call_id}_{number}",
            "type": "function_call",
            "call_id": call["id"],
            "name": name,
            "arguments": call["function"]["arguments"],
            "status": "completed",
        }
        return item | ({"namespace": namespace} if namespace else {})
