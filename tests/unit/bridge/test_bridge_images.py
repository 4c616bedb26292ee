"""Images in samples and tool results go to vision renderers as image chunks; other renderers refuse them."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import pytest
import tinker
from inspect_ai import Task
from inspect_ai.agent import react
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessageUser, ContentImage, ContentText
from inspect_ai.scorer import match
from inspect_ai.solver import generate
from inspect_ai.tool import Tool, tool
from PIL import Image
from tinker_cookbook.completers import StopCondition, TokensWithLogprobs
from tinker_cookbook.renderers import Renderer
from tinker_cookbook.renderers.qwen3 import Qwen3VLInstructRenderer
from tinker_cookbook.rl.data_processing import trajectory_to_data

from bridge_groups import group_of
from bridge_parts import END, Says, call, register_bytes
from inspect_tinker_bridge import (
    EnvironmentConfigError,
    UnsupportedError,
    get_ground_truth_messages,
    inspect_dataset_to_hf,
    load_environment,
)
from inspect_tinker_bridge.conversion import to_dicts


class Patches:
    """What renderers ask of an image processor: an image of 16 x 16 is 4 tokens."""

    merge_size = 1

    def get_number_of_image_patches(self, height: int, width: int, images_kwargs: dict[str, Any]) -> int:
        return height * width // 64


@pytest.fixture(scope="module")
def vision(byte_model: Path) -> Renderer:
    processor: Any = Patches()
    return Qwen3VLInstructRenderer(register_bytes(byte_model), processor, strip_thinking_from_history=False)


def png(color: str) -> bytes:
    held = io.BytesIO()
    Image.new("RGB", (16, 16), color).save(held, format="PNG")
    return held.getvalue()


def data_url(color: str) -> str:
    return "data:image/png;base64," + base64.b64encode(png(color)).decode()


@pytest.fixture
def sample(tmp_path: Path) -> Sample:
    """A red image in a file and a blue one at hand."""
    (tmp_path / "red.png").write_bytes(png("red"))
    content = [
        ContentText(text="Which is red?"),
        ContentImage(image=str(tmp_path / "red.png")),
        ContentImage(image=data_url("blue")),
    ]
    return Sample(input=[ChatMessageUser(content=content)], target="1", id=1)


@tool
def draw() -> Tool:
    async def execute(color: str) -> ContentImage:
        """Draw something.

        Args:
            color: In which color.
        """
        return ContentImage(image=data_url(color))

    return execute


class Sees(Says):
    """Remembers the prompts as they came."""

    def __init__(self, renderer: Renderer, *texts: str) -> None:
        super().__init__(renderer, *texts)
        self.inputs: list[tinker.ModelInput] = []

    async def __call__(
        self, model_input: tinker.ModelInput, stop: StopCondition, *, max_tokens: int | None = None
    ) -> TokensWithLogprobs:
        self.inputs.append(model_input)
        return await super().__call__(tinker.ModelInput.empty(), stop, max_tokens=max_tokens)


def color_of(chunk: tinker.types.ImageChunk) -> tuple[int, ...]:
    """The pixel in the middle, each channel rounded to 0 or 255."""
    pixel: Any = Image.open(io.BytesIO(chunk.data)).convert("RGB").getpixel((8, 8))
    return tuple(255 * (value > 127) for value in pixel)


async def test_images_are_chunks_of_the_prompt_and_later_prompts_extend_it(
    vision: Renderer, sample: Sample
) -> None:
    task = Task(dataset=[sample], solver=react(tools=[draw()]), scorer=match())
    policy = Sees(
        vision, " " + call("draw", '{"color":   "lime"}') + END, call("submit", '{"answer": "1"}') + END
    )
    group = await group_of(task, vision, policy, env_type="task")
    assert group.get_total_rewards() == [1.0]
    first, second = policy.inputs
    images = [chunk for chunk in second.chunks if isinstance(chunk, tinker.types.ImageChunk)]
    assert [color_of(image) for image in images] == [(255, 0, 0), (0, 0, 255), (0, 255, 0)]
    kinds = [type(chunk).__name__ for chunk in first.chunks]
    assert kinds == ["EncodedTextChunk", "ImageChunk", "EncodedTextChunk", "ImageChunk", "EncodedTextChunk"]
    trajectory = group.trajectories_G[0]
    assert trajectory.transitions[0].metrics["fork"] == 0.0
    assert len(trajectory_to_data(trajectory, 1.0)) == 1


async def test_a_renderer_by_name_gets_the_image_processor(vision: Renderer, sample: Sample) -> None:
    task = Task(dataset=[sample], solver=generate(), scorer=match())
    policy = Sees(vision, "1" + END)
    own = {"tokenizer": vision.tokenizer, "image_processor": Patches()}
    group = await group_of(task, "qwen3_vl_instruct", policy, **own)
    assert group.get_total_rewards() == [1.0]
    assert sum(isinstance(chunk, tinker.types.ImageChunk) for chunk in policy.inputs[0].chunks) == 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("qwen3_instruct", "the renderer Qwen3InstructRenderer .* images of the task's messages"),
        ("role_colon", "the renderer RoleColonRenderer .* images of the task's messages"),
        ("qwen3_vl_instruct", "Qwen3VLInstructRenderer cannot .*made with its image processor"),
    ],
)
async def test_a_renderer_that_takes_no_images_is_named(
    vision: Renderer, sample: Sample, name: str, message: str
) -> None:
    task = Task(dataset=[sample], solver=generate(), scorer=match())
    with pytest.raises(UnsupportedError, match=message):
        await group_of(task, name, Says(vision, "1" + END), tokenizer=vision.tokenizer)


async def test_an_image_that_is_none_is_an_error_that_says_so(vision: Renderer) -> None:
    broken = ContentImage(image="data:image/png;base64," + base64.b64encode(b"no image").decode())
    sample = Sample(input=[ChatMessageUser(content=[broken])], id=1)
    task = Task(dataset=[sample], solver=generate(), scorer=match())
    with pytest.raises(UnsupportedError, match=r"cannot render the 1 images .*cannot identify image file"):
        await group_of(task, vision, Says(vision, "1" + END))


async def test_rows_and_prompts_hold_images(sample: Sample) -> None:
    task = Task(dataset=[sample], solver=generate(), scorer=match())
    (message,) = await get_ground_truth_messages(task, sample)
    (stored,) = to_dicts([message])
    assert [part["type"] for part in stored["content"]] == ["text", "image_url", "image_url"]
    assert stored["content"][2]["image_url"]["url"] == data_url("blue")
    (row,) = inspect_dataset_to_hf(task)
    assert row["prompt"][0]["content"] == "Which is red?"
    assert data_url("blue") in row["prompt"][0]["message"]


def test_a_ready_renderer_takes_no_processor(vision: Renderer) -> None:
    task = Task(dataset=[Sample(input="x")], solver=generate(), scorer=match())
    with pytest.raises(EnvironmentConfigError, match="leave out `tokenizer` and `image_processor`"):
        load_environment(task, vision, image_processor=Patches())
