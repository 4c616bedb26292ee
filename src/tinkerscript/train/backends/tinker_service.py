"""`TinkerBackend`: a service with Tinker's protocol. A checkpoint contains the path of the weights there.

The SDK retries by itself, for a result without limit; `SlowCallNotifier` reports such waits.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import tinker
from tinker.types import LossFnType

from tinkerscript.config import EngineConfig
from tinkerscript.errors import ConfigError, EngineError
from tinkerscript.model_folder import context_of, model_folder, stop_ids_of, vocabulary_of
from tinkerscript.remote_folder import local_checkpoint
from tinkerscript.rollouts.call import (
    FOREIGN_POLICY,
    FloatArray,
    IntArray,
    pack_ids,
    pack_logprobs,
    unpack_ids,
)
from tinkerscript.sampler import (
    ProgressCallback,
    SampledSequence,
    Sampler,
    SampleRequest,
    refuse_unsupported,
)
from tinkerscript.train.backends import tinker_sdk as sdk
from tinkerscript.train.backends.backend import (
    FrozenModel,
    FrozenSampler,
    TrainerBackend,
    seed_of_role,
)

T = TypeVar("T")

SERVICE_RANK = 32

TINKER_PATH = "tinker://"
# Marks weights saved for sampling. Other paths contain `/weights/`.
SAMPLER_WEIGHTS = "/sampler_weights/"

SERVICE_KEY_VARIABLE = "TINKER_API_KEY"
POINTER = "tinker.json"

FIRST_NOTE_S = 20.0
NEXT_NOTE_S = 60.0

# Every vocabulary has these ids.
PROBE_IDS = (1, 2, 3)

TOKEN_LOSSES = "elementwise_loss"

SAMPLING_CLIENT = "save_weights_and_get_sampling_client"


@dataclass(eq=False)
class TinkerBackend(TrainerBackend):
    service: tinker.ServiceClient
    config: EngineConfig
    model: str
    folder: Path
    max_context: int
    checkpoint_dir: Path
    seed: int
    notifier: SlowCallNotifier

    def __post_init__(self) -> None:
        self._sampled = False
        self.vocabulary = vocabulary_of(self.folder)
        self.stop_ids = stop_ids_of(self.folder)

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        config: EngineConfig,
        model: Path,
        *,
        checkpoint_dir: Path,
        seed: int,
        note: Callable[[str], None],
    ) -> AsyncGenerator[TinkerBackend]:
        if not os.environ.get(SERVICE_KEY_VARIABLE):
            raise ConfigError(
                f"engine.backend: tinker needs the environment variable {SERVICE_KEY_VARIABLE}; for a server "
                "of `tinkerscript engine --port`, any value that begins with tml- will do"
            )
        name = config.base_url or "the Tinker service"
        notifier = SlowCallNotifier(name, note)
        service = await notifier.wait(asyncio.to_thread(sdk.connect, config.base_url), "connect")
        try:
            for lack in await _lacks(config.base_url):
                note(f"{name}: {lack}")
            name_there, max_context = await _limits(service, config, context_of(model), notifier)
            yield cls(
                service,
                config,
                model=name_there,
                folder=model,
                max_context=max_context,
                checkpoint_dir=checkpoint_dir,
                seed=seed,
                notifier=notifier,
            )
        finally:
            await sdk.close(service, note)

    async def start(self) -> None:
        if self.config.checkpoint:
            self._use(await self._from_state(_path_of_checkpoint(self.config.checkpoint)))
            return
        lora = self.config.lora
        client = await self._asked(
            self.service,
            "create_lora_training_client",
            self.model,
            rank=lora.rank or SERVICE_RANK,
            seed=self.seed,
            train_attn="attn" in lora.targets,
            train_mlp="mlp" in lora.targets,
            train_unembed="unembed" in lora.targets,
        )
        self._use(client)

    async def _asked(self, owner: object, method: str, *args: object, **options: object) -> Any:
        return await self.notifier.wait(sdk.new_client(owner, method, *args, **options), method)

    async def _from_state(self, path: str) -> tinker.TrainingClient:
        return await self._asked(self.service, "create_training_client_from_state", path)

    async def open_policy(
        self, role: str, checkpoint: str, *, checkpoint_dir: Path, restore: str | None
    ) -> TinkerBackend:
        policy = replace(
            self,
            config=self.config.model_copy(update={"checkpoint": checkpoint or self.config.checkpoint}),
            checkpoint_dir=checkpoint_dir,
            seed=seed_of_role(self.seed, role),
        )
        await (policy.start() if restore is None else policy.restore(restore))
        return policy

    async def publish(self, policy_version: int) -> Sampler:
        client = await self._asked(self._client, SAMPLING_CLIENT)
        if not self._sampled:
            await self._check_sampling(client)
            self._sampled = True
        return TinkerSampler(client, policy_version)

    async def _check_sampling(self, client: tinker.SamplingClient) -> None:
        prompt = tinker.ModelInput.from_ints(list(PROBE_IDS))
        params = tinker.SamplingParams(max_tokens=1, seed=0)
        response = await self.notifier.wait(sdk.awaitable(client.sample(prompt, 1, params)), "a first sample")
        for sequence in response.sequences:
            if sequence.logprobs is None or len(sequence.logprobs) != len(sequence.tokens):
                raise EngineError(
                    f"{self.notifier.service}: a sample of {len(sequence.tokens)} tokens came with "
                    f"logprobs {sequence.logprobs}; training needs one for each token"
                )

    async def check_loss(self, loss_fn: LossFnType, loss_config: Mapping[str, float] | None) -> None:
        values = np.zeros(len(PROBE_IDS) - 1, np.float32)
        names = ["weights"] if loss_fn == "cross_entropy" else ["logprobs", "advantages"]
        names += ["sequence_ratio_mask"] * (loss_fn == "gspo")
        inputs: Any = {"target_tokens": np.array(PROBE_IDS[1:], np.int64), **dict.fromkeys(names, values)}
        datum = tinker.Datum(
            model_input=tinker.ModelInput.from_ints(list(PROBE_IDS[:-1])), loss_fn_inputs=inputs
        )
        output = await self.client.forward([datum], loss_fn, loss_config)
        if not all("logprobs" in row for row in output.loss_fn_outputs):
            raise EngineError(f"{self.notifier.service}: forward returns no logprobs of the targets")

    async def open_frozen(self, model: str) -> FrozenModel:
        start = self.config.checkpoint
        path = _path_at_service(model) if model else start and _path_of_checkpoint(start)
        if not path:
            options = {"base_model": model or self.model}
            client = await self._asked(self.service, "create_sampling_client", **options)
        elif SAMPLER_WEIGHTS in path:
            client = await self._asked(self.service, "create_sampling_client", model_path=path)
        else:
            # The service samples only from a run's weights.
            client = await self._asked(await self._from_state(path), SAMPLING_CLIENT)
        name = await self._asked(client, "get_base_model") if model else self.model
        # The Hub has another model's tokenizer under the service's name for it.
        own = name == self.model
        folder = self.folder if own else await asyncio.to_thread(model_folder, name)
        return TinkerFrozenModel(client, self.notifier, folder=folder, max_context=self.max_context)

    def _use(self, client: tinker.TrainingClient) -> None:
        self._client = client
        self.client = NotifyingClient(client, self.notifier, self._save)

    async def _save(self, name: str) -> tinker.types.SaveWeightsResponse:
        saved = await self.notifier.wait(self._client.save_state(name, overwrite=True), "save_state")
        pointer = {"path": saved.path, "base_url": self.config.base_url, "model": self.model}
        _write_folder(self.checkpoint_dir / name, POINTER, json.dumps(pointer, indent=2) + "\n")
        return saved

    async def restore(self, name: str) -> None:
        path = _pointed_to(self.checkpoint_dir / name)
        method = "create_training_client_from_state_with_optimizer"
        self._use(await self._asked(self.service, method, path))


class TinkerSampler(FrozenSampler):
    def __init__(self, client: tinker.SamplingClient, policy_version: int) -> None:
        super().__init__(policy_version)
        self._client = client

    async def _sequences(
        self, request: SampleRequest, params: tinker.SamplingParams, progress: ProgressCallback | None
    ) -> list[SampledSequence]:
        refuse_unsupported(request, "Tinker's sampling client", constraints=False, top_logprobs=False)
        prompt = tinker.ModelInput.from_ints(unpack_ids(request.prompt).tolist())
        try:
            response = await sdk.awaitable(self._client.sample(prompt, request.num_samples, params))
        except Exception as error:
            raise EngineError(f"sampling failed: {sdk.explained(error)}") from error
        return [
            SampledSequence(
                sampled=pack_ids(sequence.tokens),
                logprobs=pack_logprobs(sequence.logprobs or []),
                stop_reason=sequence.stop_reason,
            )
            for sequence in response.sequences
        ]


@dataclass(eq=False)
class TinkerFrozenModel(FrozenModel):
    client: tinker.SamplingClient
    notifier: SlowCallNotifier
    folder: Path
    max_context: int

    def __post_init__(self) -> None:
        self.sampler = TinkerSampler(self.client, FOREIGN_POLICY)

    async def logprobs(
        self, sequences: list[IntArray], temperatures: list[FloatArray] | None = None
    ) -> list[FloatArray]:
        del temperatures  # `compute_logprobs` uses temperature 1.
        prompts = [tinker.ModelInput.from_ints(ids.tolist()) for ids in sequences]
        futures = [sdk.awaitable(self.client.compute_logprobs(prompt)) for prompt in prompts]
        rows = await self.notifier.wait(asyncio.gather(*futures), "compute_logprobs")
        return [after_the_first(row, len(ids)) for row, ids in zip(rows, sequences, strict=True)]


@dataclass
class SlowCallNotifier:
    service: str
    note: Callable[[str], None]
    first_note_s: float = FIRST_NOTE_S

    async def wait(self, call: Awaitable[T], what: str) -> T:
        """Await `call`. Raises EngineError for whatever the SDK raises."""
        waiting = asyncio.ensure_future(call)
        loop = asyncio.get_running_loop()
        began, timeout = loop.time(), self.first_note_s
        try:
            while not (await asyncio.wait({waiting}, timeout=timeout))[0]:
                timeout = NEXT_NOTE_S
                self.note(f"waiting for {self.service}: {what}, {loop.time() - began:.0f} s so far")
            return waiting.result()
        except EngineError:
            raise
        except Exception as error:
            raise EngineError(f"{self.service}: {what}: {sdk.explained(error)}") from error
        finally:
            waiting.cancel()


@dataclass
class SentCall(Generic[T]):
    notifier: SlowCallNotifier
    call: Awaitable[T]
    what: str

    def __await__(self) -> Generator[Any, None, T]:
        return self.notifier.wait(self.call, self.what).__await__()


@dataclass(eq=False)
class NotifyingClient:
    training: tinker.TrainingClient
    notifier: SlowCallNotifier
    save: Callable[[str], Awaitable[tinker.types.SaveWeightsResponse]]

    def forward(
        self,
        data: list[tinker.Datum],
        loss_fn: tinker.types.LossFnType,
        loss_fn_config: Mapping[str, float | str] | None = None,
    ) -> Awaitable[tinker.ForwardBackwardOutput]:
        sent = self.training.forward(data, loss_fn, loss_fn_config)
        return self._wait(_with_loss(sent), "forward")

    def forward_backward(
        self,
        data: list[tinker.Datum],
        loss_fn: tinker.types.LossFnType,
        loss_fn_config: Mapping[str, float | str] | None = None,
    ) -> Awaitable[tinker.ForwardBackwardOutput]:
        sent = self.training.forward_backward(data, loss_fn, loss_fn_config)
        return self._wait(_with_loss(sent), "forward_backward")

    def optim_step(self, optim_params: tinker.AdamParams) -> Awaitable[tinker.types.OptimStepResponse]:
        return self._wait(self.training.optim_step(optim_params), "optim_step")

    def save_state(self, name: str) -> Awaitable[tinker.types.SaveWeightsResponse]:
        return self.save(name)

    def _wait(self, future: Awaitable[T], what: str) -> SentCall[T]:
        return SentCall(self.notifier, future, what)


def _path_at_service(model: str) -> str:
    """`model`, or the checkpoint in its folder, as a tinker:// path; else empty."""
    is_checkpoint = bool(model) and (Path(model).expanduser() / POINTER).is_file()
    return _path_of_checkpoint(model) if is_checkpoint or model.startswith(TINKER_PATH) else ""


def _path_of_checkpoint(checkpoint: str) -> str:
    if checkpoint.startswith(TINKER_PATH):
        return checkpoint
    return _pointed_to(Path(local_checkpoint(checkpoint)))


def _pointed_to(folder: Path) -> str:
    file = folder.expanduser() / POINTER
    if not file.is_file():
        raise ConfigError(
            f"engine.backend: {folder} is not a checkpoint of a service (it has no {POINTER}); use the "
            "backend that wrote it"
        )
    return json.loads(file.read_text(encoding="utf-8"))["path"]


async def _lacks(base_url: str) -> list[str]:
    server = base_url or os.environ.get("TINKER_BASE_URL", "")
    return sdk.lacks_of_sdk() + (await sdk.lacks_of_server(server) if server else [])


async def _with_loss(output: Awaitable[tinker.ForwardBackwardOutput]) -> tinker.ForwardBackwardOutput:
    """Add `loss:sum`, from SkyRL's token losses if necessary."""
    found = await output
    if "loss:sum" in found.metrics:
        return found
    if not all(TOKEN_LOSSES in row for row in found.loss_fn_outputs):
        raise EngineError(f"the reply has neither the metric loss:sum nor {TOKEN_LOSSES} for each sequence")
    losses = [float(row[TOKEN_LOSSES].to_numpy().sum()) for row in found.loss_fn_outputs]
    found.metrics["loss:sum"] = sum(losses)
    return found


def after_the_first(row: Sequence[float | None], length: int) -> FloatArray:
    """float32 [length]. For the first token, Tinker has a placeholder, SkyRL nothing."""
    if len(row) not in (length, length - 1):
        raise EngineError(f"compute_logprobs returned {len(row)} values for a prompt of {length} tokens")
    return np.array([0.0, *row[len(row) - length + 1 :]], dtype=np.float32)


async def _limits(
    service: tinker.ServiceClient, config: EngineConfig, own: int, notifier: SlowCallNotifier
) -> tuple[str, int]:
    """Return the model's name there, and its context length, at most `own`."""
    asked = sdk.capabilities(service, config.base_url)
    capabilities = await notifier.wait(asked, "get_server_capabilities")
    models = {model.model_name: model for model in capabilities.supported_models if model.model_name}
    name = config.service_model or (next(iter(models)) if len(models) == 1 else "")
    if name not in models:
        raise ConfigError(
            f"engine.service_model: {config.service_model!r} is not one of {', '.join(sorted(models))}"
        )
    # Older SDKs or servers lack these fields.
    if getattr(models[name], "trainable", None) is False:
        raise ConfigError(f"engine.service_model: the service does not train {name!r}")
    return name, min(own, getattr(models[name], "max_context_length", None) or own)


def _write_folder(folder: Path, name: str, text: str) -> None:
    staging = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    (staging / name).write_text(text, encoding="utf-8")
    if folder.exists():
        shutil.rmtree(folder)
    staging.rename(folder)
