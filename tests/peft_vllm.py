"""The fake of vLLM over a real model, with adapters that our plugin finds and PEFT applies."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from fake_vllm import FakeVllm, error
from inference_fakes import Faults
from peft_sglang import AdapterDistribution, AdapterModel
from tinkerscript.vllm_plugin import WeightSource


class PeftVllm(FakeVllm):
    """Serves a model's folder."""

    def __init__(self, folder: Path, source: WeightSource, faults: Faults) -> None:
        self.model, self._source = AdapterModel(folder), source
        self.adapters: dict[str, Path] = {}
        self._resolving = asyncio.Lock()
        super().__init__(AdapterDistribution(0, self.model.end, model=self.model), faults)
        self.app.add_api_route("/v1/unload_lora_adapter", self._unload, methods=["POST"], response_model=None)

    def restart(self) -> None:
        """As a process that has been started anew: without adapters."""
        self.adapters.clear()
        self.faults.models = self.faults.models[:1]

    async def _completions(self, request: Request) -> Response:
        name = (await request.json())["model"]
        async with self._resolving:
            if name not in self.faults.models:
                folder = await asyncio.to_thread(self._source.fetch, name)
                if folder is not None:
                    self.adapters[name] = folder
                    self.faults.models = (*self.faults.models, name)
        return await super()._completions(request)

    def _completion(self, body: dict[str, Any]) -> dict[str, Any]:
        adapter = self.adapters.get(body["model"])
        self.distribution = AdapterDistribution(0, self.model.end, model=self.model, adapter=adapter)
        return super()._completion(body)

    async def _unload(self, request: Request) -> Response:
        name = (await request.json())["lora_name"]
        self.faults.models = tuple(each for each in self.faults.models if each != name)
        if self.adapters.pop(name, None) is None:
            return error(f"The lora adapter '{name}' cannot be found.", "NotFoundError", 404)
        return Response(f"Success: LoRA adapter '{name}' removed successfully.")
