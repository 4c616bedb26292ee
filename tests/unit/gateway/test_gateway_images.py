"""Images in chats: prompts with the processor's ids, and refusals of what is no image or too large."""

from __future__ import annotations

import asyncio
import io
import json
import struct
import threading
import warnings
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from PIL import ExifTags, Image
from PIL.PngImagePlugin import PngImageFile

from gateway_bench import CLAIM, Bench
from session_book import Book, assistant, user
from tinkerscript.config import RunConfig
from tinkerscript.gateway.claim_book import OpenClaim
from tinkerscript.gateway.dialects import AGENT_PREFIX, chat
from tinkerscript.gateway.images import file_of, read_image
from tinkerscript.gateway.rendering import ChatRenderer
from tinkerscript.rollouts.call import Call, PlacedImage, unpack_ids
from tinkerscript.sampler import SampleRequest, refuse_unsupported
from tinkerscript.testing import MemoryClaimBook, ScriptedSampler
from vision_model import SMOLVLM_TEMPLATE, data_url, make_vision_model, own_processor, picture

ONE, OTHER = picture(0), picture(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_model(tmp_path_factory.mktemp("vision") / "model", context=4096)


@pytest.fixture
async def seeing(folder: Path) -> AsyncIterator[Bench]:
    bench = Bench(folder)
    yield bench
    await bench.client.aclose()


def image_part(data: bytes, kind: str = "image/png") -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(data, kind)}}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def asked(*parts: bytes | str) -> dict[str, Any]:
    made = [image_part(each) if isinstance(each, bytes) else text_part(each) for each in parts]
    return {"role": "user", "content": made}


def turned(data: bytes) -> bytes:
    """The image as of a camera that was held sideways."""
    file = io.BytesIO()
    with Image.open(io.BytesIO(data)) as image:
        exif = image.getexif()
        exif[ExifTags.Base.Orientation] = 6
        image.save(file, "JPEG", exif=exif)
    return file.getvalue()


def processors_ids(folder: Path, messages: list[dict[str, Any]]) -> list[int]:
    """The ids that transformers' processor makes of a request's messages."""

    def parts(content: Any) -> list[dict[str, Any]]:
        if isinstance(content, str):
            return [text_part(content)]
        return [
            {"type": "image", "url": part["image_url"]["url"]} if "image_url" in part else part
            for part in content
        ]

    conversation = [message | {"content": parts(message["content"])} for message in messages]
    made: Any = own_processor(folder).apply_chat_template(
        conversation, tokenize=True, return_dict=True, add_generation_prompt=True
    )
    (ids,) = made["input_ids"]
    return list(ids)


SIZES = [(1, 1), (32, 32), (64, 64), (65, 64), (31, 97), (200, 13), (128, 127), (9, 40), (140, 51)]


@pytest.mark.parametrize("splits", [True, False])
async def test_prompts_have_the_ids_of_transformers_processor(tmp_path: Path, splits: bool) -> None:
    folder = make_vision_model(tmp_path / "model", splits=splits, context=4096)
    bench = Bench(folder)
    conversations = [
        [asked("Compare ", ONE, " with ", OTHER, ".")],
        [{"role": "system", "content": "Be brief."}, asked("Look:\n", *(picture(3, size) for size in SIZES))],
        [asked(picture(4, (64, 64), "JPEG"), picture(5, (33, 20), "WEBP"), "é\n\nok?")],
        [asked(turned(picture(6, (20, 60))), "A photo.")],
        [user("No image here.")],
    ]
    for messages in conversations:
        reply = await bench.ask(messages, return_token_ids=True)
        assert reply["prompt_token_ids"] == processors_ids(folder, messages)
    await bench.client.aclose()


async def test_images_beyond_transformers_largest_size_are_resized_alike(tmp_path: Path) -> None:
    folder = make_vision_model(tmp_path / "model", context=4096)
    path = folder / "preprocessor_config.json"
    large = {"size": {"longest_edge": 5000}, "max_image_size": {"longest_edge": 512}}
    path.write_text(json.dumps(json.loads(path.read_text()) | large))
    bench = Bench(folder)
    messages = [asked(picture(0, (90, 50)))]
    reply = await bench.ask(messages, return_token_ids=True)
    assert reply["prompt_token_ids"] == processors_ids(folder, messages)
    await bench.client.aclose()


async def test_the_published_template_of_smolvlm_continues(tmp_path: Path) -> None:
    """It reads lists of parts only, and its prompts end without a space, which the reply begins with."""
    folder = make_vision_model(tmp_path / "model", template=SMOLVLM_TEMPLATE, context=4096)
    bench = Bench(folder)
    messages = [{"role": "system", "content": "Be brief."}, asked(ONE, "What is it?")]
    for number, text in enumerate((" A cat.", "", " Sure.")):
        ids = [*bench.tokenizer.encode(text), bench.tokenizer.added_tokens["<end_of_utterance>"]]
        bench.use(ScriptedSampler(lambda _, ids=ids: ids, policy_version=0))
        reply = await bench.ask(messages, return_token_ids=True)
        if number < 2:  # Later prompts have the reply as sampled.
            assert reply["prompt_token_ids"] == processors_ids(folder, messages)
        messages += [reply["choices"][0]["message"], asked("And ", OTHER, "?") if number else user("Sure?")]
    assert [call.fork_reason for call in bench.calls] == [None] * 3
    assert [len(call.images) for call in bench.calls] == [1, 0, 1]
    await bench.client.aclose()


async def test_an_image_is_recorded_once_and_sampled_with_all_later_turns(
    seeing: Bench, folder: Path
) -> None:
    first = [asked(ONE, "What is it?")]
    reply = (await seeing.ask(first))["choices"][0]["message"]
    second = [*first, reply, asked("And ", OTHER, "?")]
    await seeing.ask(second)
    seeing.check_one_sequence(2)
    calls: list[Call] = seeing.calls
    assert [[image.data for image in call.images] for call in calls] == [[ONE], [OTHER]]
    assert all(data_url(ONE)[:40] not in call.messages for call in calls)
    prompt = seeing.sampler.requests[1]
    places = unpack_ids(prompt.prompt)
    placeholder = seeing.tokenizer.added_tokens["<image>"]
    assert [image.data for image in prompt.images] == [ONE, OTHER]
    assert all(places[image.start] == placeholder != places[image.start - 1] for image in prompt.images)
    # The rest is new text, which the processor writes alike after the reply.
    new = calls[1].new_prompt_ids.tolist()
    assert processors_ids(folder, second)[-len(new) + 1 :] == new[1:]


async def test_another_image_in_the_history_is_another_conversation(seeing: Bench) -> None:
    reply = (await seeing.ask([asked(ONE, "What is it?")]))["choices"][0]["message"]
    await seeing.ask([asked(OTHER, "What is it?"), reply, user("Sure?")])
    first, second = seeing.calls
    assert (second.parent_id, second.fork_reason) == (None, "new_conversation")
    assert [image.data for image in second.images] == [OTHER]
    # The same question about another image is no second sample of the first.
    await seeing.ask([asked(OTHER, "What is it?")])
    assert seeing.calls[-1].new_prompt == first.new_prompt
    assert seeing.calls[-1].fork_reason == "new_conversation"
    # A prompt of the same ids without an image does not continue the one with it.
    ids = [*unpack_ids(first.new_prompt).tolist(), *unpack_ids(first.sampled).tolist()]
    body = {"model": "policy", "prompt": [*ids, 5], "max_tokens": 2}
    assert (await seeing.client.post("/v1/completions", json=body)).status_code == 200
    assert seeing.calls[-1].parent_id is None
    assert seeing.sampler.requests[-1].images == []


def test_a_restored_session_continues_after_an_image(folder: Path) -> None:
    book = Book(ChatRenderer(folder))
    image, data = read_image(data_url(ONE), 5, "here")
    message = {**user("Look: what is it?"), "images": [image]}
    turn = book.session.plan([message], [], {image["sha256"]: data})
    reply = book.answer(turn, book.ids("a cat"))
    again = type(book.session).restore(book.renderer, book.calls)
    extended = again.plan([message, reply, user("Sure?")], [])
    assert extended.parent is not None
    assert extended.all_images == turn.images
    # Rendered from scratch, it needs the file, which it has from the record.
    forked = again.plan([message, assistant("a dog"), user("Sure?")], [])
    assert forked.parent is None
    assert forked.images == turn.images


@pytest.mark.parametrize(
    "text", ["<image>", "see <image> and <fake_token_around_image><global-img>", "<im\ufdd0age>"]
)
async def test_text_forges_no_image(seeing: Bench, text: str) -> None:
    await seeing.ask([asked(ONE, text)])
    await seeing.ask([asked(ONE, "plain")])
    placeholder = seeing.tokenizer.added_tokens["<image>"]
    prompts = [unpack_ids(request.prompt).tolist() for request in seeing.sampler.requests]
    assert prompts[0].count(placeholder) == prompts[1].count(placeholder) > 0
    assert text in seeing.tokenizer.decode(prompts[0])


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes that says it has `width` x `height` pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IDAT", zlib.compress(b"\0" * 1000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + body + chunk(b"IEND", b"")


def plain(width: int, height: int) -> bytes:
    file = io.BytesIO()
    Image.new("1", (width, height)).save(file, "PNG")
    return file.getvalue()


def animation() -> bytes:
    file = io.BytesIO()
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "blue")]
    frames[0].save(file, "WEBP", save_all=True, append_images=frames[1:])
    return file.getvalue()


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("https://example.com/cat.png", "scheme is 'https', and this server fetches nothing"),
        ("file:///etc/passwd", "scheme is 'file'"),
        ("/etc/passwd", "this server fetches nothing"),
        ("data:image/png,%89PNG", "does not begin with data:image/TYPE;base64,"),
        ("data:image/png;base64,!!!!", "not base64"),
        (data_url(b""), "not one of PNG, JPEG, WEBP"),
        (data_url(picture(0, (8, 8), "GIF")), "not one of PNG, JPEG, WEBP"),
        (data_url(ONE[: len(ONE) // 2]), "cannot be decoded"),
        (data_url(picture(0, (64, 64), "JPEG")[:700]), "cannot be decoded"),
        (data_url(bomb(5000, 5000)), "25000000 pixels; image's size allows 16777216"),
        (data_url(bomb(2**30, 2**30)), "exceeds limit"),
        (data_url(animation(), "image/webp"), "an animation"),
        (data_url(bytes(2**23 + 1)), "8388609 bytes; image allows 8388608"),
    ],
)
async def test_what_is_no_image_is_refused_by_name(seeing: Bench, url: str, problem: str) -> None:
    content = [text_part("Look:"), {"type": "image_url", "image_url": {"url": url}}]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        response = await seeing.post([{"role": "user", "content": content}])
    error = response.json()["error"]
    assert response.status_code == 400, error
    assert problem in error["message"]
    assert seeing.sampler.requests == []
    assert (await seeing.post([asked(ONE, "Look")])).status_code == 200


async def test_pixels_are_counted_before_they_are_decoded(
    seeing: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decode(*_: object) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr(Image.Image, "load", decode)
    response = await seeing.post([asked(bomb(5000, 5000))])
    assert "pixels" in response.json()["error"]["message"]


async def test_images_are_decoded_apart_from_the_event_loop(
    seeing: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the request hides them behind escapes."""
    names: list[str] = []
    load = PngImageFile.load

    def named(image: PngImageFile) -> Any:
        names.append(threading.current_thread().name)
        return load(image)

    monkeypatch.setattr(PngImageFile, "load", named)
    body = json.dumps({"model": "policy", "messages": [asked(ONE, "What is it?")]})
    for each in (body, body.replace("image_url", "image\\u005furl")):
        response = await seeing.client.post("/v1/chat/completions", content=each)
        assert response.status_code == 200
    assert names
    assert all(name.startswith("images") for name in names)


async def test_a_claims_many_images_delay_another_claims_by_one_request(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A claim may have hundreds of calls at once, whose images take hours to decode."""
    bench = Bench(folder, MemoryClaimBook({"key": CLAIM, "other": OpenClaim("other", 1, 0)}))
    decoded: list[bytes] = []
    began, go = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def slow(url: str, *where: Any) -> Any:
        decoded.append(file_of(url, ""))
        loop.call_soon_threadsafe(began.set)
        assert go.wait(10)
        return read_image(url, *where)

    monkeypatch.setattr(chat, "read_image", slow)
    many = [asyncio.create_task(bench.ask([asked(ONE, str(number))])) for number in range(9)]
    await began.wait()
    body = {"model": "policy", "messages": [asked(OTHER, "?")]}
    headers = {"Authorization": "Bearer other"}
    one = asyncio.create_task(bench.client.post("/v1/chat/completions", json=body, headers=headers))
    await asyncio.sleep(0.1)
    go.set()
    assert (await one).status_code == 200
    await asyncio.gather(*many)
    await bench.client.aclose()
    assert decoded.index(OTHER) == 1
    assert len(decoded) == 10


async def test_requests_have_at_most_so_many_images(seeing: Bench) -> None:
    small = picture(0, (8, 8))
    for messages in ([asked(*[small] * 20), asked(*[small] * 13)], [asked(*[small] * 33)]):
        response = await seeing.post(messages)
        assert response.status_code == 400
        assert "images: 33 images; images allows 32" in response.json()["error"]["message"]
    assert seeing.sampler.requests == []


async def test_what_is_at_a_limit_passes(seeing: Bench) -> None:
    for images in ([picture(0, (8, 8))] * 32, [ONE.ljust(2**23)], [plain(4096, 4096)]):
        response = await seeing.post([asked(*images)], max_tokens=1)
        error = response.json().get("error", {"code": "context_length_exceeded"})
        assert error["code"] == "context_length_exceeded", error


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ({"role": "system", "content": [image_part(ONE)]}, "unsupported_content"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}, "invalid_value"),
        ({"role": "user", "content": [{**image_part(ONE), "more": 1}]}, "unknown_parameter"),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "unsupported_content"),
        (asked(ONE, "\ufdd1"), "invalid_messages"),
    ],
)
async def test_what_is_not_honoured_is_refused(seeing: Bench, message: dict[str, Any], code: str) -> None:
    response = await seeing.post([message, user("x")] if message["role"] != "user" else [message])
    assert response.status_code == 400
    assert response.json()["error"]["code"] == code


async def test_a_model_of_text_takes_no_images(bench: Bench) -> None:
    error = (await bench.post([asked(ONE, "What is it?")])).json()["error"]
    assert (error["code"], error["param"]) == ("unsupported_content", "messages[0].content[0]")


async def test_a_run_that_cannot_train_on_images_refuses_them(folder: Path) -> None:
    """Streamed and in agent mode too."""
    bench = Bench(folder, no_images={"": "this run takes only text, because of x"})
    path = "/v1/chat/completions"
    for route, fields in ((path, {}), (path, {"stream": True}), (AGENT_PREFIX + path, {})):
        body = {"model": "policy", "messages": [asked("Look:", ONE)], **fields}
        response = await bench.client.post(route, json=body)
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (400, "unsupported_content")
        assert error["param"] == "messages[0].content[1]"
        assert error["message"].endswith("is not supported; this run takes only text, because of x")
    assert bench.sampler.requests == []
    await bench.ask("hi")
    await bench.client.aclose()


VLLM = {"backend": "vllm", "base_url": "http://127.0.0.1:1"}
ROLES = {"writer": {"kind": "trained"}, "old": {"kind": "frozen"}}


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({}, {}),
        ({"engine": {"backend": "tinker"}}, {"": "engine.backend: tinker"}),
        ({"engine": {"devices": 2}}, {"": "engine.devices: 2"}),
        ({"inference": VLLM}, {"": "inference.backend: vllm"}),
        ({"training": {"loss_config": {"kl_k3": 0.1}}}, {"": "training.loss_config.kl_k3"}),
        (
            {"training": {"kl_penalty_coef": 0.1}, "roles": ROLES},
            {"": "training.kl_penalty_coef", "writer": "training.kl_penalty_coef"},
        ),
        (
            {"training": {"distillation": {"teacher": "old"}}, "roles": ROLES},
            {"": "training.distillation"},
        ),
    ],
)
def test_a_config_says_why_its_policies_take_no_images(given: dict[str, Any], why: dict[str, str]) -> None:
    text = "this run takes only text, because {} does not work with images"
    expected = {role: text.format(name) for role, name in why.items()}
    assert RunConfig.model_validate(given).no_images == expected


def test_samplers_that_ignore_images_refuse_them() -> None:
    request = SampleRequest(prompt=b"", max_tokens=1, images=[PlacedImage(0, ONE)])
    with pytest.raises(Exception, match="image_url is not supported by vLLM"):
        refuse_unsupported(request, "vLLM", constraints=True, top_logprobs=True)
