"""Training on several devices: one process (rank) each, and all take the same optimizer steps.

All ranks call the same `RankTrainer` methods in order, with equal numbers of microbatches, so that collective
operations match. A follower waits on its connection, because a collective operation would time out.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

import numpy as np
import tinker
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import Parameter

from tinkerscript.engine.decoder import Decoder, HubDecoder, own_logits
from tinkerscript.engine.lora import LoraBase
from tinkerscript.engine.losses import ConfiguredLoss, resolve_loss
from tinkerscript.engine.packing import (
    Packed,
    TokenTree,
    attend_in_segments,
    chain,
    microbatches,
    shares_prefixes,
)
from tinkerscript.engine.ranks import ANSWER_POLL_S, Ranks, RankSpec, is_launched, meet, receive
from tinkerscript.engine.routing import Routing
from tinkerscript.engine.training import AllWeights, Example, Trainer, Weights, run_to_end
from tinkerscript.engine.weights import checkpoint_activations, load_model
from tinkerscript.errors import EngineError

Named = tuple[str, Mapping[str, float | str] | None]

Skeleton = dict[int, dict[str, float | None]]
"""Parameter's index -> its optimizer state; None for tensors."""

BUCKET_ELEMENTS = 2**25

FILLER = -1


@dataclass(frozen=True, slots=True)
class Portion:
    examples: list[Example]
    batches: list[list[TokenTree]]


def balanced(trees: Sequence[TokenTree], ranks: int) -> list[list[TokenTree]]:
    shares: list[list[TokenTree]] = [[] for _ in range(ranks)]
    tokens = [0] * ranks
    for tree in sorted(trees, key=lambda tree: (-tree.size, tree.paths[0][0])):
        rank = tokens.index(min(tokens))
        shares[rank].append(tree)
        tokens[rank] += tree.size
    return shares


def portions(
    examples: Sequence[Example],
    rows: Callable[[int], list[TokenTree]],
    *,
    ranks: int,
    budget: int,
    segments: bool = False,
) -> list[Portion]:
    """Split data into portions with about equal tokens and equal numbers of microbatches.

    Rows are cut if that makes the largest portion a tenth smaller.
    """
    whole = rows(budget)
    shares = balanced(whole, ranks)
    even = -(-sum(tree.size for tree in whole) // ranks)
    if even < budget and _largest(narrow := balanced(rows(even), ranks)) < 0.9 * _largest(shares):
        shares = narrow
    batched = [microbatches(share, budget, segments=segments) for share in shares]
    longest = max(map(len, batched))
    return [_portion(examples, batches, fillers=longest - len(batches)) for batches in batched]


def _largest(shares: Sequence[Sequence[TokenTree]]) -> int:
    return max(sum(tree.size for tree in share) for share in shares)


def _portion(examples: Sequence[Example], batches: list[list[TokenTree]], *, fillers: int) -> Portion:
    used = [index for batch in batches for tree in batch for index, _ in tree.paths]
    place = {index: at for at, index in enumerate(used)}
    first = examples[0]
    inputs = {name: value[:1] for name, value in first.inputs.items()}
    filler = Example(FILLER, first.ids[:1], inputs, None if first.experts is None else first.experts[:1])
    return Portion(
        [*(examples[index] for index in used), filler],
        [
            *([_renumbered(tree, place) for tree in batch] for batch in batches),
            *([chain(len(used), filler.ids, filler.experts)] for _ in range(fillers)),
        ],
    )


def _renumbered(tree: TokenTree, place: Mapping[int, int]) -> TokenTree:
    return replace(tree, paths=[(place[index], path) for index, path in tree.paths])


NO_LOSS = ConfiguredLoss("none", lambda logprobs, _inputs, _settings: logprobs * 0, {})


class ShardedWeights(Weights):
    def __init__(self, local: Weights, device: str, ranks: Ranks | None, whole: Weights | None) -> None:
        """On rank 0, `whole` keeps all weights, to sample and write."""
        self._local, self._ranks, self._whole = local, ranks, whole
        mesh = init_device_mesh(torch.device(device).type, (dist.get_world_size(),))
        model: Any = local.model
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        order = [names[id(parameter)] for parameter in local.parameters]
        layers = model._no_split_modules or ()
        for module in [each for each in model.modules() if type(each).__name__ in layers]:
            fully_shard(module, mesh=mesh)
        fully_shard(model, mesh=mesh)
        self.model = model
        sharded = dict(model.named_parameters())
        self.parameters = [sharded[name] for name in order]

    @property
    def sources(self) -> list[Parameter] | None:
        return self._whole.parameters if self._whole is not None else None

    def activate(self) -> None:
        model: Any = self.model
        model.reshard()  # After a pass without gradients, the root still holds gathered weights.

    def decoder(self) -> Decoder:
        return self._gathered().decoder()

    def write(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        self._gathered().write(folder, dtype)

    def read(self, folder: Path) -> None:
        assert self._whole is not None
        self._whole.read(folder)

    def _gathered(self) -> Weights:
        assert self._ranks is not None
        assert self._whole is not None
        self._ranks.together("gather_weights", (), self.gather)
        return self._whole

    @torch.no_grad()
    def gather(self) -> None:
        """Collect the full weights at rank 0. All ranks must call this."""
        for at, parameter in enumerate(self.parameters):
            full = _whole(parameter)
            if self.sources is not None:
                self.sources[at].copy_(full)


class RankTrainer(Trainer):
    @property
    def _is_sharded(self) -> bool:
        return isinstance(self.weights, ShardedWeights)

    def compute(
        self, portion: Portion, named: Named, backward: bool, entropies: bool, routing: Routing | None
    ) -> tuple[list[np.ndarray], float]:
        self._routing = routing
        losses_of = resolve_loss(named[0]).configured(*named)
        return run_to_end(
            self._compute(
                portion.examples, portion.batches, losses_of, backward=backward, entropies=entropies
            )
        )

    def take_step(self, params: tinker.AdamParams) -> float:
        return Trainer._step(self, params)

    def gather_weights(self) -> None:
        assert isinstance(self.weights, ShardedWeights)
        self.weights.gather()

    def gather_optimizer(self) -> dict[str, Any]:
        """Return the optimizer state as in one process, empty on followers."""
        own, is_first = Trainer.optimizer_state(self), dist.get_rank() == 0
        state: dict[int, dict[str, Tensor]] = {}
        for at, entry in own["state"].items():
            for name, value in entry.items():
                whole = _whole(value)
                if is_first:
                    state.setdefault(at, {})[name] = whole.cpu()
        return own | {"state": state} if is_first else {}

    @torch.no_grad()
    def take_from_rank_0(self, skeleton: Skeleton, moments: Mapping[int, Mapping[str, Tensor]]) -> None:
        self.reset_optimizer()
        parameters, is_first = self.weights.parameters, dist.get_rank() == 0
        sources = self.weights.sources if isinstance(self.weights, ShardedWeights) else parameters
        for at, parameter in enumerate(parameters):
            parameter.copy_(_part(sources[at] if is_first and sources else None, parameter))
        for at, entry in skeleton.items():
            parameter = parameters[at]
            self._optimizer.state[parameter] = {
                name: _part(moments[at][name] if is_first else None, parameter)
                if value is None
                else torch.tensor(value)
                for name, value in entry.items()
            }

    def _loss(
        self, packed: Packed, examples: list[Example], losses_of: ConfiguredLoss, *, entropies: bool
    ) -> tuple[Tensor, Tensor]:
        is_filler = examples[packed.sequences[0][0]].index == FILLER
        return super()._loss(packed, examples, NO_LOSS if is_filler else losses_of, entropies=entropies)

    def _backward(self, loss: Tensor) -> None:
        # FSDP averages gradients, but losses are sums.
        super()._backward(loss * dist.get_world_size() if self._is_sharded else loss)

    @torch.no_grad()
    def _clipped_norm(self, limit: float) -> float:
        if not self._is_sharded:
            self._sum_gradients()
            return super()._clipped_norm(limit)
        gradients: list[Any] = [p.grad for p in self.weights.parameters if p.grad is not None]
        local = [gradient.to_local() for gradient in gradients]
        squared = torch.nn.utils.get_total_norm(local).to(self.model.device) ** 2
        dist.all_reduce(squared)
        norm = squared.sqrt()
        scale = (limit / (norm + 1e-6)).clamp(max=1.0)
        for gradient in local:
            gradient.mul_(scale)
        return float(norm)

    def _squares(self) -> Tensor:
        squares = super()._squares()
        if self._is_sharded:
            dist.all_reduce(squares)
        return squares

    def _local(self, tensor: Tensor) -> Tensor:
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def _sum_gradients(self) -> None:
        parameters = self.weights.parameters
        present = torch.tensor([p.grad is not None for p in parameters], device=self.model.device).int()
        dist.all_reduce(present, dist.ReduceOp.MAX)
        gradients: list[Tensor] = []
        for parameter, is_present in zip(parameters, present.tolist(), strict=True):
            if is_present:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                gradients.append(parameter.grad)
        for bucket in _buckets(gradients):
            flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
            dist.all_reduce(flat)
            sums = flat.split([gradient.numel() for gradient in bucket])
            for gradient, total in zip(bucket, sums, strict=True):
                gradient.copy_(total.view_as(gradient))


class LeadingTrainer(RankTrainer):
    def __init__(
        self, ranks: Ranks, weights: Weights, *, share_prefixes: bool, routing: Routing | None
    ) -> None:
        spec = ranks.spec
        if spec.sharding == "shard":
            weights = ShardedWeights(load_weights(spec), spec.own_device, ranks, weights)
        super().__init__(weights, share_prefixes=share_prefixes, compute_dtype=spec.autocast, routing=routing)
        self._ranks = ranks
        self._give({})

    def load(self, folder: Path, *, optimizer: bool) -> None:
        super().load(folder, optimizer=optimizer)
        if not optimizer:
            self._give({})

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        self._give(state["state"])

    def optimizer_state(self) -> dict[str, Any]:
        return self._ranks.together("gather_optimizer", (), self.gather_optimizer)[0]

    def _give(self, moments: Mapping[int, Mapping[str, Tensor]]) -> None:
        skeleton: Skeleton = {
            at: {name: None if value.dim() else float(value) for name, value in entry.items()}
            for at, entry in moments.items()
        }
        self._ranks.together(
            "take_from_rank_0", (skeleton, {}), lambda: self.take_from_rank_0(skeleton, moments)
        )

    def _pass(
        self,
        examples: list[Example],
        losses_of: ConfiguredLoss,
        named: Named,
        *,
        backward: bool,
        entropies: bool,
    ) -> Generator[None, None, tinker.ForwardBackwardOutput]:
        if not examples:
            return self._output([], 0.0)
        ranks, budget = self._ranks, self._microbatch_tokens
        parts = portions(
            examples,
            lambda budget: self._rows(examples, budget),
            ranks=ranks.size,
            budget=budget,
            segments=self._segments,
        )
        mine = parts[0]
        with ranks.computing():
            ranks.tell("compute", [(part, named, backward, entropies, self._routing) for part in parts[1:]])
            own = yield from self._compute(
                mine.examples, mine.batches, losses_of, backward=backward, entropies=entropies
            )
            while (answers := ranks.answers(ANSWER_POLL_S)) is None:
                yield
        results: list[tuple[list[np.ndarray], float]] = [own, *answers]
        outputs: list[np.ndarray] = [np.empty(0, np.float32)] * len(examples)
        for part, (rows, _) in zip(parts, results, strict=True):
            for example, row in zip(part.examples, rows, strict=True):
                if example.index != FILLER:
                    outputs[example.index] = row
        return self._output(outputs, sum(loss for _, loss in results))

    def drop_gradients(self) -> None:
        self._ranks.together("drop_gradients", (), super().drop_gradients)

    def _step(self, params: tinker.AdamParams) -> float:
        norm, others = self._ranks.together("take_step", (params,), lambda: self.take_step(params))
        if any(str(other) != str(norm) for other in others):
            raise self._ranks.fail(
                EngineError(f"the ranks are out of step: their gradient norms are {[norm, *others]}")
            )
        return norm


def load_weights(spec: RankSpec) -> Weights:
    device = "cpu" if spec.sharding == "shard" else spec.own_device
    model = load_model(spec.folder, device=device, dtype=spec.dtype, quantization=spec.quantization)
    own = own_logits(model)
    if shares_prefixes(model, own):
        attend_in_segments(model, own)
    if spec.activation_checkpointing:
        checkpoint_activations(model)
    if spec.lora is None:
        return AllWeights(model)
    # A HubDecoder has no weights, so sharding can free the base.
    return LoraBase(model, spec.folder, HubDecoder).new_adapter(spec.lora)


def _whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _part(full: Tensor | None, like: Tensor) -> Tensor:
    """Return this rank's part of rank 0's tensor. All ranks must call this."""
    if full is None:
        given = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    else:
        given = full.detach().to(like.device, like.dtype).contiguous()
    if isinstance(like, DTensor):
        return distribute_tensor(given, like.device_mesh, like.placements)
    dist.broadcast(given, 0)
    return given


def _buckets(tensors: Sequence[Tensor]) -> Generator[list[Tensor]]:
    bucket: list[Tensor] = []
    for tensor in tensors:
        if bucket and sum(each.numel() for each in bucket) + tensor.numel() > BUCKET_ELEMENTS:
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket


def follow() -> None:
    # Rank 0 gets these signals too, saves its state, and then ends this rank.
    for number in (signal.SIGINT, signal.SIGTERM) if is_launched() else (signal.SIGINT,):
        signal.signal(number, signal.SIG_IGN)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store, connection = meet(size)
    connection.send(rank)
    spec: RankSpec = connection.recv()
    messages: SimpleQueue[tuple[str, tuple[Any, ...]] | None] = SimpleQueue()
    Thread(target=receive, args=(connection, messages), daemon=True).start()
    torch.set_num_threads(spec.threads)
    weights = load_weights(spec)
    connection.send("loaded")
    if messages.get() is None:
        return
    spec.join(store, rank, size)
    if spec.sharding == "shard":
        weights = ShardedWeights(weights, spec.own_device, None, None)
    trainer = RankTrainer(weights, compute_dtype=spec.autocast)
    while (message := messages.get()) is not None:
        method, arguments = message
        connection.send(getattr(trainer, method)(*arguments))
    dist.destroy_process_group()
