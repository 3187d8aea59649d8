"""What one rank of a split worker has of a model, and which models can be split."""

from dataclasses import replace

from twofold.engine.torch.loader import LoadedModel
from twofold.engine.torch.parallel.group import RankGroup
from twofold.engine.torch.parallel.pipeline import keep_stage, stage_layers
from twofold.engine.torch.parallel.tensor import keep_shard, tensor_plan
from twofold.errors import ConfigurationError
from twofold.kvcache.split import UNSPLIT, Split, check_split


def check_model(loaded: LoadedModel, split: Split, name: str) -> None:
    """Raise ConfigurationError where the ranks of a worker split like this cannot compute the model together."""
    if split == UNSPLIT:
        return
    config = loaded.model.config
    heads = int(config.get_text_config(decoder=True).num_attention_heads)
    check_split(split, [layer.kv_heads for layer in loaded.layers], heads, name)
    if split.tensor > 1 and not tensor_plan(loaded.model):
        raise ConfigurationError(
            f"{name} cannot be split over tensor ranks ({split}): transformers has no plan that divides the heads of "
            f"{config.model_type}"
        )
    if split.pipeline > 1 and stage_layers(loaded.model) is None:
        raise ConfigurationError(
            f"{name} cannot be divided into pipeline stages ({split}): transformers has no plan for {config.model_type}"
        )


def split_model(loaded: LoadedModel, group: RankGroup) -> LoadedModel:
    """The part of this rank; the model is cut down in place, on the CPU."""
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


def first_of_last_stage(split: Split) -> int:
    """The rank that samples: the last stage has the logits, and each shard of it all of them."""
    return split.ranks - split.tensor
