"""Prompts with images: the same numbers as the model's own forward pass over the processor's tensors."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from peft import LoraConfig, get_peft_model
from PIL import ExifTags, Image

from tinkerscript.engine.embedded import EmbeddedEngine
from tinkerscript.engine.image_features import IdsWithImages, ImageReader
from tinkerscript.engine.lora import target_modules
from tinkerscript.engine.running_batch import SampledRow
from tinkerscript.engine.weights import LoraSettings, load_model
from tinkerscript.errors import EngineRequestError
from tinkerscript.rollouts.call import PlacedImage
from vision_model import data_url, make_vision_model, own_processor, picture

LORA = LoraSettings(rank=2, targets=("attn", "mlp", "unembed"))
ONE, OTHER = picture(0), picture(1)
SEED = 3
"""With it, no reply has a placeholder."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_model(tmp_path_factory.mktemp("vision") / "model")


@pytest.fixture
def engine(folder: Path, tmp_path: Path) -> Iterator[EmbeddedEngine]:
    with EmbeddedEngine(folder, checkpoint_dir=tmp_path, lora=LORA) as engine:
        yield engine


class Prompt:
    """A conversation's ids, and the processor's tensors."""

    def __init__(self, folder: Path, *files: bytes) -> None:
        images = [{"type": "image", "url": data_url(each)} for each in files]
        message = {"role": "user", "content": [*images, {"type": "text", "text": "What is it?"}]}
        processor = own_processor(folder)
        self.inputs: dict[str, Any] = processor.apply_chat_template(
            [message], tokenize=True, return_dict=True, add_generation_prompt=True, return_tensors="pt"
        )
        self.ids: list[int] = self.inputs["input_ids"][0].tolist()
        places = [at for at, token in enumerate(self.ids) if token == processor.image_token_id]
        each = len(places) // max(1, len(files))
        self.images = [PlacedImage(places[each * number], data) for number, data in enumerate(files)]


def own_logprobs(model: Any, prompt: Prompt, sampled: list[int]) -> torch.Tensor:
    """(R,): of the `sampled` ids, in the model's own forward pass over the processor's tensors."""
    reply = torch.tensor([sampled])
    inputs = {name: prompt.inputs[name] for name in ("pixel_values", "pixel_attention_mask")}
    ids = torch.cat([prompt.inputs["input_ids"], reply], dim=1)
    logits = model(input_ids=ids, **inputs).logits[0, len(prompt.ids) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, reply[0, :, None])[:, 0]


def assert_close(found: Any, expected: torch.Tensor) -> None:
    assert list(found) == pytest.approx(expected.tolist(), abs=1e-5)


def sampled(
    engine: EmbeddedEngine,
    prompt: Prompt,
    images: list[PlacedImage] | None = None,
    seed: int = 1,
    number: int = 1,
) -> list[SampledRow]:
    """Replies without a placeholder, which transformers' forward pass would take for an image."""
    client = engine.create_sampling_client().result()
    given = prompt.images if images is None else images
    placeholder = engine._model.config.image_token_id
    while True:
        params = tinker.SamplingParams(max_tokens=8, seed=seed, stop=[])
        rows = client.sample_rows(prompt.ids, number, params, images=given).result()
        if not any(placeholder in row.ids for row in rows):
            return rows
        seed += 1


def datum(prompt: Prompt, reply: list[int], images: list[PlacedImage] | None = None) -> tinker.Datum:
    """`cross_entropy` on the reply."""
    ids = [*prompt.ids, *reply]
    weights = np.zeros(len(ids) - 1, np.float32)
    weights[len(prompt.ids) - 1 :] = 1
    inputs: Any = {"target_tokens": np.asarray(ids[1:], np.int64), "weights": weights}
    placed = tuple(prompt.images if images is None else images)
    text = tinker.ModelInput.from_ints(ids[:-1])
    return tinker.Datum(model_input=IdsWithImages(chunks=text.chunks, images=placed), loss_fn_inputs=inputs)


def trained(engine: EmbeddedEngine, *data: tinker.Datum) -> list[np.ndarray]:
    """The trainer's logprobs of each reply."""
    output = engine.create_training_client().forward(list(data), "cross_entropy").result()
    return [
        row["logprobs"].to_numpy()[each.loss_fn_inputs["weights"].to_numpy() > 0]
        for each, row in zip(data, output.loss_fn_outputs, strict=True)
    ]


def odd_files() -> Iterator[bytes]:
    with Image.open(io.BytesIO(picture(4))) as image:
        exif = image.getexif()
        exif[ExifTags.Base.Orientation] = 6
        transparent = image.convert("RGBA")
        transparent.putalpha(90)
        for kind, made, more in (
            ("JPEG", image, {"exif": exif}),
            ("PNG", transparent, {}),
            ("WEBP", transparent, {}),
            ("PNG", image.convert("P"), {}),
        ):
            file = io.BytesIO()
            made.save(file, kind, **more)
            yield file.getvalue()


@pytest.mark.parametrize("family", ["Idefics3", "SmolVLM"])
def test_samples_have_the_logprobs_of_the_models_own_forward_pass(family: str, tmp_path: Path) -> None:
    folder = make_vision_model(tmp_path / "model", family)
    own = load_model(folder)
    # Two images; then one that is turned, transparent, or of a palette, as transformers loads them.
    prompts = [Prompt(folder, ONE, OTHER), *(Prompt(folder, each) for each in odd_files())]
    with EmbeddedEngine(folder, checkpoint_dir=tmp_path, lora=LORA) as engine:
        rows = [sampled(engine, prompt)[0] for prompt in prompts]
        data = [datum(prompt, row.ids) for prompt, row in zip(prompts, rows, strict=True)]
        for prompt, row, logprobs in zip(prompts, rows, trained(engine, *data), strict=True):
            expected = own_logprobs(own, prompt, row.ids)
            assert_close(row.logprobs, expected)
            assert_close(logprobs, expected)
    swapped = Prompt(folder, OTHER, ONE)
    assert rows[0].logprobs != pytest.approx(own_logprobs(own, swapped, rows[0].ids).tolist(), abs=1e-2)


def test_the_trainer_computes_the_gradient_of_peft(engine: EmbeddedEngine, folder: Path) -> None:
    prompts = [Prompt(folder, ONE), Prompt(folder, OTHER), Prompt(folder, ONE, OTHER)]
    rows = [sampled(engine, prompt)[0] for prompt in prompts]
    data = [datum(prompt, row.ids) for prompt, row in zip(prompts, rows, strict=True)]
    weights: Any = engine._trainer.weights
    theirs = load_model(folder).requires_grad_(False)
    targets = target_modules(theirs, LORA.targets)
    wrapped: Any = get_peft_model(theirs, LoraConfig(r=LORA.rank, lora_alpha=32, target_modules=targets))
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for path, pair in weights._factors().items():
            layer = wrapped.base_model.model.get_submodule(path)
            for mine, other in zip(pair, (layer.lora_A, layer.lora_B), strict=True):
                mine.copy_(torch.randn(mine.shape, generator=random) / 10)
                other["default"].weight.copy_(mine)
    engine.create_training_client().forward_backward(data, "cross_entropy").result()
    for prompt, row in zip(prompts, rows, strict=True):
        (-own_logprobs(wrapped, prompt, row.ids).sum()).backward()
    for path, pair in weights._factors().items():
        layer = wrapped.base_model.model.get_submodule(path)
        for mine, other in zip(pair, (layer.lora_A, layer.lora_B), strict=True):
            expected = other["default"].weight.grad
            assert expected.norm() > 0
            assert (mine.grad - expected).norm() <= 1e-5 * expected.norm(), path
    assert not any(parameter.grad is not None for parameter in engine._model.model.vision_model.parameters())


def test_a_prefix_is_shared_with_the_same_image_and_never_with_another(
    engine: EmbeddedEngine, folder: Path
) -> None:
    """Both prompts have the same ids."""
    one, other = Prompt(folder, ONE), Prompt(folder, OTHER)
    assert one.ids == other.ids
    client = engine.create_sampling_client().result()
    params = tinker.SamplingParams(max_tokens=4, seed=SEED, stop=[])

    def logprobs(prompt: Prompt) -> tuple[list[int], list[float], int]:
        before = client._batch.prefilled_tokens
        (row,) = client.sample_rows(prompt.ids, 1, params, images=prompt.images).result()
        return row.ids, row.logprobs, client._batch.prefilled_tokens - before

    own = load_model(folder)
    for prompt in (one, other):
        ids, found, prefilled = logprobs(prompt)
        assert_close(found, own_logprobs(own, prompt, ids))
        assert prefilled >= len(prompt.ids) - one.images[0].start
    assert logprobs(one)[2] == 0
    assert logprobs(other)[2] == 0

    # A second turn continues from the first, with the image in the part that is not computed again.
    ids, _, _ = logprobs(one)
    longer = Prompt(folder, ONE)
    longer.ids = [*one.ids, *ids, *one.ids[-5:]]
    longer.inputs = {**longer.inputs, "input_ids": torch.tensor([longer.ids])}
    more, found, prefilled = logprobs(longer)
    assert_close(found, own_logprobs(own, longer, more))
    assert prefilled <= 6


def test_rows_that_share_a_prompt_with_an_image_train_in_one_row(
    engine: EmbeddedEngine, folder: Path
) -> None:
    """And equal ids after another image do not join it."""
    one, other = Prompt(folder, ONE), Prompt(folder, OTHER)
    rows = sampled(engine, one, number=3)
    data = [datum(one, row.ids) for row in rows] + [datum(other, rows[0].ids)]
    own = load_model(folder)
    *found, last = trained(engine, *data)
    for row, logprobs in zip(rows, found, strict=True):
        assert logprobs == pytest.approx(row.logprobs, abs=1e-5)
    assert_close(last, own_logprobs(own, other, rows[0].ids))
    assert last != pytest.approx(rows[0].logprobs, abs=1e-2)


def test_a_sampled_placeholder_is_a_token_and_no_image(engine: EmbeddedEngine, folder: Path) -> None:
    """The model may sample `<image>`: only the prompt's placeholders stand for images."""
    prompt = Prompt(folder, ONE)
    placeholder = engine._model.config.image_token_id
    longer = Prompt(folder, ONE)
    longer.ids = [*prompt.ids, placeholder, placeholder]
    (row,) = sampled(engine, longer)
    model = load_model(folder)
    with torch.no_grad():
        embedded = model.get_input_embeddings()(torch.tensor([[*longer.ids, *row.ids]]))
        pixels = {name: prompt.inputs[name] for name in ("pixel_values", "pixel_attention_mask")}
        features = model.get_image_features(**pixels).pooler_output.flatten(0, 1)
        places = [at for at, token in enumerate(prompt.ids) if token == placeholder]
        embedded[0, places] = features
        logits = model(inputs_embeds=embedded).logits[0, len(longer.ids) - 1 : -1]
    assert_close(row.logprobs, logits.log_softmax(-1).gather(-1, torch.tensor(row.ids)[:, None])[:, 0])


@pytest.mark.parametrize("shift", [1, 30])
def test_an_image_that_is_not_where_its_placeholders_are_is_refused(
    engine: EmbeddedEngine, folder: Path, shift: int
) -> None:
    prompt = Prompt(folder, ONE)
    wrong = [PlacedImage(prompt.images[0].start + shift, ONE)]
    with pytest.raises(EngineRequestError, match="placeholders"):
        sampled(engine, prompt, wrong)
    with pytest.raises(EngineRequestError, match="placeholders"):
        trained(engine, datum(prompt, [1, 2], wrong))
    assert sampled(engine, prompt)[0].ids  # The engine goes on.


def test_a_file_that_no_decoder_reads_fails_alone(engine: EmbeddedEngine, folder: Path) -> None:
    prompt = Prompt(folder, ONE)
    broken = [PlacedImage(prompt.images[0].start, ONE[:40])]
    client = engine.create_sampling_client().result()
    params = tinker.SamplingParams(max_tokens=8, seed=1, stop=[])
    fine = client.sample_rows(prompt.ids, 1, params, images=prompt.images)
    failed = client.sample_rows(prompt.ids, 1, params, images=broken)
    with pytest.raises(OSError, match="image"):
        failed.result()
    again = client.sample_rows(prompt.ids, 1, params, images=prompt.images)
    assert fine.result()[0].ids == again.result()[0].ids


def test_a_model_without_a_tower_takes_no_images(tmp_path: Path) -> None:
    with EmbeddedEngine("tiny", checkpoint_dir=tmp_path) as engine:
        client = engine.create_sampling_client().result()
        params = tinker.SamplingParams(max_tokens=1)
        with pytest.raises(EngineRequestError, match="a qwen3 takes only text"):
            client.sample_rows([1, 2], 1, params, images=[PlacedImage(0, ONE)]).result()


def test_several_devices_take_no_images(folder: Path) -> None:
    prompt = Prompt(folder, ONE)
    reader = ImageReader(load_model(folder), folder, devices=2)
    with pytest.raises(EngineRequestError, match=r"set engine\.devices to 1"):
        reader.read(prompt.ids, prompt.images)
    assert reader.read([1], []) == ([1], [])


def test_all_weights_train_except_the_tower(folder: Path, tmp_path: Path) -> None:
    """The features of an image stay the same from version to version."""
    prompt = Prompt(folder, ONE)
    with EmbeddedEngine(folder, checkpoint_dir=tmp_path) as engine:
        (row,) = sampled(engine, prompt)
        before = {name: value.clone() for name, value in engine._model.state_dict().items()}
        client = engine.create_training_client()
        client.forward_backward([datum(prompt, row.ids)], "cross_entropy").result()
        client.optim_step(tinker.AdamParams(learning_rate=1e-2)).result()
        changed = {
            name for name, value in engine._model.state_dict().items() if not value.equal(before[name])
        }
        assert changed
        assert not any("vision_model" in name or "connector" in name for name in changed)
        (row,) = sampled(engine, prompt)
        expected = own_logprobs(engine._model, prompt, row.ids)
        assert_close(row.logprobs, expected)
        assert_close(*trained(engine, datum(prompt, row.ids)), expected)
        client.save_state("one").result()
    assert (tmp_path / "one" / "preprocessor_config.json").is_file()
    with EmbeddedEngine(tmp_path / "one", checkpoint_dir=tmp_path) as again:
        assert sampled(again, prompt)[0].ids == row.ids
