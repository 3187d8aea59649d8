"""What the processes of the Ray launcher are told when they start."""

import msgspec

from twofold.instance import Role
from twofold.serving.config import EngineConfig


class HostJob(msgspec.Struct, frozen=True, kw_only=True):
    """The host of one worker: where the service takes it, and what it brings.

    `key` is the text of the file with the cluster key, `model` a directory or a hub id as the operator wrote it, and
    `threads` how many it computes on.
    """

    controller: str
    key: str
    model: str
    worker: str
    role: Role
    threads: int
    log_format: str


class RayJob(msgspec.Struct, frozen=True, kw_only=True):
    """All workers of a service on the Ray cluster at `address`.

    Each takes a `bundle` of resources. Nodes with the same value of the label `link_label` are near each other.
    """

    address: str
    bundle: dict[str, float]
    link_label: str
    engine: EngineConfig
    hosts: tuple[HostJob, ...]
