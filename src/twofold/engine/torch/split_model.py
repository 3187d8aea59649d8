"""Tensor (Megatron-LM) and pipeline parallelism: a worker's process group, and each rank's part of the model."""

import os
import re
from dataclasses import replace
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from twofold.engine.torch.loader import LoadedModel
from twofold.errors import ConfigurationError
from twofold.kvcache.sharding import UNSHARDED, Sharding, check_sharding


class RankGroup:
    """Process group of a worker's ranks on one host, with gloo on CPUs and NCCL on GPUs."""

    def __init__(self, split: Sharding, rank: int, store: str, device: str) -> None:
        self.split, self.rank = split, rank
        place = self._device = torch.device(device)
        if place.type == "cuda":
            torch.cuda.set_device(place)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group(
            "nccl" if place.type == "cuda" else "gloo",
            # The ranks find each other through this file, which is new for each worker process and private to its user.
            store=dist.FileStore(store, split.ranks),  # type: ignore[attr-defined]
            rank=rank,
            world_size=split.ranks,
            device_id=place if place.type == "cuda" else None,
        )
        names = ("pipeline", "tensor")
        self.shards: DeviceMesh = init_device_mesh(place.type, (split.pipeline, split.tensor), mesh_dim_names=names)[
            "tensor"
        ]

    def least(self, number: int) -> int:
        """Return the smallest of the numbers that the ranks give."""
        found = torch.tensor(number, device=self._device)
        dist.all_reduce(found, dist.ReduceOp.MIN)
        return int(found)

    def send_on(self, hidden: torch.Tensor) -> None:
        """Send hidden states to the next pipeline stage."""
        # To the rank with the same tensor shard.
        dist.send(hidden.contiguous(), self.rank + self.split.tensor)

    def receive(self, like: torch.Tensor) -> torch.Tensor:
        """Receive hidden states, in the shape of `like`, from the previous pipeline stage."""
        hidden = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        dist.recv(hidden, self.rank - self.split.tensor)
        return hidden


class MissingLayer(nn.Module):
    """Placeholder for a module of another pipeline stage; returns its first argument."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        if hasattr(module, "attention_type"):  # some models read each layer's mask type
            self.attention_type = module.attention_type

    def forward(self, *arguments: Any, **named: Any) -> Any:  # noqa: ANN401  (any type)
        return arguments[0] if arguments else next(iter(named.values()))


class _Shape(nn.Module):
    """Placeholder for the embedding on later pipeline stages; returns zeros."""

    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        weight = embedding.weight
        assert isinstance(weight, torch.Tensor)  # noqa: S101  (for the type checker)
        self._width, self._dtype = weight.shape[1], weight.dtype

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        shape = (*input_ids.shape, self._width)
        return torch.zeros(shape, dtype=self._dtype, device=input_ids.device)


def stage_layers(model: PreTrainedModel) -> nn.ModuleList | None:
    """Return the model's decoder layers, or None if the model does not support pipeline parallelism."""
    layers = getattr(model.get_decoder(), "layers", None)
    expected = model.config.get_text_config(decoder=True).num_hidden_layers
    divisible = model.supports_pp_plan or model.config.model_type == "opt"
    return layers if divisible and isinstance(layers, nn.ModuleList) and len(layers) == expected else None


def keep_stage(model: PreTrainedModel, group: RankGroup) -> range:
    """Remove the layers of other pipeline stages from `model`; return the indices of this rank's layers."""
    layers = stage_layers(model)
    assert layers is not None  # noqa: S101  (for the type checker: checked at startup)
    kept = group.split.layers(group.rank, len(layers))
    if kept.start > 0:
        model.set_input_embeddings(_Shape(model.get_input_embeddings()))
        layers[kept.start].register_forward_pre_hook(
            lambda _layer, arguments, named: _replace_first(group, arguments, named), with_kwargs=True
        )
    if kept.stop < len(layers):
        layers[kept.stop - 1].register_forward_hook(
            lambda _layer, _arguments, output: group.send_on(output[0] if isinstance(output, tuple) else output)
        )
        model.set_output_embeddings(MissingLayer(model.get_output_embeddings()))
    for layer in set(range(len(layers))) - set(kept):
        layers[layer] = MissingLayer(layers[layer])
    return kept


def _replace_first(
    group: RankGroup, arguments: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Replace a layer's first argument by the hidden states of the previous pipeline stage."""
    if arguments:
        return (group.receive(arguments[0]), *arguments[1:]), named
    name, placeholder = next(iter(named.items()))
    return (), {**named, name: group.receive(placeholder)}


try:
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism
except ImportError:  # earlier releases have another function
    apply_tensor_parallelism = None

# Tensor-parallel plans for models without a plan in transformers, by name pattern relative to a layer.
_OPT_LAYER = {
    "self_attn.q_proj": "colwise",
    "self_attn.k_proj": "colwise",
    "self_attn.v_proj": "colwise",
    "self_attn.out_proj": "rowwise",
    "fc1": "colwise",
    "fc2": "rowwise",
}
_OWN_PLANS = {"opt": {f"model.decoder.layers.*.{name}": style for name, style in _OPT_LAYER.items()}}


def tensor_plan(model: PreTrainedModel) -> dict[str, str]:
    """Return a model's tensor-parallel plan in the format of Transformers; empty if no plan is usable."""
    if apply_tensor_parallelism is None:
        return {}
    plan = _OWN_PLANS.get(model.config.model_type) or model.tp_plan or {}
    # Some plans divide only experts or the vocabulary, so that every rank would have the KV of all heads.
    if not any(rule.endswith(".k_proj") and style == "colwise" for rule, style in plan.items()):
        return {}
    return {rule: style for rule, style in plan.items() if not style.startswith("embedding_")}


def keep_shard(model: PreTrainedModel, shards: DeviceMesh) -> None:
    """Reduce the weights of `model` to this rank's shard, in place."""
    head = model.get_output_embeddings()
    if isinstance(head, nn.Linear):  # its weight may be shared with the embedding, which must stay whole
        head.weight = nn.Parameter(head.weight.detach(), requires_grad=False)
    apply_tensor_parallelism(model, shards, _by_name(model, tensor_plan(model)))
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(parameter, DTensor):
                local: torch.Tensor = parameter.to_local()  # operations on a DTensor are slower
                module.register_parameter(name, nn.Parameter(local, requires_grad=False))
        if model.config.model_type == "opt" and hasattr(module, "num_heads"):
            module.num_heads //= shards.size()  # other models derive the number from their projections


def _by_name(model: PreTrainedModel, plan: dict[str, str]) -> dict[str, str]:
    """Map the names of all sharded modules and parameters to their tensor-parallel styles."""
    named = {}
    for module_name, module in model.named_modules():
        if isinstance(module, MissingLayer):
            continue
        style = plan.get(_rule(module_name))
        for parameter, _ in module.named_parameters(recurse=False):
            full_name = f"{module_name}.{parameter}".removeprefix(".")
            if found := plan.get(_rule(full_name), style):
                named[full_name] = found
        if style is not None:
            named[module_name] = style
    return named


def _rule(name: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def check_split_model(loaded: LoadedModel, split: Sharding, name: str) -> None:
    """Raise ConfigurationError if the model does not support the sharding `split`."""
    if split == UNSHARDED:
        return
    config = loaded.model.config
    heads = int(config.get_text_config(decoder=True).num_attention_heads)
    check_sharding(split, [layer.kv_heads for layer in loaded.layers], heads, name)
    if split.tensor > 1 and not tensor_plan(loaded.model):
        raise ConfigurationError(
            f"{name} does not support tensor parallelism ({split}): transformers has no plan that divides the heads of "
            f"{config.model_type}"
        )
    if split.pipeline > 1 and stage_layers(loaded.model) is None:
        raise ConfigurationError(
            f"{name} does not support pipeline parallelism ({split}): transformers has no plan for {config.model_type}"
        )


def split_model(loaded: LoadedModel, group: RankGroup) -> LoadedModel:
    """Remove the weights of other ranks from a model, and return this rank's part."""
    split, rank = group.split, group.rank
    held = range(len(loaded.layers))
    if split.pipeline > 1:
        held = keep_stage(loaded.model, group)
    if split.tensor > 1:
        keep_shard(loaded.model, group.shards)
    layout = loaded.layout(block_size=1).of_rank(split, rank)
    return replace(
        loaded,
        layers=layout.layers,
        windows=loaded.windows[held.start : held.stop],
        first_layer=held.start,
        samples=rank == first_of_last_stage(split),
    )


def first_of_last_stage(split: Sharding) -> int:
    """Return the rank that samples tokens: the first rank of the last pipeline stage."""
    return split.ranks - split.tensor
