"""A fake of vLLM's OpenAI-compatible server: the forms of 0.32.0; its faults give those of older versions."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from inference_fakes import CONTEXT, Distribution, FakeServer, Faults, clamped
from interchange_helpers import until


class FakeVllm(FakeServer):
    """`/v1/models`, `/v1/completions`, `/version`, `/tokenize`, `/weight_info`, `/metrics`."""

    def __init__(self, distribution: Distribution, faults: Faults | None = None) -> None:
        super().__init__(distribution, faults)
        self.streamed = CONTEXT
        """How many tokens of each stream are sent."""

        self.ends_early: int | None = None
        """Streams break off after their first chunk, with an error of this code, or for 0 without one."""

        self.sent = 0
        """How many chunks of streams were."""

        for path, endpoint, method in [
            ("/v1/models", self._models, "GET"),
            ("/version", self._version, "GET"),
            ("/weight_info", self._weight_info, "GET"),
            ("/metrics", self._metrics, "GET"),
            ("/v1/completions", self._completions, "POST"),
            ("/tokenize", self._tokenize, "POST"),
        ]:
            self.app.add_api_route(path, endpoint, methods=[method], response_model=None)

    async def _models(self, request: Request) -> Any:
        if self.faults.key and (refused := self.refusal(request)):
            return refused
        card = {"object": "model", "owned_by": "vllm", "parent": None, "max_model_len": CONTEXT}
        return {"object": "list", "data": [card | {"id": name} for name in self.faults.models]}

    async def _version(self) -> Any:
        return {"version": "0.32.0"}

    async def _weight_info(self) -> Any:
        if not self.faults.weights:
            return JSONResponse({"detail": "Not Found"}, 404)
        return {"weight_version": self.faults.weights[0]}

    async def _metrics(self) -> Response:
        sampled = sum(len(each.ids) for each in self.log)
        return Response(f'vllm:generation_tokens_total{{model_name="served"}} {float(sampled)}\n')

    async def _tokenize(self, request: Request) -> Any:
        body = await request.json()
        if not self.faults.tokenizer:
            return JSONResponse({"detail": "Not Found"}, 404)
        ids = self.faults.tokenizer[body["prompt"]]
        return {"count": len(ids), "max_model_len": CONTEXT, "tokens": ids, "token_strs": None}

    async def _completions(self, request: Request) -> Response:
        body: dict[str, Any] = await request.json()
        self.requests.append(body)
        if refused := self.refusal(request) or self._invalid(body):
            return refused
        if self.faults.hang:
            await self.hang(request)
            return Response(status_code=499)
        await self.busy()
        if body["stream"]:
            return StreamingResponse(self._stream(self._completion(body)), media_type="text/event-stream")
        return JSONResponse(self._completion(body))

    async def _stream(self, completion: dict[str, Any]) -> AsyncIterator[str]:
        """A chunk for each token; those of a stream beyond `self.streamed` wait."""
        choices = completion.pop("choices")
        for at in range(max(len(choice["token_ids"]) for choice in choices)):
            await until(lambda at=at: at < self.streamed)
            for choice in choices:
                if at < (length := len(choice["token_ids"])):
                    some: dict[str, Any] = {
                        "index": choice["index"],
                        "text": "",
                        "logprobs": {name: part[at : at + 1] for name, part in choice["logprobs"].items()},
                        "token_ids": choice["token_ids"][at : at + 1],
                        "finish_reason": choice["finish_reason"] if at == length - 1 else None,
                    }
                    if at == 0:
                        some["prompt_token_ids"] = choice["prompt_token_ids"]
                    yield f"data: {json.dumps(completion | {'choices': [some]})}\n\n"
                    self.sent += 1
                    if self.ends_early is not None:
                        failure = {"message": "the engine died", "code": self.ends_early}
                        if self.ends_early:
                            yield f"data: {json.dumps({'error': failure})}\n\n"
                        return
        yield "data: [DONE]\n\n"

    def _invalid(self, body: dict[str, Any]) -> Response | None:
        if body["model"] not in self.faults.models:
            return error(f"The model `{body['model']}` does not exist.", "NotFoundError", 404)
        if (length := len(body["prompt"])) > CONTEXT:
            message = (
                f"This model's maximum context length is {CONTEXT} tokens. However, your prompt contains "
                f"{length} input tokens, which exceeds this limit even without any output."
            )
            return error(message, "BadRequestError", 400)
        if body.get("prompt_logprobs") is not None and not self.faults.scores:
            return error("prompt_logprobs is not supported", "BadRequestError", 400)
        return None

    def _completion(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt = self.prompt_of(body["prompt"])
        params = body | {"top": body["logprobs"]}
        params["max_tokens"] = min(body["max_tokens"], CONTEXT - len(prompt))
        sequences = [self.sample(prompt, params, i) for i in range(body["n"])]
        strings = self.faults.id_strings and body.get("return_tokens_as_token_ids")
        choices = list[dict[str, Any]]()
        for index, sequence in enumerate(sequences):
            names = [f"token_id:{token}" if strings else f"<{token}>" for token in sequence.ids]
            choice: dict[str, Any] = {
                "index": index,
                "text": "".join(f"<{token}>" for token in sequence.ids),
                "logprobs": {
                    "text_offset": [0] * len(names),
                    "token_logprobs": [clamped(value) for value in sequence.shown],
                    "tokens": names,
                    "top_logprobs": [
                        {f"token_id:{t}" if strings else f"<{t}>": clamped(v) for t, v in top.items()}
                        for top in sequence.top
                    ],
                },
                "finish_reason": "stop" if sequence.stopped else "length",
                "stop_reason": None,
                "prompt_logprobs": self._prompt_logprobs(prompt, body),
            }
            if self.faults.abort:
                choice["finish_reason"] = "abort"
            if self.faults.choice is not None:
                choice["index"] = self.faults.choice
            last = self.faults.last_id
            ids = sequence.ids if last is None else [*sequence.ids[:-1], last]
            if self.faults.token_ids and body.get("return_token_ids"):
                choice |= {"token_ids": ids, "prompt_token_ids": prompt}
            choices.append(choice)
        sampled = sum(len(sequence.ids) for sequence in sequences)
        if len(self.faults.weights) > 1:
            self.faults.weights.pop(0)
        usage = {"prompt_tokens": len(prompt), "completion_tokens": sampled}
        return {
            **{"id": "cmpl-1", "object": "text_completion", "created": 1, "model": body["model"]},
            **{"choices": choices, "usage": usage | {"total_tokens": len(prompt) + sampled}},
        }

    def _prompt_logprobs(self, prompt: list[int], body: dict[str, Any]) -> list[Any] | None:
        if body.get("prompt_logprobs") is None:
            return None
        return [
            None
            if value is None
            else {str(token): {"logprob": clamped(value), "rank": 1, "decoded_token": "?"}}
            for token, value in zip(prompt, self.score(prompt), strict=True)
        ]


def error(message: str, kind: str, status: int) -> Response:
    body = {"error": {"message": message, "type": kind, "param": None, "code": status}}
    return JSONResponse(body, status)
