"""The contract: the pinned, unmodified `tinker` SDK over real HTTP against the wire server, call by call."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tinker
import torch
from tinker import types
from tinker.types import RequestErrorCategory

from interchange_helpers import until
from small_models import sft_datum
from tinkerscript.engine.embedded import EmbeddedEngine
from tinkerscript.engine.weights import LoraSettings
from tinkerscript.model_folder import ADAPTER_CONFIG
from tinkerscript.tinker_api.state import WireLimits
from wire_setup import KEY, SDK_LEAVES_SOCKETS, Wire, prompt, wire_server

pytestmark = SDK_LEAVES_SOCKETS

ADAM = tinker.AdamParams(learning_rate=0.02)
IDS = [5, 9, 13, 21, 34, 55]


@pytest.fixture(scope="module")
def wire(random_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wire]:
    with wire_server(random_model, tmp_path_factory.mktemp("wire"), name="random") as made:
        yield made


@pytest.fixture(scope="module")
def service(wire: Wire) -> tinker.ServiceClient:
    return wire.service()


@pytest.fixture
def run(service: tinker.ServiceClient) -> Any:
    return service.create_lora_training_client("random", rank=8).result()


@pytest.fixture(autouse=True)
def _few_runs_in_memory(wire: Wire) -> Iterator[None]:
    yield
    wire.state.runs.clear()


def trained(client: Any, steps: int = 1, adam: tinker.AdamParams = ADAM) -> list[float]:
    """Losses of that many steps on one sequence."""
    losses: list[float] = []
    for _ in range(steps):
        output = client.forward_backward([sft_datum(IDS)], "cross_entropy")
        stepped = client.optim_step(adam)
        losses.append(output.result().metrics["loss:sum"])
        stepped.result()
    return losses


def logprobs_of(client: Any, ids: list[int] = IDS) -> np.ndarray:
    return np.array(client.compute_logprobs(prompt(*ids)).result()[1:])


def greedy(client: Any, count: int = 8) -> list[int]:
    params = tinker.SamplingParams(max_tokens=count, temperature=0.0, stop=[])
    return client.sample(prompt(*IDS), 1, params).result().sequences[0].tokens


# What a client asks first


def test_a_client_is_told_what_is_there_and_what_its_run_trains(
    wire: Wire, run: Any, random_model: Path
) -> None:
    rest = tinker.RestClient(base_url=wire.url, api_key=KEY)
    [model] = rest.get_server_capabilities().result().supported_models
    assert (model.model_name, model.max_context_length) == ("random", 48)
    assert model.trainable
    assert model.sampleable
    info = run.get_info()
    assert (info.is_lora, info.lora_rank) == (True, 8)
    assert info.model_data.tokenizer_id == str(random_model)


def test_a_request_without_a_key_is_refused(wire: Wire) -> None:
    assert httpx.get(f"{wire.url}/api/v1/healthz").status_code == 200
    assert httpx.get(f"{wire.url}/api/v1/get_server_capabilities").status_code == 401


def test_a_servers_own_key_is_the_only_one_let_in(random_model: Path, tmp_path: Path) -> None:
    with wire_server(random_model, tmp_path, key="tml-right") as made:
        ask = tinker.RestClient(base_url=made.url, api_key="tml-right").get_server_capabilities
        assert ask().result().supported_models
        with pytest.raises(tinker.AuthenticationError, match="not the server's key"):
            tinker.RestClient(base_url=made.url, api_key="tml-wrong").get_server_capabilities().result()


# Training


def test_training_lowers_the_loss_and_forward_changes_nothing(run: Any) -> None:
    before = run.forward([sft_datum(IDS)], "cross_entropy").result()
    again = run.forward([sft_datum(IDS)], "cross_entropy").result()
    assert before.metrics == again.metrics
    assert before.loss_fn_outputs[0]["logprobs"].shape == [len(IDS) - 1]
    losses = trained(run, 5)
    assert losses[0] == pytest.approx(before.metrics["loss:sum"], rel=1e-6)
    assert losses[-1] < 0.7 * losses[0]


def test_losses_over_what_was_sampled_sum_over_the_reply_alone(run: Any) -> None:
    """On-policy, where ratios are 1 and penalties 0. The prompt has neither advantage nor logprob."""
    client = run.save_weights_and_get_sampling_client(record_stability_info=True).result()
    asked = tinker.SamplingParams(max_tokens=6, seed=1)
    (sequence,) = client.sample(prompt(*IDS), 1, asked).result().sequences
    number = len(sequence.tokens)

    def padded(values: Any, dtype: Any = np.float32) -> np.ndarray:
        return np.array([0] * (len(IDS) - 1) + list(values), dtype)

    inputs = {
        "target_tokens": padded(sequence.tokens, np.int64),
        "logprobs": padded(sequence.logprobs),
        "advantages": padded([1.0] * number),
    }
    mask = {"sequence_ratio_mask": padded([1.0] * number)}
    plain, masked = (
        tinker.Datum(model_input=prompt(*IDS, *sequence.tokens[:-1]), loss_fn_inputs=each)
        for each in (inputs, inputs | mask)
    )
    asked_of = partial(types.PromptProvenanceSpan, sequence_id=sequence.sequence_id)
    said_of = partial(types.SampledProvenanceSpan, sequence_id=sequence.sequence_id)
    # As the cookbook sends it.
    traced = plain.with_provenance(
        model_input=[asked_of(length=len(IDS)), said_of(length=number - 1)],
        loss_fn_inputs=[asked_of(offset=1, length=len(IDS) - 1), said_of(length=number)],
    )
    of_logprobs = -sum(sequence.logprobs)
    for loss_fn, datum, expected in (
        ("gspo", masked, -number),
        ("dro", plain, of_logprobs),
        ("stable_reinforce", traced, of_logprobs),
    ):
        output = run.forward_backward([datum], loss_fn).result()
        assert output.metrics["loss:sum"] == pytest.approx(expected, abs=2e-3), loss_fn
    assert run.optim_step(ADAM).result().metrics["grad_norm"] > 0


def test_a_custom_loss_trains_like_the_servers_own(service: tinker.ServiceClient, run: Any) -> None:
    other = service.create_lora_training_client("random", rank=8).result()

    def negative_log_likelihood(
        data: Any, logprobs: list[torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, float]]:
        return -sum(row.sum() for row in logprobs), {"rows": float(len(data))}

    output = run.forward_backward_custom([sft_datum(IDS)], negative_log_likelihood)
    run.optim_step(ADAM).result()
    [loss] = trained(other)
    assert output.result().metrics["loss:sum"] == pytest.approx(loss, rel=1e-6)
    assert output.result().metrics["rows"] == 1
    data = [sft_datum(IDS)]
    ours, theirs = (client.forward(data, "cross_entropy").result().metrics for client in (run, other))
    assert ours["loss:sum"] == pytest.approx(theirs["loss:sum"], rel=1e-5)


def test_many_chunks_are_one_batch(run: Any) -> None:
    """More datums than the SDK puts into one request: gradients and outputs add up."""
    output = run.forward_backward([sft_datum(IDS)] * 1100, "cross_entropy").result()
    assert len(output.loss_fn_outputs) == 1100
    one = run.forward([sft_datum(IDS)], "cross_entropy").result()
    assert output.metrics["loss:sum"] == pytest.approx(1100 * one.metrics["loss:sum"], rel=1e-4)


# LoRA


def test_interleaved_runs_train_as_the_embedded_engine_does_with_their_settings(
    service: tinker.ServiceClient, random_model: Path
) -> None:
    """Ten steps of two adapters over one model; each is what an engine of its own computes."""
    asked = [
        {"rank": 4, "seed": 9, "train_mlp": False},
        {"rank": 16, "seed": 3, "train_attn": False, "train_unembed": False},
    ]
    runs = [service.create_lora_training_client("random", **settings).result() for settings in asked]
    curves: list[list[tuple[float, np.ndarray]]] = [[], []]
    for _ in range(10):
        for run, curve in zip(runs, curves, strict=True):
            curve.append(one_step(run))
    samplers = [run.save_weights_and_get_sampling_client().result() for run in runs]
    settings = [LoraSettings(4, 32, ("attn", "unembed"), 9), LoraSettings(16, 32, ("mlp",), 3)]
    for lora, curve, sampler in zip(settings, curves, samplers, strict=True):
        with EmbeddedEngine(random_model, lora=lora) as engine:
            alone = engine.create_training_client()
            for loss, logprobs in curve:
                expected_loss, expected = one_step(alone)
                assert loss == pytest.approx(expected_loss, rel=1e-5)
                np.testing.assert_allclose(logprobs, expected, atol=1e-5)
            expected = logprobs_of(alone.save_weights_and_get_sampling_client().result())
            np.testing.assert_allclose(logprobs_of(sampler), expected, atol=1e-5)
    assert curves[0][0][0] == pytest.approx(curves[1][0][0], rel=1e-6)
    assert curves[0][1][0] != pytest.approx(curves[1][1][0], rel=1e-3)


def one_step(client: Any) -> tuple[float, np.ndarray]:
    """Loss and log probabilities before the step."""
    output = client.forward_backward([sft_datum(IDS)], "cross_entropy").result()
    client.optim_step(ADAM).result()
    return output.metrics["loss:sum"], output.loss_fn_outputs[0]["logprobs"].to_numpy()


def test_a_server_of_all_weights_ignores_the_rank_and_takes_no_adapters(
    random_model: Path, tmp_path: Path
) -> None:
    with wire_server(random_model, tmp_path, name="random", full=True) as made:
        service = made.service()
        run = service.create_lora_training_client("random", rank=1000).result()
        assert (run.get_info().is_lora, run.get_info().lora_rank) == (False, None)
        losses = trained(run, 5)
        assert losses[-1] < 0.7 * losses[0]
        whole = run.save_state("whole").result().path
        info = tinker.RestClient(base_url=made.url, api_key=KEY).get_weights_info_by_tinker_path(whole)
        assert (info.result().is_lora, info.result().lora_rank) == (False, None)
        with pytest.raises(tinker.BadRequestError, match=r"lora_config\.train_mlp: must be true"):
            service.create_lora_training_client("random", train_mlp=False).result()
    with wire_server(random_model, tmp_path, name="random") as made:
        service = made.service()
        refused_checkpoint(service, whole, "has all weights of a model, .* start it with --full")
        adapter = service.create_lora_training_client("random").result().save_state("adapter").result().path
    with wire_server(random_model, tmp_path, name="random", full=True) as made:
        refused_checkpoint(made.service(), adapter, "is a LoRA adapter, .* start it without --full")


def refused_checkpoint(service: tinker.ServiceClient, path: str, message: str) -> None:
    for make in (service.create_sampling_client, service.create_training_client_from_state):
        with pytest.raises(tinker.BadRequestError, match=message):
            make(path).result()


# Sampling


def test_sampling_settings_do_what_they_say(service: tinker.ServiceClient) -> None:
    client = service.create_sampling_client(base_model="random").result()
    seeded = tinker.SamplingParams(max_tokens=6, seed=7, stop=[])
    first, second = (client.sample(prompt(*IDS), 3, seeded).result() for _ in range(2))
    assert [s.tokens for s in first.sequences] == [s.tokens for s in second.sequences]
    assert all(s.stop_reason == "length" and len(s.tokens) == len(s.logprobs) == 6 for s in first.sequences)
    assert len({s.sequence_id for s in [*first.sequences, *second.sequences]}) == 6
    assert greedy(client) == greedy(client)
    only = tinker.SamplingParams(max_tokens=6, top_k=1, stop=[])
    assert client.sample(prompt(*IDS), 1, only).result().sequences[0].tokens == greedy(client, 6)
    stop = greedy(client)[2]
    params = tinker.SamplingParams(max_tokens=8, temperature=0.0, stop=[stop])
    sequence = client.sample(prompt(*IDS), 1, params).result().sequences[0]
    assert sequence.tokens == greedy(client)[: greedy(client).index(stop) + 1]
    assert sequence.stop_reason == "stop"


def test_prompts_are_scored(service: tinker.ServiceClient) -> None:
    client = service.create_sampling_client(base_model="random").result()
    logprobs = client.compute_logprobs(prompt(*IDS)).result()
    assert logprobs[0] is None
    target = torch.full((len(IDS) - 1, 2), -1, dtype=torch.int64)
    target[3, 0], target[3, 1], target[0, 1] = IDS[4], 17, IDS[1]
    for tensor in (
        tinker.TensorData.from_torch(target),
        tinker.TensorData.from_torch_sparse(target, pad_value=-1),
    ):
        response = client.sample(
            prompt(*IDS),
            1,
            tinker.SamplingParams(max_tokens=1),
            include_prompt_logprobs=True,
            topk_prompt_logprobs=64,
            prompt_logprobs_last_n=2,
            target_prompt_logprobs=tensor,
        ).result()
        assert response.prompt_logprobs[:4] == [None] * 4
        assert response.prompt_logprobs[4:] == pytest.approx(logprobs[4:])
        assert response.topk_prompt_logprobs[3] is None
        table = dict(response.topk_prompt_logprobs[4])
        assert table[IDS[4]] == pytest.approx(logprobs[4])
        assert sum(math.exp(v) for v in table.values()) == pytest.approx(1, abs=1e-4)
        answer = response.target_prompt_logprobs.to_torch()
        assert answer[3, 0].item() == pytest.approx(logprobs[4])
        assert answer[3, 1].item() == pytest.approx(table[17])
        assert answer[0, 1].item() == pytest.approx(logprobs[1])
        assert answer[1].tolist() == [0, 0]


async def test_an_abandoned_sample_is_cancelled(wire: Wire, service: tinker.ServiceClient) -> None:
    client = service.create_sampling_client(base_model="random").result()
    params = tinker.SamplingParams(max_tokens=40, stop=[])
    future = client.sample(prompt(*IDS), 500, params)
    await until(lambda: wire.state.futures.samples == 500)
    future.future().cancel()
    await until(lambda: wire.state.futures.samples == 0)


# Saving, loading, the REST client


def test_a_run_resumes_with_its_optimizer_and_without(service: tinker.ServiceClient, run: Any) -> None:
    trained(run, 4)
    path = run.save_state("half").result().path
    assert path == f"tinker://{run.model_id}/weights/half"
    went_on = trained(run, 3)
    exact = service.create_training_client_from_state_with_optimizer(path).result()
    anew = service.create_training_client_from_state(path).result()
    assert trained(exact, 3) == pytest.approx(went_on, rel=1e-4)
    losses = trained(anew, 3)
    assert losses[0] == pytest.approx(went_on[0], rel=1e-4)
    assert losses[2] != pytest.approx(went_on[2], rel=1e-3)


def test_checkpoints_are_listed_sampled_from_and_deleted(
    wire: Wire, service: tinker.ServiceClient, run: Any
) -> None:
    rest = tinker.RestClient(base_url=wire.url, api_key=KEY)
    trained(run, 2)
    saved = run.save_weights_for_sampler("step1", user_metadata={"step": "1"}).result().path
    state = run.save_state("state1", ttl_seconds=3600).result().path
    client = service.create_sampling_client(model_path=saved).result()
    assert client.get_base_model() == "random"
    np.testing.assert_allclose(
        logprobs_of(client), logprobs_of(run.save_weights_and_get_sampling_client().result()), atol=1e-6
    )
    listed = {c.tinker_path: c for c in rest.list_checkpoints(run.model_id).result().checkpoints}
    assert set(listed) == {saved, state}
    assert listed[saved].user_metadata == {"step": "1"}
    assert listed[saved].checkpoint_type == "sampler"
    assert (listed[saved].size_bytes or 0) > 10_000
    assert json.loads((checkpoint_folder(wire, saved) / ADAPTER_CONFIG).read_text())["r"] == 8
    assert listed[state].expires_at is not None
    assert saved in {c.tinker_path for c in rest.list_user_checkpoints().result().checkpoints}
    info = rest.get_weights_info_by_tinker_path(saved).result()
    assert (info.is_lora, info.lora_rank) == (True, 8)
    assert (info.train_attn, info.train_mlp, info.train_unembed) == (True, True, True)
    record = rest.get_training_run(run.model_id).result()
    assert record.last_checkpoint.tinker_path == state
    assert (record.is_lora, record.lora_rank) == (True, 8)
    assert run.model_id in {r.training_run_id for r in rest.list_training_runs().result().training_runs}
    rest.set_checkpoint_ttl_from_tinker_path(state, None).result()
    rest.publish_checkpoint_from_tinker_path(state).result()
    [after] = [c for c in rest.list_checkpoints(run.model_id).result().checkpoints if c.tinker_path == state]
    assert after.expires_at is None
    assert after.public
    rest.delete_checkpoint_from_tinker_path(saved).result()
    assert [c.tinker_path for c in rest.list_checkpoints(run.model_id).result().checkpoints] == [state]
    with pytest.raises(tinker.NotFoundError, match="no checkpoint"):
        service.create_sampling_client(model_path=saved).result()


def checkpoint_folder(wire: Wire, path: str) -> Path:
    return wire.state.checkpoints.folder(wire.state.checkpoints.find(path))


def test_a_session_can_be_looked_up_and_finished(wire: Wire, random_model: Path) -> None:
    with wire.service(user_metadata={"who": "me"}) as service:
        client = service.create_lora_training_client("random").result()
        sampler = service.create_sampling_client(base_model="random").result()
        session_id = service.holder.get_session_id()
        rest = tinker.RestClient(base_url=wire.url, api_key=KEY)
        found = rest.get_session(session_id).result()
        assert found.training_run_ids == [client.model_id]
        assert found.user_metadata == {"who": "me"}
        assert session_id in rest.list_sessions().result().sessions
        assert rest.get_sampler(found.sampler_ids[0]).result().base_model == "random"
        assert len(greedy(sampler)) == 8
    assert client.model_id not in wire.state.runs
    with pytest.raises(tinker.APIStatusError, match="has ended"):
        httpx_post(wire, "session_heartbeat", {"session_id": session_id})


def httpx_post(wire: Wire, path: str, body: dict[str, Any]) -> httpx.Response:
    """A call as the SDK makes it, with the SDK's error for what is refused."""
    response = httpx.post(f"{wire.url}/api/v1/{path}", json=body, headers={"X-API-Key": KEY})
    if response.is_error:
        raise tinker.APIStatusError(response.text, response=response, body=response.json())
    return response


# Errors


def rl_datum() -> tinker.Datum:
    inputs = {"logprobs": -1.0, "advantages": 1.0}
    arrays = {name: np.full(len(IDS) - 1, value, np.float32) for name, value in inputs.items()}
    targets = {"target_tokens": np.array(IDS[1:], np.int64)}
    return tinker.Datum(model_input=prompt(*IDS[:-1]), loss_fn_inputs=targets | arrays)


@pytest.mark.parametrize(
    ("loss_fn", "config", "datum", "message"),
    [
        ("quadratic", None, sft_datum(IDS), "loss_fn 'quadratic' is not one of"),
        ("gspo", None, rl_datum(), "gspo needs loss_fn_inputs .*'sequence_ratio_mask'"),
        ("stable_reinforce", {"cap": 1.0}, rl_datum(), "loss_fn_config: stable_reinforce has none"),
        ("antigravity:geohash", None, sft_datum(IDS), "loss_fn 'antigravity:geohash' is not one of"),
        ("cross_entropy", {"clip": 1.0}, sft_datum(IDS), "loss_fn_config of cross_entropy has unknown keys"),
        ("cross_entropy", None, sft_datum([5, 9999]), "target_tokens has ids outside"),
    ],
)
def test_a_wrong_training_request_is_the_users_fault_and_names_the_field(
    run: Any, loss_fn: Any, config: Any, datum: tinker.Datum, message: str
) -> None:
    with pytest.raises(tinker.RequestFailedError, match=message) as caught:
        run.forward_backward([datum], loss_fn, config).result()
    assert caught.value.category is RequestErrorCategory.User
    assert len(trained(run)) == 1  # The run goes on.


@pytest.mark.parametrize(
    ("ids", "settings", "message"),
    [
        ([], {"max_tokens": 4}, "prompt is empty"),
        (list(range(2, 60)), {"max_tokens": 4}, "58 tokens; the context holds 48"),
        ([5000], {"max_tokens": 4}, "prompt: the prompt has ids outside"),
        ([5], {"max_tokens": 4, "temperature": -1.0}, "temperature -1.0"),
    ],
)
def test_a_wrong_sampling_request_is_the_users_fault(
    service: tinker.ServiceClient, ids: list[int], settings: dict[str, Any], message: str
) -> None:
    client = service.create_sampling_client(base_model="random").result()
    with pytest.raises(tinker.RequestFailedError, match=message) as caught:
        client.sample(prompt(*ids), 1, tinker.SamplingParams(**settings)).result()
    assert caught.value.category is RequestErrorCategory.User


def test_what_cannot_be_made_is_refused_by_name(service: tinker.ServiceClient, run: Any) -> None:
    with pytest.raises(tinker.BadRequestError, match="this server has 'random', not 'Qwen/Qwen3-8B'"):
        service.create_lora_training_client("Qwen/Qwen3-8B").result()
    with pytest.raises(tinker.BadRequestError, match=r"optimizer_config\.type.*dimuon"):
        service.create_lora_training_client("random", optimizer=types.DimuonOptimizerConfig()).result()
    with pytest.raises(tinker.NotFoundError, match="no checkpoint"):
        service.create_training_client_from_state(f"tinker://{run.model_id}/weights/none").result()
    with pytest.raises(tinker.BadRequestError, match="path: 'a/b'"):
        run.save_state("a/b").result()
    with pytest.raises(tinker.BadRequestError, match="ttl_seconds: 60"):
        run.save_state("short", ttl_seconds=60).result()
    run.save_state("twice").result()
    with pytest.raises(tinker.RequestFailedError, match="exists; choose another name") as caught:
        run.save_state("twice").result()
    assert caught.value.category is RequestErrorCategory.User
    run.save_state("twice", overwrite=True).result()
    sampler = run.save_weights_for_sampler("no_optimizer").result().path
    with pytest.raises(tinker.RequestFailedError, match=r"no optimizer\.pt"):
        service.create_training_client_from_state_with_optimizer(sampler).result()


def test_a_field_that_nobody_knows_is_named(wire: Wire) -> None:
    with pytest.raises(tinker.APIStatusError, match="tempo: Extra inputs are not permitted") as caught:
        httpx_post(wire, "session_heartbeat", {"session_id": "x", "tempo": 3})
    assert caught.value.response.status_code == 422
    with pytest.raises(tinker.APIStatusError, match="the embedded engine has no such endpoint"):
        httpx_post(wire, "no_such_call", {})


# Futures


def test_a_request_that_comes_twice_is_done_once(wire: Wire, run: Any) -> None:
    """A client that did not hear the answer sends its request again: one step, one sample."""
    run.forward_backward([sft_datum(IDS)], "cross_entropy").result()
    body = {"model_id": run.model_id, "seq_id": 2, "adam_params": {}, "type": "optim_step"}
    first, second = (httpx_post(wire, "optim_step", body).json() for _ in range(2))
    assert first == second
    fetched = [
        httpx_post(wire, "retrieve_future", {"request_id": first["request_id"]}).json() for _ in range(2)
    ]
    assert fetched[0] == fetched[1]
    assert fetched[0]["metrics"]["grad_norm"] > 0


def test_waiting_is_a_408_with_the_state_of_the_queue(wire: Wire, run: Any) -> None:
    gate = threading.Event()
    wire.state.engine.context.thread.call(lambda: gate.wait(20))
    future = run.forward([sft_datum(IDS)], "cross_entropy")
    body = {"model_id": run.model_id, "seq_id": 9, "adam_params": {}, "type": "optim_step"}
    request_id = httpx_post(wire, "optim_step", body).json()["request_id"]
    with pytest.raises(tinker.APIStatusError, match="try_again") as caught:
        httpx_post(wire, "retrieve_future", {"request_id": request_id})
    assert caught.value.response.status_code == 408
    gate.set()
    assert future.result().metrics["loss:sum"] > 0


def test_a_result_that_is_not_known_is_gone_so_that_samples_start_anew(wire: Wire) -> None:
    with pytest.raises(tinker.APIStatusError) as caught:
        httpx_post(wire, "retrieve_future", {"request_id": "none"})
    assert caught.value.response.status_code == 410


def test_back_pressure_makes_the_sdk_wait_and_nothing_is_lost(random_model: Path, tmp_path: Path) -> None:
    with wire_server(random_model, tmp_path, limits=WireLimits(waiting_samples=8, poll_s=1.0)) as made:
        client = made.service().create_sampling_client(base_model=str(random_model)).result()
        params = tinker.SamplingParams(max_tokens=3, stop=[])
        futures = [client.sample(prompt(*IDS), 4, params) for _ in range(6)]
        assert [len(future.result().sequences) for future in futures] == [4] * 6


def test_only_so_many_runs_are_in_memory_until_a_session_ends(random_model: Path, tmp_path: Path) -> None:
    with wire_server(random_model, tmp_path, limits=WireLimits(runs=1)) as made:
        service = made.service()
        service.create_lora_training_client(str(random_model)).result()
        body = {"session_id": service.holder.get_session_id(), "model_seq_id": 9, "type": "create_model"}
        body |= {"base_model": str(random_model)}
        with pytest.raises(tinker.APIStatusError, match="1 training runs are in memory") as caught:
            httpx_post(made, "create_model", body)
        assert caught.value.response.status_code == 429
        service.close("success").result()
        made.service().create_lora_training_client(str(random_model)).result()


def test_a_silent_session_frees_what_it_holds(random_model: Path, tmp_path: Path) -> None:
    limits = WireLimits(session_timeout_s=0.0)
    with wire_server(random_model, tmp_path, limits=limits) as made:
        client = made.service().create_lora_training_client(str(random_model)).result()
        path = client.save_state("kept").result().path
        made.state.housekeeping()
        assert not made.state.runs
        with pytest.raises(tinker.APIStatusError, match="ended"):
            client.forward([sft_datum(IDS)], "cross_entropy").result()
        assert made.service().create_training_client_from_state(path).result().model_id != client.model_id


# Restarts and other processes


def test_a_restart_keeps_checkpoints_samplers_and_sessions(random_model: Path, tmp_path: Path) -> None:
    with wire_server(random_model, tmp_path, name="random") as made:
        port = int(made.url.rpartition(":")[2])
        service = tinker.ServiceClient(base_url=made.url, api_key=KEY)
        client = service.create_lora_training_client("random", rank=4, train_mlp=False).result()
        trained(client, 2)
        path = client.save_state("kept").result().path
        saved = client.save_weights_for_sampler("kept").result().path
        sampler = service.create_sampling_client(model_path=saved).result()
        unsaved = client.save_weights_and_get_sampling_client().result()
        expected = logprobs_of(sampler)
        went_on = trained(client, 1)
    with wire_server(random_model, tmp_path, name="random", port=port):
        np.testing.assert_allclose(logprobs_of(sampler), expected, atol=1e-6)
        with pytest.raises(tinker.NotFoundError, match="unsaved weights ends with the server"):
            logprobs_of(unsaved)
        with pytest.raises(tinker.NotFoundError, match="continue from a checkpoint with"):
            client.forward([sft_datum(IDS)], "cross_entropy").result()
        resumed = service.create_training_client_from_state_with_optimizer(path).result()
        assert trained(resumed, 1) == pytest.approx(went_on, rel=1e-4)
        rest = tinker.RestClient(base_url=made.url, api_key=KEY)
        runs = [rest.get_training_run(each.model_id).result() for each in (client, resumed)]
        assert [(each.is_lora, each.lora_rank) for each in (*runs, resumed.get_info())] == [(True, 4)] * 3
        info = rest.get_weights_info_by_tinker_path(path).result()
        assert (info.lora_rank, info.train_attn, info.train_mlp) == (4, True, False)
        service.close("success").result()
