"""How the ranks of an instance divide a model between them, and with it the KV cache: by heads and by layers."""

from collections.abc import Sequence

import msgspec

from twofold.errors import ConfigurationError


class Split(msgspec.Struct, frozen=True):
    """`tensor` ranks share the heads of every layer; `pipeline` stages, of that many ranks each, divide the layers.

    Ranks are numbered stage by stage: rank = stage · tensor + shard. One rank is an instance that is not split.
    """

    tensor: int = 1
    pipeline: int = 1

    def __str__(self) -> str:
        return f"TP{self.tensor} PP{self.pipeline}"

    @property
    def ranks(self) -> int:
        return self.tensor * self.pipeline

    def stage_of(self, rank: int) -> int:
        return rank // self.tensor

    def layers(self, rank: int, num_layers: int) -> range:
        """The layers of its stage: neighbours, as many as any other stage's or one more where they do not divide."""
        stage = self.stage_of(rank)
        return range(-(-stage * num_layers // self.pipeline), -(-(stage + 1) * num_layers // self.pipeline))

    def heads(self, rank: int, num_heads: int) -> range:
        """The heads that it holds of a layer that has `num_heads`, which the shards divide evenly."""
        shard, each = rank % self.tensor, num_heads // self.tensor
        return range(shard * each, (shard + 1) * each)


UNSPLIT = Split()


def check_split(split: Split, kv_heads: Sequence[int], heads: int, model: str) -> None:
    """Raise ConfigurationError where a model cannot be divided like this.

    `kv_heads` are the key-value heads of each layer, `heads` the query heads of any. Key-value heads are not
    copied to several ranks, so that each byte of KV has one place in an instance.
    """
    if split.pipeline > len(kv_heads):
        raise ConfigurationError(
            f"{model} has {len(kv_heads)} layers, too few for the {split.pipeline} pipeline stages of {split}"
        )
    for count, kind in ((heads, "heads"), *((each, "key-value heads") for each in kv_heads)):
        if count % split.tensor:
            raise ConfigurationError(
                f"{model} has {count} {kind}, which {split.tensor} tensor ranks ({split}) cannot share evenly"
            )
