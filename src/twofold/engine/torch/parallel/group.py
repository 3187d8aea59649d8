"""The ranks of a split worker as a process group: gloo between CPUs, NCCL between GPUs."""

import os

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from twofold.kvcache.split import Split


class RankGroup:
    """This process among the ranks of its worker; all of them make theirs at the same time, on `device`.

    They meet at a file, `store`, that only their user can reach and that is another for each life of the worker, and
    talk over the loopback interface or between GPUs: a worker has all its ranks on one host.
    """

    def __init__(self, split: Split, rank: int, store: str, device: str) -> None:
        self.split, self.rank = split, rank
        place = torch.device(device)
        if place.type == "cuda":
            torch.cuda.set_device(place)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group(
            "nccl" if place.type == "cuda" else "gloo",
            store=dist.FileStore(store, split.ranks),  # type: ignore[attr-defined]
            rank=rank,
            world_size=split.ranks,
            device_id=place if place.type == "cuda" else None,
        )
        names = ("pipeline", "tensor")
        self.shards: DeviceMesh = init_device_mesh(
            place.type, (split.pipeline, split.tensor), mesh_dim_names=names
        )["tensor"]

    def send_on(self, hidden: torch.Tensor) -> None:
        """Give hidden states to the same shard of the next stage."""
        dist.send(hidden.contiguous(), self.rank + self.split.tensor)

    def receive(self, like: torch.Tensor) -> torch.Tensor:
        """Hidden states of this shape and dtype, from the same shard of the stage before."""
        hidden = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        dist.recv(hidden, self.rank - self.split.tensor)
        return hidden
