"""`twofold join`: workers on this host for a service on another."""

from pathlib import Path
from typing import Annotated

import typer

from twofold.cli.sizes import parse_size

_CONTROLLER = "Where the service takes workers: its --listen-workers."
_MODEL = "Model directory, or hub id: the same model as the service's."
_ADDRESS = "Address of this host that the others reach (the one that its packets to the service come from)."


def join(
    controller: Annotated[str, typer.Argument(metavar="tcp://ADDRESS:PORT", help=_CONTROLLER)],
    cluster_key: Annotated[Path, typer.Option(help="File of the cluster key (see `twofold keygen`).")],
    model: Annotated[str, typer.Option(help=_MODEL)],
    prefill: Annotated[int, typer.Option(min=0, help="Prefill workers.")] = 0,
    decode: Annotated[int, typer.Option(min=0, help="Decode workers.")] = 0,
    mixed: Annotated[int, typer.Option(min=0, help="Workers that do both phases.")] = 0,
    name: Annotated[
        str | None, typer.Option(help="Name of this host, another for each (the host's).")
    ] = None,
    address: Annotated[str | None, typer.Option(help=_ADDRESS)] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:0 … (the service's).")] = None,
    kv_cache_memory_bytes: Annotated[
        str | None, typer.Option(help="KV cache of each worker, as in 500M (the service's).")
    ] = None,
    kv_store_dram: Annotated[
        str | None, typer.Option(help="Memory that keeps KV of prompts for all workers, as in 4GiB.")
    ] = None,
    kv_store_disk: Annotated[
        str | None,
        typer.Option(help="A directory below that, and how much of its disk, as in /var/kv:100GiB."),
    ] = None,
    kv_eviction: Annotated[
        str | None, typer.Option(help="Which KV goes first: lru, lfu or length-aware (the service's).")
    ] = None,
    pin_cores: Annotated[bool, typer.Option(help="Give each worker cores of its own.")] = True,
    log_format: Annotated[str, typer.Option(help="text, or json.")] = "text",
) -> None:
    """Run workers on this host for a service on another.

    All that they need to know but the model's files comes from the service. They are started again when they end,
    and end when the service does; when the service is lost, this waits for it or its next.
    """
    from twofold.cli import join_run  # noqa: PLC0415  (what it needs is too heavy for the start of every command)
    from twofold.cli.store_flags import store_config  # noqa: PLC0415

    flags = join_run.JoinFlags(
        controller=controller,
        cluster_key=cluster_key,
        model=model,
        prefill=prefill,
        decode=decode,
        mixed=mixed,
        name=name,
        address=address,
        device=device,
        kv_cache_bytes=None if kv_cache_memory_bytes is None else parse_size(kv_cache_memory_bytes),
        store=store_config(kv_store_dram, kv_store_disk),
        kv_eviction=kv_eviction,
        pin_cores=pin_cores,
        log_format=log_format,
    )
    join_run.run(flags)
