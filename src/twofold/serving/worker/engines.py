"""Engines by name: one file and one line each. What an engine needs is imported when it is prepared."""

import os
from collections.abc import Callable

from twofold.serving.config import ServiceConfig
from twofold.serving.worker.parts import Prepared

Stage = Callable[[str], None]  # told what is being done


def _torch(config: ServiceConfig, stage: Stage) -> Prepared:
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # our own stages say what happens
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # no OpenMP pool may exist when workers are forked
    stage("importing torch")
    from twofold.serving.worker.torch_parts import prepare  # noqa: PLC0415  (slow, hence a stage of its own)

    return prepare(config, stage)


def _emulated(config: ServiceConfig, stage: Stage) -> Prepared:
    from twofold.serving.worker.emulated_parts import prepare  # noqa: PLC0415  (others do without)

    stage("reading the catalog")
    return prepare(config)


ENGINES: dict[str, Callable[[ServiceConfig, Stage], Prepared]] = {"torch": _torch, "emulated": _emulated}
