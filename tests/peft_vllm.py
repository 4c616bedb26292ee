"""The fake of vLLM over a real model, with weights that our plugin finds and checks, and PEFT applies."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from adapter_model import AdapterDistribution, AdapterModel
from fake_vllm import FakeVllm, error
from inference_fakes import Faults
from tinkerscript.vllm_plugin import WeightSource


class PeftVllm(FakeVllm):
    """Serves a model's folder, in development mode."""

    def __init__(self, folder: Path, source: WeightSource, faults: Faults) -> None:
        self.model, self._source = AdapterModel(folder), source
        self._folder = folder
        self.adapters: dict[str, Path] = {}
        self.lies: dict[str, str] = {}
        """Adapter -> the one that is applied in its place."""

        self.applies = True
        """Whether adapters and new weights have an effect at all."""

        self.fails = ""
        """Path of a request that is answered with an error."""

        self._goes_on = asyncio.Event()
        self._goes_on.set()
        self.controls: list[str] = []
        """Paths of the requests that paused it, put it to sleep, or replaced its weights."""

        self._resolving = asyncio.Lock()
        super().__init__(AdapterDistribution(0, self.model.end, model=self.model), faults)
        self.app.add_api_route("/v1/unload_lora_adapter", self._unload, methods=["POST"], response_model=None)
        for path in (
            *("pause", "resume", "sleep", "wake_up", "init_weight_transfer_engine"),
            *("start_weight_update", "update_weights", "finish_weight_update"),
        ):
            self.app.add_api_route(f"/{path}", self._control, methods=["POST"], response_model=None)

    def restart(self) -> None:
        """As a process that has been started anew: with the model's own weights, and without adapters."""
        self.adapters.clear()
        self.faults.models = self.faults.models[:1]
        self.faults.weights = []
        self.model = AdapterModel(self._folder)
        self.log.clear()

    async def _completions(self, request: Request) -> Response:
        name = (await request.json())["model"]
        await self._goes_on.wait()
        async with self._resolving:
            if name not in self.faults.models:
                await self._resolve(name)
        return await super()._completions(request)

    async def _resolve(self, name: str) -> None:
        folder = await asyncio.to_thread(self._source.fetch, name)
        if folder is not None:
            self.adapters[name] = folder
            self.faults.models = (*self.faults.models, name)

    def _completion(self, body: dict[str, Any]) -> dict[str, Any]:
        name = body["model"]
        adapter = self.adapters.get(self.lies.get(name, name)) if self.applies else None
        self.distribution = AdapterDistribution(0, self.model.end, model=self.model, adapter=adapter)
        return super()._completion(body)

    async def _unload(self, request: Request) -> Response:
        name = (await request.json())["lora_name"]
        self.faults.models = tuple(each for each in self.faults.models if each != name)
        if self.adapters.pop(name, None) is None:
            return error(f"The lora adapter '{name}' cannot be found.", "NotFoundError", 404)
        return Response(f"Success: LoRA adapter '{name}' removed successfully.")

    async def _control(self, request: Request) -> Response:
        path, body = request.url.path, await request.json()
        self.controls.append(path)
        if path == self.fails:
            return error("it failed", "InternalServerError", 500)
        match path:
            case "/pause":
                self._goes_on.clear()
            case "/resume":
                self._goes_on.set()
            case "/init_weight_transfer_engine":
                await asyncio.to_thread(self._source.verify, body["init_info"]["name"])
            case "/update_weights" if self.applies:
                files = self._source.files_of(body["update_info"]["name"])
                self.model.load(content for _, content in files)
            case "/finish_weight_update":
                self.faults.weights = [body["weight_version"]]
            case _:
                pass
        return JSONResponse({})
