"""LoRA: one frozen base model, and adapters over it, each the weights of one run.

PEFT's module tree trains, and checkpoints have its files and names. An adapter is float32, and adds `alpha /
rank` times B A x to a product.
"""

from __future__ import annotations

import itertools
import json
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import ParamWrapper
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tinkerscript.engine.decoder import AdapterTensors, Decoder, HubDecoder, decoder_gap, own_logits
from tinkerscript.engine.layer_kinds import narrowed_windows
from tinkerscript.engine.quantization import ROUTERS, weight_of
from tinkerscript.engine.training import Weights
from tinkerscript.engine.weights import LoraSettings, load_model
from tinkerscript.errors import EngineError, EngineRequestError
from tinkerscript.model_folder import ADAPTER_CONFIG, base_of_adapter, base_of_folder, read_json

ADAPTER_WEIGHTS = "adapter_model.safetensors"

PEFT_PREFIX = "base_model.model."

CANARY_SHARE = 0.3
"""Norm of a canary's change of a module, relative to the module's weights."""

EXPERTS = "experts"
"""Target for experts' weights, which are not linear modules; part of `mlp`."""

_ATTENTION = ("attn", "attention")
_MLP = ("mlp", "ffn", "feed_forward")


class LoraBase:
    """Not thread-safe: the engine's thread owns it."""

    def __init__(self, model: PreTrainedModel, folder: Path, kind: Callable[..., Decoder]) -> None:
        self.model = model.requires_grad_(False)
        self.folder = folder
        # Needs plain modules, before the first adapter wraps them.
        self.decoder: Decoder = kind(model, model.dtype, shares=True)
        self.plain = self.decoder.with_adapter(AdapterTensors(1.0, {}))
        self._peft: PeftModel | None = None
        self._numbers = itertools.count()
        self._slots: dict[tuple[str, ...], str] = {}

        # Adapters in the tree to delete; any thread may have dropped their `Adapter`.
        self._unused: deque[str] = deque()

    def new_adapter(self, settings: LoraSettings) -> Adapter:
        """A new adapter changes nothing. Raises EngineRequestError for missing targets."""
        self._remove_unused()
        name = self._add(settings)
        adapter = Adapter(self, name, settings)
        weakref.finalize(adapter, self._unused.append, name).atexit = False
        return adapter

    def adapter_of(self, folder: Path) -> Adapter:
        adapter = self.new_adapter(settings_of(folder))
        adapter.read(folder)
        return adapter

    def decoder_of(self, folder: Path) -> Decoder:
        settings = settings_of(folder)
        tensors = self.checked(folder, load_adapter(folder), settings)
        return self.frozen(tensors, settings)

    def frozen(self, modules: dict[str, tuple[Tensor, Tensor]], settings: LoraSettings) -> Decoder:
        slot = self._slot(settings) if isinstance(self.decoder, HubDecoder) else ""
        return self.decoder.with_adapter(AdapterTensors(settings.alpha / settings.rank, modules, slot))

    def prove(self, settings: LoraSettings) -> None:
        """Raise EngineError unless decoders agree with the module tree under a large adapter."""
        adapter = self.new_adapter(settings)
        adapter.exaggerate()
        adapter.activate()
        own = own_logits(self.model)
        with narrowed_windows(self.model):
            gap = decoder_gap(own, adapter.decoder())
        if gap > own.limit:
            raise EngineError(
                f"model type {self.model.config.model_type!r} cannot be decoded exactly with an adapter: log "
                f"probabilities differ from the module tree's by {gap:.2g} nats, with {own.limit:.2g} allowed"
            )

    def activate(self, name: str) -> None:
        self.decoder.forget()
        tree: Any = self._peft
        tree.base_model.set_adapter(name)

    def _add(self, settings: LoraSettings) -> str:
        embeddings: Any = self.model.get_input_embeddings()
        limit = embeddings.weight.shape[1]
        if not 1 <= settings.rank <= limit:
            raise EngineRequestError(
                f"lora rank: must be 1 to {limit}, the model's hidden size, got {settings.rank}"
            )
        name = f"adapter{next(self._numbers)}"
        config = LoraConfig(
            r=settings.rank,
            lora_alpha=settings.alpha,  # pyright: ignore[reportArgumentType]
            target_modules=target_modules(self.model, settings.targets),
            target_parameters=target_parameters(self.model, settings.targets) or None,
            base_model_name_or_path=str(self.folder),
            task_type="CAUSAL_LM",
        )
        self.decoder.forget()
        with _seeded(settings.seed, self.model.device), warnings.catch_warnings():
            # PEFT warns about tied embeddings, which `merged` unties.
            warnings.simplefilter("ignore")
            if self._peft is None:
                self._peft = get_peft_model(self.model, config, adapter_name=name)  # pyright: ignore
            else:
                self._peft.add_adapter(name, config)
        return name

    def _remove_unused(self) -> None:
        while self._unused:
            self.decoder.forget()
            assert self._peft is not None
            with warnings.catch_warnings():
                # PEFT warns that another adapter becomes active.
                warnings.simplefilter("ignore")
                self._peft.delete_adapter(self._unused.popleft())

    def _slot(self, settings: LoraSettings) -> str:
        if settings.targets not in self._slots:
            self._slots[settings.targets] = self._add(replace(settings, rank=1))
        return self._slots[settings.targets]

    def checked(
        self, folder: Path, modules: dict[str, tuple[Tensor, Tensor]], settings: LoraSettings
    ) -> dict[str, tuple[Tensor, Tensor]]:
        for name, expected in self._shapes(settings).items():
            if name not in modules or tuple(tuple(each.shape) for each in modules[name]) != expected:
                raise EngineError(f"the adapter {folder} belongs to another model: {name} does not fit")
        return {name: (a.to(self.model.device), b.to(self.model.device)) for name, (a, b) in modules.items()}

    def _shapes(self, settings: LoraSettings) -> dict[str, tuple[tuple[int, int], tuple[int, int]]]:
        rank = settings.rank
        shapes: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {}
        for name in target_modules(self.model, settings.targets):
            layer: Any = self.model.get_submodule(name)
            width, features = linear_shape(getattr(layer, "base_layer", layer))
            shapes[name] = (rank, features), (width, rank)
        if target_parameters(self.model, settings.targets):
            self._slot(settings)  # Experts nest within one module, so only PEFT's tree has the paths.
            for name, module in self.model.named_modules():
                if isinstance(module, ParamWrapper):
                    experts: Any = module
                    ranks = rank * experts.num_experts
                    shapes[name] = (ranks, experts.in_features), (experts.out_features, ranks)
        return shapes


class Adapter(Weights):
    """One run's adapter. The base drops its tensors some time after garbage collection."""

    def __init__(self, base: LoraBase, name: str, settings: LoraSettings) -> None:
        self.base, self.model = base, base.model
        self.settings = settings
        self._name = name
        self._layers: dict[str, Any] = {
            path: module
            for path, module in self.model.named_modules()
            if name in getattr(module, "lora_A", ())
        }
        self.parameters = [each for pair in self._factors().values() for each in pair]

    def activate(self) -> None:
        self.base.activate(self._name)

    def decoder(self) -> Decoder:
        modules = {path: (a.detach().clone(), b.detach().clone()) for path, (a, b) in self._factors().items()}
        return self.base.frozen(modules, self.settings)

    def write(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        tensors = {
            f"{PEFT_PREFIX}{path}.lora_{part}.weight": each.detach().to("cpu", dtype).contiguous()
            for path, pair in self._factors().items()
            for part, each in zip("AB", pair, strict=True)
        }
        save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
        base, revision = base_of_folder(self.base.folder)
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "revision": revision,
            "r": self.settings.rank,
            "lora_alpha": self.settings.alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": any(isinstance(layer.base_layer, Conv1D) for layer in self._layers.values()),
            "inference_mode": True,
            "target_modules": self._target_modules(),
            "target_parameters": target_parameters(self.model, self.settings.targets) or None,
        }
        (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    def read(self, folder: Path) -> None:
        theirs = settings_of(folder)
        if (theirs.rank, theirs.alpha) != (self.settings.rank, self.settings.alpha):
            raise EngineError(
                f"the adapter {folder} has rank {theirs.rank} and alpha {theirs.alpha:g}, "
                f"not {self.settings.rank} and {self.settings.alpha:g}"
            )
        modules = self.base.checked(folder, load_adapter(folder), theirs)
        if modules.keys() != self._layers.keys():
            raise EngineError(f"the adapter {folder} has other targets: {sorted(theirs.targets)}")
        with torch.no_grad():
            for path, pair in self._factors().items():
                for mine, other in zip(pair, modules[path], strict=True):
                    mine.copy_(other)

    @property
    def kinds(self) -> list[str]:
        experts = {EXPERTS} if len(self._linear) < len(self._layers) else set[str]()
        return sorted({path.rpartition(".")[2] for path in self._linear} | experts)

    @property
    def _linear(self) -> list[str]:
        return [path for path, layer in self._layers.items() if not isinstance(layer, ParamWrapper)]

    def exaggerate(self) -> None:
        random = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for path, (a, b) in self._factors().items():
                b.copy_(torch.randn(b.shape, generator=random))
                layer = self._layers[path]
                if isinstance(layer, ParamWrapper):
                    experts: Any = layer
                    weight, norm = experts.get_param(), experts.get_delta_weight(self._name).float().norm()
                else:
                    weight = weight_of(layer.base_layer)
                    norm = ((b.T @ b) * (a @ a.T)).sum().sqrt() * (self.settings.alpha / self.settings.rank)
                b.mul_(CANARY_SHARE * weight.float().norm() / norm)

    def _target_modules(self) -> list[str]:
        short = sorted({path.rpartition(".")[2] for path in self._linear})
        return short if set(target_modules(self.model, short)) == set(self._linear) else sorted(self._linear)

    def _factors(self) -> dict[str, tuple[nn.Parameter, nn.Parameter]]:
        return {
            path: (layer.lora_A[self._name].weight, layer.lora_B[self._name].weight)
            for path, layer in self._layers.items()
        }


def target_modules(model: PreTrainedModel, targets: Sequence[str]) -> list[str]:
    head = model.get_output_embeddings()
    found: dict[str, list[str]] = {target: [] for target in targets}
    towers = _outside_of_text(model)
    for name, module in model.named_modules():
        if module in towers:
            continue
        layer = getattr(module, "base_layer", module)
        if not isinstance(layer, (nn.Linear, Conv1D)) or name.rpartition(".")[2].startswith("lora_"):
            continue
        for target in {_kind(name, module is head), name.rpartition(".")[2], name} & found.keys():
            found[target].append(name)
    of_experts = {"mlp", EXPERTS} if target_parameters(model, targets) else set[str]()
    if missing := [target for target, names in found.items() if not names and target not in of_experts]:
        raise EngineRequestError(
            f"lora targets: {missing[0]!r} is not a linear module of {model.config.model_type}; "
            "use attn, mlp, unembed, or the last names of modules, such as q_proj"
        )
    return list(dict.fromkeys(name for names in found.values() for name in names))


def target_parameters(model: PreTrainedModel, targets: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(name for name, _ in expert_weights(model, targets)))


def expert_weights(model: PreTrainedModel, targets: Sequence[str]) -> list[tuple[str, Tensor]]:
    found: list[tuple[str, Tensor]] = []
    for path, module in model.named_modules() if {"mlp", EXPERTS} & set(targets) else ():
        owner = path.replace(".base_layer", "").rpartition(".")[2]
        if owner == EXPERTS:
            found += [
                (f"{EXPERTS}.{name}", weight)
                for name, weight in module.named_parameters(recurse=False)
                if weight.dim() == 3
            ]
    return found


def _outside_of_text(model: PreTrainedModel) -> set[nn.Module]:
    if model.config.get_text_config() is model.config:
        return set()
    text: Any = model.get_decoder()
    head: Any = model.get_output_embeddings()
    return set(model.modules()) - set(text.modules()) - set(head.modules())


def settings_of(folder: Path) -> LoraSettings:
    config = read_json(folder / ADAPTER_CONFIG)
    if not config:
        raise EngineError(f"{folder} has no {ADAPTER_CONFIG}, so it is not a LoRA adapter")
    if config.get("peft_type") != "LORA" or config.get("use_dora") or config.get("use_rslora"):
        raise EngineError(f"{folder}: only plain LoRA adapters are supported")
    if isinstance(config["target_modules"], str):
        raise EngineError(f"{folder}: target_modules must be a list, not {config['target_modules']!r}")
    targets = [*config["target_modules"], *([EXPERTS] if config.get("target_parameters") else [])]
    return LoraSettings(config["r"], float(config["lora_alpha"]), tuple(targets))


def load_adapter(folder: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """Module path -> A (rank, in) and B (out, rank), float32."""
    tensors = load_file(folder / ADAPTER_WEIGHTS)
    names = {name.removeprefix(PEFT_PREFIX).rpartition(".lora_")[0] for name in tensors}
    return {
        path: (
            tensors[f"{PEFT_PREFIX}{path}.lora_A.weight"].float(),
            tensors[f"{PEFT_PREFIX}{path}.lora_B.weight"].float(),
        )
        for path in sorted(names)
    }


def merged(folder: Path) -> PreTrainedModel:
    """Merge the adapter into its base, in the base's dtype."""
    base = base_of_adapter(folder)
    if base is None:
        raise EngineError(
            f"{folder} has no {ADAPTER_CONFIG}, so it has no LoRA adapter to merge; a checkpoint of all "
            "weights is a complete model"
        )
    model = load_model(base, dtype="auto")
    settings, modules = settings_of(folder), load_adapter(folder)
    names = target_parameters(model, settings.targets)
    experts = {path: modules.pop(path) for path in list(modules) if names and EXPERTS in path.split(".")}
    if experts:
        model = _with_experts(model, experts, settings, names)
    head = model.get_output_embeddings()
    with torch.no_grad():
        for path, (a, b) in modules.items():
            try:
                layer: Any = model.get_submodule(path)
            except AttributeError as error:
                raise EngineError(f"the adapter {folder} belongs to another model: it has {path}") from error
            if layer is head and model.config.tie_word_embeddings:
                layer.weight = nn.Parameter(layer.weight.clone())
                model.config.tie_word_embeddings = False
            change = b @ a * (settings.alpha / settings.rank)
            change = change.t() if isinstance(layer, Conv1D) else change
            if change.shape != layer.weight.shape:
                raise EngineError(f"the adapter {folder} belongs to another model: {path} does not fit")
            layer.weight.copy_(layer.weight.float() + change)
    return model


def _with_experts(
    model: PreTrainedModel,
    experts: dict[str, tuple[Tensor, Tensor]],
    settings: LoraSettings,
    names: list[str],
) -> PreTrainedModel:
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # pyright: ignore[reportArgumentType]
        target_modules=[],
        target_parameters=names,
    )
    tree: Any = get_peft_model(model, config, adapter_name="merged")
    for path, pair in experts.items():
        try:
            layer: Any = tree.base_model.model.get_submodule(path)
            for factor, tensor in zip((layer.lora_A, layer.lora_B), pair, strict=True):
                factor["merged"].load_state_dict({"weight": tensor})
        except (AttributeError, RuntimeError) as error:
            raise EngineError(f"the adapter belongs to another model: {path} does not fit") from error
    return tree.merge_and_unload()


def _kind(path: str, is_head: bool) -> str:
    if is_head:
        return "unembed"
    if path.rpartition(".")[2] in ROUTERS:  # A changed choice could not be replayed.
        return ""
    parts = path.lower()
    if any(word in parts for word in _ATTENTION):
        return "attn"
    return "mlp" if any(word in parts for word in _MLP) else ""


def linear_shape(layer: nn.Linear | Conv1D) -> tuple[int, int]:
    """(out, in)"""
    if isinstance(layer, Conv1D):
        return layer.weight.shape[1], layer.weight.shape[0]
    return layer.out_features, layer.in_features


@contextmanager
def _seeded(seed: int, device: torch.device) -> Generator[None]:
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
