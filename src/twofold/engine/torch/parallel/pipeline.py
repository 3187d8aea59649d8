"""Pipeline parallelism: a model that computes the layers of one stage, and passes hidden states on to the next."""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from twofold.engine.torch.parallel.group import RankGroup


class Elsewhere(nn.Module):
    """Stands for a module that another stage computes: what goes in comes out."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        if hasattr(module, "attention_type"):  # some models ask each layer for the mask that it takes
            self.attention_type = module.attention_type

    def forward(self, *arguments: Any, **named: Any) -> Any:  # noqa: ANN401  (of whatever type that is)
        return arguments[0] if arguments else next(iter(named.values()))


class _Shape(nn.Module):
    """Stands for the embedding on later stages: zeros where the hidden states of the stage before will be."""

    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        weight = embedding.weight
        assert isinstance(weight, torch.Tensor)  # noqa: S101  (every embedding has one; tells the type checker)
        self._width, self._dtype = weight.shape[1], weight.dtype

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        shape = (*input_ids.shape, self._width)
        return torch.zeros(shape, dtype=self._dtype, device=input_ids.device)


def stage_layers(model: PreTrainedModel) -> nn.ModuleList | None:
    """The layers that stages can divide; None where the model keeps them in another way.

    transformers says that a model can be divided by giving it a plan. OPT has none, and is built like those that do.
    """
    layers = getattr(model.get_decoder(), "layers", None)
    expected = model.config.get_text_config(decoder=True).num_hidden_layers
    divisible = model.supports_pp_plan or model.config.model_type == "opt"
    return layers if divisible and isinstance(layers, nn.ModuleList) and len(layers) == expected else None


def keep_stage(model: PreTrainedModel, group: RankGroup) -> range:
    """Take all that other stages compute out of `model`, in place; returns the layers that are left."""
    layers = stage_layers(model)
    assert layers is not None  # noqa: S101  (checked when the service starts; tells the type checker)
    kept = group.split.layers(group.rank, len(layers))
    if kept.start > 0:
        model.set_input_embeddings(_Shape(model.get_input_embeddings()))
        layers[kept.start].register_forward_pre_hook(
            lambda _layer, arguments, named: _replace_first(group, arguments, named), with_kwargs=True
        )
    if kept.stop < len(layers):
        layers[kept.stop - 1].register_forward_hook(
            lambda _layer, _arguments, output: group.send_on(
                output[0] if isinstance(output, tuple) else output
            )
        )
        model.set_output_embeddings(Elsewhere(model.get_output_embeddings()))
    for layer in set(range(len(layers))) - set(kept):
        layers[layer] = Elsewhere(layers[layer])
    return kept


def _replace_first(
    group: RankGroup, arguments: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Hidden states are the first argument of a layer, however it is called."""
    if arguments:
        return (group.receive(arguments[0]), *arguments[1:]), named
    name, placeholder = next(iter(named.items()))
    return (), {**named, name: group.receive(placeholder)}
