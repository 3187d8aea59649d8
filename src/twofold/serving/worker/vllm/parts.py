"""vLLM as far as a worker measures it before it is part of the service.

The parts of workers that run vLLM.
"""

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from pydantic import ValidationError
from vllm.engine.arg_utils import EngineArgs

from twofold.engine.base import KvLayout, OnLayer, Sampled, SequenceStep
from twofold.engine.model_config import eos_token_ids
from twofold.engine.vllm.core import CoreOptions, VllmCore
from twofold.engine.vllm.sampling import vllm_sampling
from twofold.errors import ModelError
from twofold.handoff import LeaseWatcher
from twofold.request import SamplingParams
from twofold.scheduling.batchers import BATCHERS
from twofold.serving.config import EngineConfig, ServiceConfig, WorkerConfig
from twofold.serving.launch.memory_plan import DEFAULT_KV_CACHE_BYTES
from twofold.serving.launch.model_source import model_fingerprint
from twofold.serving.worker.engines import RankPipes, ReportStage, WorkerParts
from twofold.serving.worker.state import CacheChanges, WorkerState
from twofold.serving.worker.vllm.loop import VllmLoop, WorkerBridge
from twofold.serving.worker.vllm.scheduler import VllmScheduler
from twofold.transport.pooled import load_transport


class VllmEngine:
    """An `Engine` that computes prompts which nobody asked for; requests go to vLLM's own scheduler."""

    def __init__(self, core: VllmCore, layout: KvLayout, num_blocks: int) -> None:
        self._core = core
        self.layout, self.num_blocks = layout, num_blocks
        self._runs = 0

    def run(
        self,
        steps: Sequence[SequenceStep],
        on_layer: OnLayer | None = None,  # noqa: ARG002  (nobody asks to be told)
        wait_for: OnLayer | None = None,  # noqa: ARG002  (the same)
    ) -> list[Sampled | None]:
        """Compute whole prompts (`start` is 0); where and in how many iterations is vLLM's business."""
        for step in steps:
            self._runs += 1
            sampling = vllm_sampling(SamplingParams(max_tokens=1, temperature=0.0), 0, 1, frozenset())
            name = f"measured {self._runs}"
            self._core.add(name, step.token_ids, sampling, name)
        while self._core.busy:
            self._core.step()
        return [None] * len(steps)


class VllmFactory:
    """A model that each worker loads for itself. What all know of it is read once, without its weights."""

    kv_layout = None  # of no use to a store: what is in a block is vLLM's own business

    def __init__(self, service: ServiceConfig) -> None:
        config = service.engine
        self._service, self._config = service, config
        with _told(config.model):
            model = EngineArgs(**_options(config), skip_tokenizer_init=True).create_model_config()
        self.model = model_fingerprint(Path(config.model))
        self.max_model_len = int(model.max_model_len)
        self.vocab_size = int(model.get_vocab_size())
        generation, text = model.try_get_generation_config(), model.hf_text_config
        self._eos = frozenset(
            eos_token_ids(generation.get("eos_token_id"), getattr(text, "eos_token_id", None))
        )

    def parts(self, spec: WorkerConfig, epoch: int, wires: RankPipes | None = None) -> WorkerParts:  # noqa: ARG002
        config, service = self._config, self._service
        torch.set_num_threads(spec.threads)
        make, device = load_transport(service.transport), config.device
        ties = WorkerBridge(
            lambda layout, num_blocks: make(spec.instance, epoch, layout, num_blocks, device, service.network)
        )
        with _told(config.model):
            core = VllmCore(
                f"{spec.instance}@{epoch}",
                ties,
                _knobs(config, spec, self.max_model_len),
                kv_cache_memory_bytes=config.kv_cache_bytes or DEFAULT_KV_CACHE_BYTES,
                enforce_eager=torch.device(device).type == "cpu",
                **_options(config),
            )
        transport = ties.transport
        layout, num_blocks = transport.descriptor.layout, transport.descriptor.num_blocks
        return WorkerParts(
            engine=VllmEngine(core, layout, num_blocks),
            transport=transport,
            eos_token_ids=self._eos,
            scheduling=VllmScheduling(core, ties, layout, self._eos, spec.instance),
        )

    def run_rank(self, spec: WorkerConfig, rank: int, wires: RankPipes) -> None:
        """There are none: what vLLM divides, it divides itself."""


class VllmScheduling:
    """vLLM's scheduler, and the loop that runs it, for one worker."""

    def __init__(
        self, core: VllmCore, ties: WorkerBridge, layout: KvLayout, eos: frozenset[int], instance: str
    ) -> None:
        self._core, self._ties, self._layout, self._eos, self._name = core, ties, layout, eos, instance

    def scheduler(
        self,
        epoch: int,
        lease_s: float,
        watcher: LeaseWatcher,
        changes: CacheChanges,  # noqa: ARG002  (the state has them too)
    ) -> VllmScheduler:
        self._instance = VllmScheduler(
            lambda: self._core.blocks,
            self._layout.block_size,
            instance=self._name,
            epoch=epoch,
            lease_s=lease_s,
            watcher=watcher,
        )
        return self._instance

    def bind(self, state: WorkerState) -> None:
        self._iterations = VllmLoop(state, self._instance, self._core, self._ties, self._eos)

    def run(self) -> None:
        self._iterations.run()


def prepare(service: ServiceConfig, stage: ReportStage) -> VllmFactory:
    """Read what there is to know of the model. Raises ConfigurationError where vLLM would not serve it."""
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])
    stage("reading the model's configuration")
    return VllmFactory(service)


def _options(config: EngineConfig) -> dict[str, object]:
    """Those of vLLM's engine arguments that our own flags say."""
    options: dict[str, object] = {
        "model": config.model,
        "dtype": config.dtype,
        "block_size": config.block_size,
    }
    if config.max_model_len is not None:
        options["max_model_len"] = config.max_model_len
    return options


def _knobs(config: EngineConfig, spec: WorkerConfig, max_model_len: int) -> CoreOptions:
    batcher = BATCHERS[spec.batcher]
    # A decode worker computes prompts only after a preemption. Others take them whole, unless their batcher cuts
    # them, so that their layers are complete, and sent, as early as possible.
    cuts = batcher.cuts_prompts or not batcher.prefills
    budget = spec.max_num_batched_tokens if cuts else max(spec.max_num_batched_tokens, max_model_len)
    return CoreOptions(
        max_num_batched_tokens=max(budget, config.max_num_seqs),
        max_num_seqs=config.max_num_seqs,
        prefix_caching=config.prefix_caching,
    )


@contextmanager
def _told(model: str) -> Iterator[None]:
    """Turn what vLLM raises about a model, or about what it is asked for, into one sentence."""
    try:
        yield
    except ValueError as error:
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        reason = reason.strip().removeprefix("Value error, ").splitlines()[0].split(". ")[0]
        raise ModelError(f"{model}: vLLM cannot serve it: {reason}") from error
