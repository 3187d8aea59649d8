"""The memory of its host that an instance swaps decodes out to, as a cluster's description gives it."""

from dataclasses import dataclass

from twofold.cluster.spec import ClusterSpec
from twofold.errors import ConfigurationError
from twofold.hardware.catalog import Catalog
from twofold.hardware.specs import Model
from twofold.performance.instance import resident_kv_bytes_per_token
from twofold.scheduling.batchers import GROWING
from twofold.scheduling.routers import FIXED_ROLE_ROUTERS

_LINK = "pcie4"


@dataclass(frozen=True, slots=True)
class SwapCapacity:
    """`blocks` blocks, of `block_bytes` each, which take `copy_s` seconds each to get there, or back."""

    blocks: int
    block_bytes: int
    copy_s: float


NONE = SwapCapacity(0, 0, 0.0)


def swap_space(spec: ClusterSpec, model: Model, tensor_parallel: int, catalog: Catalog) -> SwapCapacity:
    """That of an instance; raises ConfigurationError where the cluster cannot have any."""
    space = spec.swap_space_bytes
    if space is None:
        return NONE
    if spec.router not in FIXED_ROLE_ROUTERS or spec.rules != "twofold":
        raise ConfigurationError(
            "swap_space_bytes is for instances that keep their roles, under the rules twofold: give one of the "
            f"routers {', '.join(FIXED_ROLE_ROUTERS)}"
        )
    block_bytes = spec.block_size * (
        spec.kv_bytes_per_token or resident_kv_bytes_per_token(model, tensor_parallel)
    )
    if space < block_bytes:
        raise ConfigurationError(
            f"swap_space_bytes {space:,} has no room for a KV block of {block_bytes:,} bytes"
        )
    speed = spec.swap_bytes_per_s or catalog.link(_LINK).bytes_per_s * tensor_parallel
    return SwapCapacity(space // block_bytes, block_bytes, block_bytes / speed)


def swap_space_with(batcher: str, space: SwapCapacity) -> SwapCapacity:
    """What an instance with this batcher has use for; raises ConfigurationError for one that cannot swap."""
    if space.blocks and batcher not in (*GROWING, "prefill"):
        raise ConfigurationError(
            f"the batcher {batcher} pauses decodes as it likes: with swap_space_bytes give one of {', '.join(GROWING)}"
        )
    return space if batcher in GROWING else NONE
