"""A fake of SGLang's native server: the forms of 0.5.23, and those of older versions by its faults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from inference_fakes import CONTEXT, Distribution, FakeServer, Faults, as_json


class FakeSglang(FakeServer):
    """`/generate`, `/model_info`, `/server_info`, `/v1/models`, `/abort_request`, `/tokenize`, `/metrics`,
    `/load_lora_adapter`, `/unload_lora_adapter`, `/update_weights_from_disk`, and those that pause it."""

    def __init__(
        self, distribution: Distribution, faults: Faults | None = None, *, old_names: bool = False
    ) -> None:
        """`old_names`: the endpoints are called `/get_model_info` and `/get_server_info`."""
        super().__init__(distribution, faults)
        self.adapters: dict[str, Path] = {}
        self.weights: Path | None = None
        """What `/update_weights_from_disk` named last."""

        self.controls: list[str] = []
        """Paths of calls that paused it, and so on."""

        prefix = "/get_" if old_names else "/"
        for path, endpoint, method in [
            (f"{prefix}model_info", self._model_info, "GET"),
            (f"{prefix}server_info", self._server_info, "GET"),
            ("/v1/models", self._models, "GET"),
            ("/generate", self._generate, "POST"),
            ("/abort_request", self._abort_request, "POST"),
            ("/tokenize", self._tokenize, "POST"),
            ("/load_lora_adapter", self._load_adapter, "POST"),
            ("/unload_lora_adapter", self._unload_adapter, "POST"),
            ("/update_weights_from_disk", self._update_weights, "POST"),
            ("/metrics", self._metrics, "GET"),
            *(
                (f"/{path}", self._control, "POST")
                for path in ("pause_generation", "continue_generation", "release_memory_occupation")
            ),
            ("/resume_memory_occupation", self._control, "POST"),
        ]:
            self.app.add_api_route(path, endpoint, methods=[method], response_model=None)

    async def _model_info(self, request: Request) -> Any:
        if self.faults.key and (refused := self.refusal(request)):
            return refused
        weights = self.faults.weights[0] if self.faults.weights else "default"
        return {
            "model_path": "/models/served",
            "served_model_name": self.faults.models[0],
            "is_generation": True,
            "weight_version": weights,
        }

    async def _server_info(self) -> Any:
        return {"version": "0.5.23", "context_length": CONTEXT, "max_req_input_len": CONTEXT - 6}

    async def _models(self) -> Any:
        cards: list[dict[str, Any]] = [
            {"id": name, "max_model_len": CONTEXT, "parent": None} for name in self.faults.models
        ]
        for name, path in self.adapters.items():
            card = {"id": name, "root": str(path), "parent": self.faults.models[0], "max_model_len": None}
            cards.append(card)
        return {"data": cards}

    async def _load_adapter(self, request: Request) -> Response:
        body = await request.json()
        name, path = body["lora_name"], Path(body["lora_path"])
        if refused := self.refusal(request):
            return refused
        if name in self.adapters or not (path / "adapter_model.safetensors").exists():
            return JSONResponse({"success": False, "error_message": f"LoRA adapter {name} not loaded"}, 400)
        self.adapters[name] = path
        return JSONResponse({"success": True, "loaded_adapters": {name: str(path)}})

    async def _unload_adapter(self, request: Request) -> Response:
        if refused := self.refusal(request):
            return refused
        name = (await request.json())["lora_name"]
        found = self.adapters.pop(name, None)
        return JSONResponse({"success": found is not None}, 200 if found else 400)

    async def _control(self, request: Request) -> Response:
        if refused := self.refusal(request):
            return refused
        self.controls.append(request.url.path)
        return JSONResponse({"status": "ok"})

    async def _update_weights(self, request: Request) -> Response:
        body = await request.json()
        if refused := self.refusal(request):
            return refused
        self.weights, self.faults.weights = Path(body["model_path"]), [body["weight_version"]]
        return JSONResponse({"success": True, "message": "Succeeded to update model weights."})

    async def _metrics(self) -> Response:
        sampled = sum(len(each.ids) for each in self.log)
        return Response(f'sglang:generation_tokens_total{{model_name="served"}} {float(sampled)}\n')

    async def _tokenize(self, request: Request) -> Any:
        body = await request.json()
        if not self.faults.tokenizer:
            return JSONResponse({"detail": "Not Found"}, 404)
        ids = self.faults.tokenizer[body["prompt"]]
        return {"tokens": ids, "count": len(ids), "max_model_len": CONTEXT}

    async def _abort_request(self, request: Request) -> Response:
        self.aborted.append((await request.json())["rid"])
        return Response(status_code=200)

    async def _generate(self, request: Request) -> Response:
        body: dict[str, Any] = await request.json()
        self.requests.append(body)
        if refused := self.refusal(request) or self._invalid(body):
            return refused
        if self.faults.hang:
            await self.hang(request)
            return Response(status_code=499)
        await self.busy()
        return JSONResponse(self._generated(body))

    def _invalid(self, body: dict[str, Any]) -> Response | None:
        length, params, message = len(body["input_ids"]), body["sampling_params"], ""
        total = length + params["max_new_tokens"]
        if length >= CONTEXT:
            message = (
                f"The input ({length} tokens) is longer than the model's context length ({CONTEXT} tokens)."
            )
        elif total > CONTEXT:
            message = (
                f"Requested token count exceeds the model's maximum context length of {CONTEXT} tokens. You "
                f"requested a total of {total} tokens."
            )
        elif params["n"] > 1 and self.faults.siblings == "refused":
            message = "n must be 1"
        elif body.get("lora_path", "") not in {"", *self.adapters}:
            message = f"The following requested LoRA adapters are not loaded: {body['lora_path']}"
        elif body["logprob_start_len"] >= 0 and not self.faults.scores:
            message = "Prompt input logprobs (logprob_start_len) are not supported"
        return JSONResponse({"error": {"message": message}}, 400) if message else None

    def _generated(self, body: dict[str, Any]) -> Any:
        prompt, sampling = self.prompt_of(body["input_ids"]), body["sampling_params"]
        params = sampling | {
            "top": body["top_logprobs_num"],
            "max_tokens": sampling["max_new_tokens"],
            "seed": sampling.get("sampling_seed"),
        }
        equal = self.faults.siblings == "equal"
        first = self.sample(prompt, params, 0)
        sequences = [
            first,
            *(first if equal else self.sample(prompt, params, i) for i in range(1, sampling["n"])),
        ]
        answers = list[dict[str, Any]]()
        for sequence in sequences:
            pairs = zip(sequence.shown, sequence.ids, strict=True)
            finish: dict[str, Any] = {"type": "length", "length": len(sequence.ids)}
            if sequence.stopped:
                finish = {"type": "stop", "matched": self.log[-1].ids[-1]}
            if self.faults.abort:
                finish = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
            meta: dict[str, Any] = {
                "id": body.get("rid", "made-up"),
                "finish_reason": finish,
                "prompt_tokens": len(prompt),
                "completion_tokens": len(sequence.ids),
                "cached_tokens": 0,
                "weight_version": self.faults.weights[-1] if self.faults.weights else "default",
            }
            if self.faults.id_strings:
                meta["output_token_logprobs"] = [[as_json(value), token, None] for value, token in pairs]
            if body["top_logprobs_num"]:
                meta["output_top_logprobs"] = [
                    [
                        [as_json(value), token, None]
                        for token, value in sorted(top.items(), key=lambda e: -e[1])
                    ]
                    for top in sequence.top
                ]
            if body["logprob_start_len"] >= 0:
                meta["input_token_logprobs"] = self._input_logprobs(prompt, body["logprob_start_len"])
            if self.faults.weights and self.faults.spans:
                meta["weight_versions"] = [
                    {"version": name, "start": at, "end": at + 1}
                    for at, name in enumerate(self.faults.weights)
                ]
            answers.append({"text": "", "meta_info": meta})
            if self.faults.token_ids:
                answers[-1]["output_ids"] = sequence.ids
        del self.faults.weights[:-1]
        return answers if sampling["n"] > 1 else answers[0]

    def _input_logprobs(self, prompt: list[int], start: int) -> list[list[Any]]:
        """The first one has no log probability, wherever it starts."""
        pairs = list(zip(self.score(prompt), prompt, strict=True))[start:]
        return [[None if at == 0 else value, token, None] for at, (value, token) in enumerate(pairs)]
