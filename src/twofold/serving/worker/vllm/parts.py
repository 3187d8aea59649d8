"""Workers that run vLLM: their engine, transport and scheduler."""

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.executor import Executor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from twofold.engine.base import KvLayout, OnLayer, Sampled, SequenceStep
from twofold.engine.devices import DEFAULT_UTILIZATION, choose_device
from twofold.engine.grammar import GrammarMatchers
from twofold.engine.model_config import eos_token_ids
from twofold.engine.rank_link import FirstRankLink
from twofold.engine.tokenizer import tokenizer_json
from twofold.engine.vllm.core import VllmCore, engine_config
from twofold.engine.vllm.options import check_phases, model_errors, parse_options
from twofold.engine.vllm.ranks import OtherVllmRanks, SplitExecutor, run_rank
from twofold.engine.vllm.sampling import ConstrainedOutput, vllm_sampling
from twofold.errors import require
from twofold.instance import Role
from twofold.kvcache.sharding import check_sharding
from twofold.request import SamplingParams
from twofold.serving.config import ServiceConfig, WorkerConfig
from twofold.serving.launch.memory_plan import DEFAULT_KV_CACHE_BYTES
from twofold.serving.launch.model_source import loaded_line, model_fingerprint
from twofold.serving.worker.engines import EngineFactory, RankPipes, ReportStage, WorkerDriver, WorkerParts
from twofold.serving.worker.vllm.loop import VllmLoop, WorkerBridge
from twofold.serving.worker.vllm.scheduler import VllmScheduler
from twofold.serving.worker.vllm.split import RankBridge, SplitBridge, rank_cache
from twofold.transport.base import KvCacheSpec
from twofold.transport.pooled import load_transport
from twofold.transport.sharded import OtherRanks, ShardedTransport


class VllmEngine:
    """vLLM as an `Engine`, used only to measure prefill speed at start-up."""

    def __init__(self, core: VllmCore, layout: KvLayout, num_blocks: int) -> None:
        self._core = core
        self.layout, self.num_blocks = layout, num_blocks
        self._runs = 0

    def run(
        self, steps: Sequence[SequenceStep], on_layer: OnLayer | None = None, wait_for: OnLayer | None = None
    ) -> list[Sampled | None]:
        """Prefill whole prompts with vLLM, and return a list with one None per prompt in place of sampled tokens."""
        for step in steps:
            self._runs += 1
            sampling = vllm_sampling(SamplingParams(max_tokens=1, temperature=0.0), 0, 1, frozenset())
            name = f"measured {self._runs}"
            self._core.add(name, step.token_ids, sampling, name)
        while self._core.busy:
            self._core.step()
        return [None] * len(steps)


class VllmFactory(EngineFactory):
    """Factory of vLLM workers. Every worker loads a separate copy of the model."""

    def __init__(self, service: ServiceConfig, report: ReportStage) -> None:
        config = service.engine
        self._service, self._config, self.device = service, config, choose_device(config.device)
        self._report = report
        self._given = {role: parse_options(flags) for role, flags in config.engine_args.items()}
        check_phases(self._options(Role.PREFILL), self._options(Role.DECODE))
        with model_errors(config.model):
            model = EngineArgs(**self._options(Role.DECODE) | {"skip_tokenizer_init": True}).create_model_config()
        self.model = model_fingerprint(Path(config.model))
        self.max_model_len = int(model.max_model_len)
        self.vocab_size = int(model.get_vocab_size())
        self._num_layers = int(model.get_total_num_hidden_layers())
        self._latent = bool(model.use_mla)
        kv_heads = [1 if self._latent else model.get_total_num_kv_heads()] * self._num_layers
        for worker in service.workers:
            unsharded = worker.split.ranks == 1
            require(self.device == "cpu" or unsharded, "--tp and --pp of --engine vllm need --device cpu")
            check_sharding(worker.split, kv_heads, model.hf_text_config.num_attention_heads, config.model)
            for name in ("speculative_config", "async_scheduling"):
                given = self._options(worker.role).get(name)
                require(not given or unsharded, f"{name} is not tested with --tp or --pp")
        generation, text = model.try_get_generation_config(), model.hf_text_config
        self._eos = frozenset(eos_token_ids(generation.get("eos_token_id"), getattr(text, "eos_token_id", None)))
        for spec in service.workers if any(self._given.values()) else ():  # before a worker starts
            with model_errors(config.model):
                engine_config("checked", **self._arguments(spec))

    def parts(self, spec: WorkerConfig, epoch: int, pipes: RankPipes | None = None) -> WorkerParts:
        make, device, network = load_transport(self._service.transport), self.device, self._service.network
        if pipes is None:
            bridge = WorkerBridge(
                lambda layout, num_blocks: make(KvCacheSpec(spec.instance, epoch, layout, num_blocks, device, network))
            )
            return self._parts(spec, epoch, bridge, UniProcExecutor)
        steps, memory = zip(*pipes.of_first(), strict=True)
        first = SplitBridge(rank_cache(spec, 0, epoch, self._num_layers), spec.split, self._num_layers)
        others = OtherVllmRanks(steps, first.report_layer)
        executor = partial(SplitExecutor, split=spec.split, others=others, store=pipes.store)
        parts = self._parts(spec, epoch, first, executor)
        transport = ShardedTransport(first.transport, OtherRanks(memory))
        return replace(parts, transport=transport, ranks_alive=others.alive)

    def run_rank(self, spec: WorkerConfig, rank: int, pipes: RankPipes) -> None:
        torch.set_num_threads(max(1, spec.threads // spec.split.ranks))
        self._load_grammars()
        pipe = pipes.of(rank)
        link = FirstRankLink[bytes](pipe.steps, bytes)
        cache = rank_cache(spec, rank, 0, self._num_layers)  # peers check only the epoch of rank 0
        bridge = RankBridge(cache, spec.split.layers(rank, self._num_layers).start, link, pipe.memory)
        with model_errors(self._config.model):
            run_rank(link, bridge, spec.split, rank, pipes.store)

    def _parts(
        self, spec: WorkerConfig, epoch: int, bridge: WorkerBridge, executor: Callable[[VllmConfig], Executor]
    ) -> WorkerParts:
        config = self._config
        torch.set_num_threads(max(1, spec.threads // spec.split.ranks))
        with model_errors(config.model):
            core = VllmCore(f"{spec.instance}@{epoch}", bridge, executor=executor, **self._arguments(spec))
            core.load(config.adapters)
        self._report(f"{spec.instance} {loaded_line(Path(config.model), core.load_s)}")
        transport = bridge.transport
        layout, num_blocks = transport.descriptor.layout, transport.descriptor.num_blocks
        scheduler = VllmScheduler(
            lambda: core.blocks,
            layout.block_size,
            instance=spec.instance,
            epoch=epoch,
            lease_s=self._service.lease_s,
            watcher=transport,
        )
        return WorkerParts(
            engine=VllmEngine(core, layout, num_blocks),
            grammars=self._load_grammars(),
            transport=transport,
            eos_token_ids=self._eos,
            driver=WorkerDriver(scheduler, lambda state: VllmLoop(state, scheduler, core, bridge, self._eos).run),
        )

    def _options(self, role: Role) -> dict[str, Any]:
        common = {name: getattr(self._config, name) for name in ("model", "dtype", "block_size", "max_model_len")}
        return common | self._given.get(role, {})

    def _arguments(self, spec: WorkerConfig) -> dict[str, Any]:
        config, options = self._config, self._options(spec.role)
        most = options.get("max_num_seqs", config.max_num_seqs)
        usual: dict[str, Any] = {
            "max_num_batched_tokens": max(spec.largest_batch(self.max_model_len), most),
            "max_num_seqs": most,
            "enforce_eager": self.device == "cpu",
            "tensor_parallel_size": spec.split.tensor,
            "pipeline_parallel_size": spec.split.pipeline,
        }
        if self.device == "cpu" and self._latent:  # its kernel rotates heads of these queries as if they were tokens
            usual["compilation_config"] = {"custom_ops": ["-rotary_embedding"]}
        if self.device != "cpu" and config.kv_cache_bytes is None:  # vLLM measures what the weights leave
            share = (config.gpu_memory_utilization or DEFAULT_UTILIZATION) / len(self._service.workers)
            usual["gpu_memory_utilization"] = share
        elif config.kv_cache_bytes is not None or "gpu_memory_utilization" not in options:
            usual["kv_cache_memory_bytes"] = (config.kv_cache_bytes or DEFAULT_KV_CACHE_BYTES) // spec.split.ranks
        return {"prefix_caching": config.prefix_caching, **usual, **options}

    def _load_grammars(self) -> GrammarMatchers:
        tokenizer = Path(self._config.tokenizer or self._config.model)
        found = GrammarMatchers(partial(tokenizer_json, tokenizer), self.vocab_size, sorted(self._eos))
        ConstrainedOutput.grammars = found
        return found


def prepare(service: ServiceConfig, report: ReportStage) -> VllmFactory:
    """Return a factory of vLLM workers. Raises ModelError if vLLM cannot serve the model."""
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])
    report("reading the model's configuration")
    return VllmFactory(service, report)
