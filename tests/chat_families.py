"""Chat families: model folders without weights, each with the chat template of a published model.

The templates in `chat_templates/` are written after the published ones, with what matters of them: default
system prompts and dates, reasoning that is stripped, tools that move, roles that alternate, ids of nine
characters, text that is trimmed. The tokenizers are made here: single bytes (or characters, with byte
fallback, as SentencePiece does) and each family's own special tokens.

| family | after the template of |
|---|---|
| `qwen3`, `qwen3_thinking` | Qwen/Qwen3-8B, Qwen/Qwen3-4B-Thinking-2507 |
| `qwen2.5` | Qwen/Qwen2.5-7B-Instruct |
| `llama3.1`, `llama3.2` | meta-llama/Llama-3.1-8B-Instruct, meta-llama/Llama-3.2-3B-Instruct |
| `mistral_v3` | mistralai/Mistral-7B-Instruct-v0.3 |
| `mistral_tekken` | mistralai/Mistral-Small-3.1-24B-Instruct-2503, calls as in tokenizer version 11 |
| `hermes` | NousResearch/Hermes-2-Pro-Llama-3-8B: two named templates |
| `deepseek_v3` | deepseek-ai/DeepSeek-V3, tools as in vLLM's tool_chat_template_deepseekv3.jinja |
| `gpt_oss` | openai/gpt-oss-20b, tools shortened |
| `glm4.5` | zai-org/GLM-4.5 |
| `smollm3` | HuggingFaceTB/SmolLM3-3B |
| `phi4_mini` | microsoft/Phi-4-mini-instruct, calls as it is trained to write them |
| `phi3.5` | microsoft/Phi-3.5-mini-instruct (no tools: they are text) |
| `gemma2` | google/gemma-2-2b-it (no tools: they are text; no system message) |
"""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from tinkerscript.tokenizer import LightTokenizer

TEMPLATES = Path(__file__).parent / "chat_templates"

WORDS = ["he", "ll", "hell", "hello", "to", "ol"]
"""Merged when encoded, so that spelling them out is not what encoding gives."""

MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("t", "o"), ("o", "l")]


def json_call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def llama_call(name: str, arguments: str) -> str:
    return f'{{"name": "{name}", "parameters": {arguments}}}'


def mistral_call(name: str, arguments: str) -> str:
    return f'[TOOL_CALLS] [{{"name": "{name}", "arguments": {arguments}}}]'


def tekken_call(name: str, arguments: str) -> str:
    return f"[TOOL_CALLS]{name}[ARGS]{arguments}"


def deepseek_call(name: str, arguments: str) -> str:
    call = f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"
    return f"<｜tool▁calls▁begin｜>{call}<｜tool▁calls▁end｜>"


def harmony_call(name: str, arguments: str) -> str:
    return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}"


def glm_call(name: str, arguments: str) -> str:
    pairs = json.loads(arguments).items()
    written = [(key, value if isinstance(value, str) else json.dumps(value)) for key, value in pairs]
    body = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in written)
    return f"\n<tool_call>{name}\n{body}</tool_call>"


def phi_call(name: str, arguments: str) -> str:
    return f'<|tool_call|>[{{"name": "{name}", "arguments": {arguments}}}]<|/tool_call|>'


@dataclass(frozen=True)
class Family:
    """One chat family."""

    name: str
    end: str
    """The token that the model samples at the end of a reply."""

    special: Sequence[str]
    added: Sequence[str] = ()
    """Tokens that are not special."""

    templates: dict[str, str] = field(default_factory=dict[str, str])
    """Name -> file; empty if there is only the one that is named after the family."""

    bos: str = ""
    eos: str = ""
    """The tokenizer's; `end` if empty."""

    stops: Sequence[str] = ()
    """More tokens at which generation stops, in generation_config.json."""

    sentencepiece: bool = False
    rstrip: bool = False
    """Whether special tokens swallow the white space after them (Phi-3)."""

    call: Callable[[str, str], str] | None = None
    """How the model writes a call; None if it has no tools."""

    reads_calls: bool = True
    call_end: str = ""
    """The token that ends a reply with a call; `end` if empty."""

    reply: Callable[[str], str] = str
    """How the model writes an answer."""

    thinks: bool = False
    """Whether the replies of the tests reason."""

    writes_tools: bool = True
    """Whether the template does; if not, they are text in the prompt."""

    system: bool = True
    """Whether there may be a system message."""

    def write(self, folder: Path, *, max_context: int = 8192, **config: Any) -> Path:
        """Write the model's folder, without weights."""
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer = _sentencepiece() if self.sentencepiece else _byte_level()
        tokenizer.add_special_tokens(
            [AddedToken(t, special=True, normalized=False, rstrip=self.rstrip) for t in self.special]
        )
        tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in self.added])
        tokenizer.save(str(folder / "tokenizer.json"))
        stops = [tokenizer.token_to_id(token) for token in (self.end, *self.stops)]
        data: dict[str, Any] = {"model_type": "other", "max_position_embeddings": max_context} | config
        write_json(folder / "config.json", data)
        write_json(folder / "generation_config.json", {"eos_token_id": stops})
        eos = {"__type": "AddedToken", "content": self.eos or self.end}
        fast = {"tokenizer_class": "PreTrainedTokenizerFast"}
        tokens = {"bos_token": self.bos or None, "eos_token": eos} | fast
        if self.templates:
            named = [{"name": n, "template": (TEMPLATES / f).read_text()} for n, f in self.templates.items()]
            write_json(folder / "tokenizer_config.json", tokens | {"chat_template": named})
        else:
            write_json(folder / "tokenizer_config.json", tokens)
            template = TEMPLATES / f"{self.name.replace('.', '_')}.jinja"
            shutil.copyfile(template, folder / "chat_template.jinja")
        return folder


def spell(tokenizer: LightTokenizer, text: str, rng: random.Random | None = None) -> list[int]:
    """Ids of `text`, markers as their own tokens and the rest a character or byte a token."""
    markers = "|".join(map(re.escape, sorted(tokenizer.added_tokens, key=len, reverse=True)))
    ids: list[int] = []
    for piece in re.split(f"({markers})", text):
        if piece in tokenizer.added_tokens:
            ids.append(tokenizer.added_tokens[piece])
            continue
        while piece:
            size = rng.choice((1, 1, 5)) if rng else 1
            ids += tokenizer.encode_after("", piece[:size])
            piece = piece[size:]
    return ids


def write_json(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data), encoding="utf-8")


def _byte_level() -> Tokenizer:
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *WORDS]
    made = Tokenizer(BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=MERGES))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return made


def _sentencepiece() -> Tokenizer:
    """Characters, and bytes for those that are not there; a space is put before a text, as Mistral's does."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    pieces += [chr(code) for code in range(33, 127)] + ["▁h", "▁hello", *WORDS]
    merges = [*MERGES, ("▁", "h"), ("▁", "hello")]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    made = Tokenizer(BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    made.normalizer = normalizers.Sequence([])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return made


_END = "<|endoftext|>"
_CHATML = (_END, "<|im_start|>", "<|im_end|>")
_TOOL_TAGS = ("<tool_call>", "</tool_call>")
_RESPONSE_TAGS = ("<tool_response>", "</tool_response>")
_THINK_TAGS = ("<think>", "</think>")
_LLAMA = (
    *("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|eot_id|>", "<|eom_id|>", "<|python_tag|>"),
)
_MISTRAL = (
    *("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
)
_TEKKEN = (*_MISTRAL, "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[ARGS]", "[CALL_ID]")
_DEEPSEEK = (
    *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
    *("<｜tool▁sep｜>", "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>"),
    *("<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
)
_HARMONY = (
    _END,
    "<|start|>",
    "<|end|>",
    "<|message|>",
    "<|channel|>",
    "<|constrain|>",
    "<|return|>",
    "<|call|>",
)
_GLM = (_END, "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
_GLM_TAGS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", *_RESPONSE_TAGS)
_PHI = (_END, "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
_PHI4 = (*_PHI, "<|tool|>", "<|/tool|>", "<|tool_call|>", "<|/tool_call|>", "<|tool_response|>")
_GEMMA = ("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>")


def _qwen3(name: str, written: Callable[[str], str]) -> Family:
    return Family(
        *(name, "<|im_end|>", _CHATML, (*_THINK_TAGS, *_TOOL_TAGS, *_RESPONSE_TAGS)),
        stops=[_END],
        call=lambda name, arguments: written(json_call(name, arguments)),
        reply=written,
        thinks=True,
    )


def _llama(name: str) -> Family:
    stops = ["<|end_of_text|>", "<|eom_id|>"]
    return Family(name, "<|eot_id|>", _LLAMA, bos="<|begin_of_text|>", stops=stops, call=llama_call)


def _gpt_oss(written: str) -> str:
    return f"<|channel|>analysis<|message|>hm<|end|><|start|>assistant{written}"


_ALL = (
    _qwen3("qwen3", lambda text: f"<think>\nhm\n</think>\n\n{text}"),
    _qwen3("qwen3_thinking", lambda text: f"hm\n</think>\n\n{text}"),
    Family("qwen2.5", "<|im_end|>", _CHATML, _TOOL_TAGS, stops=[_END], call=json_call),
    _llama("llama3.1"),
    _llama("llama3.2"),
    Family(
        *("mistral_v3", "</s>", _MISTRAL),
        bos="<s>",
        sentencepiece=True,
        call=mistral_call,
        reply=lambda text: " " + text,
    ),
    Family("mistral_tekken", "</s>", _TEKKEN, bos="<s>", call=tekken_call),
    Family(
        *("hermes", "<|im_end|>", (*_CHATML, "<|begin_of_text|>")),
        templates={"default": "hermes_default.jinja", "tool_use": "hermes_tool_use.jinja"},
        bos="<|begin_of_text|>",
        call=json_call,
    ),
    Family("deepseek_v3", _DEEPSEEK[1], _DEEPSEEK, bos=_DEEPSEEK[0], call=deepseek_call),
    Family(
        *("gpt_oss", "<|return|>", _HARMONY),
        stops=["<|call|>", _END],
        call=lambda name, arguments: _gpt_oss(harmony_call(name, arguments)),
        call_end="<|call|>",
        reply=lambda text: _gpt_oss(f"<|channel|>final<|message|>{text}"),
        thinks=True,
    ),
    Family(
        *("glm4.5", "<|user|>", _GLM, (*_THINK_TAGS, *_TOOL_TAGS, *_GLM_TAGS)),
        eos=_END,
        stops=[_END, "<|observation|>"],
        call=lambda name, arguments: "\n<think></think>" + glm_call(name, arguments),
        call_end="<|observation|>",
        reply=lambda text: f"\n<think></think>\n{text}",
    ),
    Family("smollm3", "<|im_end|>", _CHATML, (*_THINK_TAGS, *_TOOL_TAGS), call=json_call),
    Family("phi4_mini", "<|end|>", _PHI4, eos=_END, call=phi_call, reads_calls=False),
    Family(
        *("phi3.5", "<|end|>", _PHI),
        call=json_call,
        writes_tools=False,
        eos=_END,
        rstrip=True,
        sentencepiece=True,
    ),
    Family(
        *("gemma2", "<end_of_turn>", _GEMMA),
        call=json_call,
        writes_tools=False,
        bos="<bos>",
        eos="<eos>",
        sentencepiece=True,
        system=False,
    ),
)
FAMILIES = {family.name: family for family in _ALL}
"""By name."""
