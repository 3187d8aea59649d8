"""Engines by name: one file and one line each. What an engine needs is imported when it is prepared."""

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from twofold.errors import ConfigurationError
from twofold.serving.config import ServiceConfig
from twofold.serving.worker.parts import Prepared

Stage = Callable[[str], None]  # told what is being done

# vLLM runs in the worker's own process, on the cores that the worker has, and says what goes wrong only.
VLLM_ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
}


@contextmanager
def _for_good() -> Iterator[None]:
    """What is imported stays, and there is much of it: nobody looks for garbage in it, meanwhile or later.

    That would take a quarter of the time, and what a worker looks at it no longer shares with those forked beside it.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _torch(config: ServiceConfig, stage: Stage) -> Prepared:
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # our own stages say what happens
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # no OpenMP pool may exist when workers are forked
    stage("importing torch")
    with _for_good():
        from twofold.serving.worker.torch_parts import prepare  # noqa: PLC0415  (slow, hence a stage of its own)

    return prepare(config, stage)


def _emulated(config: ServiceConfig, stage: Stage) -> Prepared:
    from twofold.serving.worker.emulated_parts import prepare  # noqa: PLC0415  (others do without)

    stage("reading the catalog")
    return prepare(config)


def check_vllm() -> None:
    """Raises ConfigurationError where vLLM is not installed, without importing it."""
    if find_spec("vllm") is None:
        raise ConfigurationError(
            "--engine vllm needs a package that is not installed: pip install 'twofold[vllm]'"
        )


def _vllm(config: ServiceConfig, stage: Stage) -> Prepared:
    check_vllm()
    for name, value in VLLM_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    stage("importing vllm")
    with _for_good():
        from twofold.serving.worker.vllm.parts import prepare  # noqa: PLC0415  (slow, hence a stage of its own)

    return prepare(config, stage)


ENGINES: dict[str, Callable[[ServiceConfig, Stage], Prepared]] = {
    "torch": _torch,
    "emulated": _emulated,
    "vllm": _vllm,
}
