"""What is found out about an SDK and a server: from descriptions, errors and unusual answers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tinker

from tinkerscript.errors import EngineError
from tinkerscript.train.backends import tinker_sdk as sdk
from tinkerscript.train.backends.tinker_service import NotifyingClient, SlowCallNotifier, after_the_first


def described(**bodies: dict[str, Any]) -> dict[str, Any]:
    """An OpenAPI description; an object's field that is an object is a reference, as FastAPI writes it."""
    schemas: dict[str, Any] = {}

    def schema(name: str, fields: dict[str, Any]) -> dict[str, str]:
        properties = {
            field: {"anyOf": [schema(field, inner), {"type": "null"}]} if isinstance(inner, dict) else {}
            for field, inner in fields.items()
        }
        schemas[name] = {"type": "object", "properties": properties}
        return {"$ref": f"#/components/schemas/{name}"}

    paths = {
        f"/api/v1/{path}": {
            "post": {"requestBody": {"content": {"application/json": {"schema": schema(path, fields)}}}}
        }
        for path, fields in bodies.items()
    }
    return {"paths": paths, "components": {"schemas": schemas}}


ADAM = {"learning_rate": 0, "weight_decay": 0, "grad_clip_norm": 0}


def test_what_a_description_leaves_out_is_named() -> None:
    description = described(
        optim_step={"adam_params": {"learning_rate": 0, "weight_decay": 0}},
        create_model={"lora_config": {"rank": 0, "seed": 0}},
        save_weights={"path": 0},
    )
    assert sdk.described_lacks(description) == [
        "it cannot finish a session: it frees a run when its heartbeats stop",
        "it ignores training.grad_clip_norm: nothing is clipped",
        "it ignores engine.lora.targets: it chooses the layers",
        "it refuses to save a checkpoint under a name that a run has used",
    ]


@pytest.mark.parametrize("adam", [{"adam_params": ADAM}, {}], ids=["everything", "no body"])
def test_what_is_described_or_has_no_description_lacks_nothing(adam: dict[str, Any]) -> None:
    description = described(optim_step=adam)
    description["paths"] |= {"/api/v1/sessions/{id}/finish": {}, "/api/v1/create_model": {"post": {}}}
    assert sdk.described_lacks(description) == sdk.described_lacks({}) == []


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("Server returned a JSON payload for it"), "pip install 'tinker>=0.24,<0.25'"),
        (AssertionError("asample promises carry sample_sequence_ids"), "pip install 'tinker>=0.24,<0.26'"),
        (ValueError("odd"), "ValueError: odd"),
        (tinker.TinkerError("no such model"), "no such model"),
    ],
)
async def test_whatever_the_sdk_raises_is_an_error_of_the_engine(error: Exception, said: str) -> None:
    async def fails() -> None:
        raise error

    with pytest.raises(EngineError, match="http://there: forward: ") as raised:
        await SlowCallNotifier("http://there", print).wait(fails(), "forward")
    assert said in str(raised.value)


def tensor(*values: float) -> tinker.TensorData:
    return tinker.TensorData(data=np.array(values, np.float32), dtype="float32", shape=[len(values)])


class Answers:
    """A training client that answers `forward` with these rows and metrics."""

    def __init__(self, rows: list[dict[str, tinker.TensorData]], metrics: dict[str, float]) -> None:
        self.output = tinker.ForwardBackwardOutput(
            loss_fn_output_type="scalar", loss_fn_outputs=rows, metrics=metrics
        )

    async def forward(self, *_: object) -> tinker.ForwardBackwardOutput:
        return self.output


async def loss_of(rows: list[dict[str, tinker.TensorData]], metrics: dict[str, float]) -> float:
    client: Any = NotifyingClient(Answers(rows, metrics), SlowCallNotifier("http://there", print), print)  # type: ignore[arg-type]
    return (await client.forward([], "ppo")).metrics["loss:sum"]


async def test_the_loss_is_the_servers_or_the_sum_of_its_tokens() -> None:
    rows = [{"elementwise_loss": tensor(1, 2)}, {"elementwise_loss": tensor(4)}]
    assert await loss_of(rows, {}) == 7
    assert await loss_of(rows, {"loss:sum": 3.0}) == 3
    with pytest.raises(EngineError, match="neither the metric loss:sum nor elementwise_loss"):
        await loss_of([{"logprobs": tensor(1)}], {})


@pytest.mark.parametrize("row", [[None, -1.0, -2.0], [-1.0, -2.0]])
def test_a_prompts_scores_are_of_its_tokens_after_the_first(row: list[float | None]) -> None:
    assert after_the_first(row, 3).tolist() == [0, -1, -2]


def test_scores_that_are_not_one_for_each_token_are_refused() -> None:
    with pytest.raises(EngineError, match="returned 1 values for a prompt of 3 tokens"):
        after_the_first([-1.0], 3)
