"""A gateway under uvicorn, over a script that uses tools; its sampler's log is the oracle.

A user who says `add` gets reasoning, text and two tool calls; the tools' results are then read out; anything
else is echoed, one byte a token, which is no canonical tokenisation.
"""

from __future__ import annotations

import re
from pathlib import Path

from fastapi import FastAPI

from tinkerscript.config import SamplingConfig
from tinkerscript.gateway.claim_book import ClaimBook, OpenClaim
from tinkerscript.gateway.endpoint import create_gateway
from tinkerscript.rollouts.call import full_prompts
from tinkerscript.testing import MemoryClaimBook, ScriptedSampler
from tinkerscript.tokenizer import LightTokenizer
from tiny_tokenizer import MARKERS

PARAMETERS = {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "string"}}}
SUMS = "The sums are 0, 1"


class ScriptedServer:
    """An application to be served, with the claims `key0` to `key9`."""

    def __init__(self, folder: Path, served: ClaimBook | None = None) -> None:
        """`served`: instead of the claims."""
        self.claims = MemoryClaimBook({f"key{n}": self.claim(f"key{n}") for n in range(10)})
        self._tokenizer = LightTokenizer(folder)
        self.sampler = ScriptedSampler(self._script)
        gateway = create_gateway(
            claims=served or self.claims,
            sampler=self.sampler,
            model_folder=folder,
            model_name="tiny",
            sampling=SamplingConfig(max_tokens=400),
        )
        self.app = FastAPI()
        self.app.include_router(gateway.router)
        self.url = ""

    def claim(self, key: str) -> OpenClaim:
        return OpenClaim(key.replace("key", "episode"), 1, 0)

    def check_one_sequence(self, key: str, turns: int) -> None:
        """All calls of the claim form one chain whose prompts are what the sampler was given."""
        calls = self.claims.recorded[self.claim(key)]
        prompts = full_prompts(calls)
        assert len(calls) == turns
        assert [call.parent_id for call in calls] == [None, *(call.call_id for call in calls[:-1])]
        asked = {request.prompt for request in self.sampler.requests}
        assert {prompts[call.call_id] for call in calls} <= asked

    def _script(self, prompt: list[int]) -> list[int]:
        last = self._tokenizer.decode(prompt).rsplit("<|im_start|>user\n", 1)[1]
        if results := re.findall(r"<tool_response>\n(.*?)\n</tool_response>", last):
            return self._ids(f"<think>\nsum it\n</think>\n\nThe sums are {', '.join(results)}")
        if not last.startswith("add"):
            return self._ids(last.split("<|im_end|>")[0])
        call = '<tool_call>\n{"name": "add", "arguments": {"a": %s, "b": "é"}}\n</tool_call>'
        return self._ids("<think>\nI need tools\n</think>\n\nLet me add." + call % "1" + call % "2.0")

    def _ids(self, text: str) -> list[int]:
        pieces = re.split(r"(</?\w+>)", text)
        units = [unit for piece in pieces for unit in ([piece] if piece in MARKERS else piece)]
        return [token for unit in (*units, "<|im_end|>") for token in self._tokenizer.encode(unit)]
