"""A small random model of the Idefics3 family with the tiny model's tokens, its processor, and images."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import AddedToken, Tokenizer
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
from transformers.models.smolvlm.processing_smolvlm import DEFAULT_CHAT_TEMPLATE

from tinkerscript.model_folder import TINY_MODEL

TILE = 32
"""Pixels of the side of what the tower sees at once: 4 tokens."""

# Like SmolVLM's, it reads lists of parts only; its turns are those of the tiny model.
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{message['role']}}\n"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{part['text']}}"
    "{% elif part['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SMOLVLM_TEMPLATE = DEFAULT_CHAT_TEMPLATE
"""The published one."""

SPECIAL = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")


def make_vision_model(
    folder: Path,
    family: str = "Idefics3",
    *,
    seed: int = 0,
    splits: bool = True,
    context: int = 512,
    template: str = TEMPLATE,
) -> Path:
    """Write the model, its tokenizer and its processor's settings to `folder`. `family` may be SmolVLM."""
    folder.mkdir(parents=True)
    tokenizer = Tokenizer.from_file(str(TINY_MODEL / "tokenizer.json"))
    rows = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in (*SPECIAL, *rows)])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = json.loads((TINY_MODEL / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(template)
    end = tokenizer.token_to_id("<|im_end|>")
    torch.manual_seed(seed)
    text: dict[str, Any] = {
        **{"model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": context},
        **{"vocab_size": tokenizer.get_vocab_size(), "bos_token_id": None, "eos_token_id": end},
        "pad_token_id": tokenizer.token_to_id("<|endoftext|>"),
    }
    tower = {
        **{"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
        **{"image_size": TILE, "patch_size": 8},
    }
    config = getattr(transformers, f"{family}Config")(
        text_config=text,
        vision_config=tower,
        scale_factor=2,
        image_token_id=tokenizer.token_to_id("<image>"),
        pad_token_id=text["pad_token_id"],
        tie_word_embeddings=False,
    )
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config).eval()
    for parameter in model.parameters():  # So large that attention, and with it the image, is felt.
        if parameter.dim() > 1:
            parameter.data *= 4
    model.generation_config.eos_token_id = end
    model.save_pretrained(folder)
    kind = {"Idefics3": Idefics3ImageProcessorPil, "SmolVLM": SmolVLMImageProcessorPil}[family]
    kind(
        size={"longest_edge": 2 * TILE}, max_image_size={"longest_edge": TILE}, do_image_splitting=splits
    ).save_pretrained(folder)
    path = folder / "processor_config.json"
    saved = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({**saved, "image_seq_len": 4, "processor_class": "Idefics3Processor"}))
    return folder


def picture(seed: int = 0, size: tuple[int, int] = (40, 30), kind: str = "PNG") -> bytes:
    """An image file of random pixels, of `size` (width, height)."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


class Processor(Idefics3Processor):
    """transformers' own, with Pillow."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
        """The check imports all of transformers' tokenizers, and another package may break one."""
        return type(argument)


def own_processor(folder: Path) -> Processor:
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    kind = json.loads((folder / "preprocessor_config.json").read_text())["image_processor_type"]
    smol = "SmolVLM" in kind
    template = (folder / "chat_template.jinja").read_text()
    images = (SmolVLMImageProcessorPil if smol else Idefics3ImageProcessorPil).from_pretrained(folder)
    return Processor(images, tokenizer, image_seq_len=4, chat_template=template)
