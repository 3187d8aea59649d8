"""vLLM's engine core in the worker's process, and the prompt blocks that it caches."""

import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm.config import KVEventsConfig, KVTransferConfig, VllmConfig
from vllm.distributed.kv_events import BlockRemoved, BlockStored, EventBatch, EventPublisher, KVEventBatch
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams as VllmSampling
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor import Executor

from twofold.engine.vllm.bridge import BRIDGES, ConnectorBridge, VllmBlockCounts
from twofold.engine.vllm.connector import BRIDGE
from twofold.engine.vllm.sampling import sample_drafts_by_key
from twofold.errors import require
from twofold.kvcache.cache import CacheObserver, RemovalReason
from twofold.request import BlockKey

ExternalHash = int | bytes


class CachedPromptBlocks(EventPublisher):
    """Collector of the prompt blocks that vLLM caches and evicts, identified by Twofold's block keys."""

    def __init__(self) -> None:
        super().__init__()
        self._expected: dict[str, list[ExternalHash]] = {}
        self._names: dict[ExternalHash, BlockKey] = {}  # service's keys of blocks that are cached or may be later
        self._wanted: Counter[ExternalHash] = Counter()  # number of requests and cached blocks with this hash
        self._cached: Counter[ExternalHash] = Counter()
        self._changes: list[tuple[BlockKey, bool]] = []

    def expect(self, request_id: str, hashes: Sequence[BlockHash], keys: Sequence[BlockKey]) -> None:
        """Record the block keys of a prompt, and vLLM's hashes of the same blocks."""
        named = [maybe_convert_block_hash(each) for each in hashes[: len(keys)]]
        self._expected[request_id] = named
        self._names.update(zip(named, keys, strict=False))
        self._wanted.update(named)

    def forget(self, request_id: str) -> None:
        """Remove a finished request."""
        # The keys of its cached blocks are kept until vLLM evicts the blocks.
        for each in self._expected.pop(request_id, ()):
            self._release(each)

    def publish(self, events: EventBatch) -> None:
        for event in events.events if isinstance(events, KVEventBatch) else ():
            if isinstance(event, BlockStored):
                for each in event.block_hashes:
                    self._stored(each)
            elif isinstance(event, BlockRemoved):
                for each in event.block_hashes:
                    self._removed(each)

    def shutdown(self) -> None:
        """Do nothing, because there is nothing to close."""

    def report(self, watcher: CacheObserver) -> None:
        """Report to `watcher` the blocks that vLLM has cached and evicted since the previous report."""
        changes, self._changes = self._changes, []
        for key, there in changes:
            if there:
                watcher.stored(key)
            else:
                watcher.removed(key, RemovalReason.CAPACITY)

    def _stored(self, each: ExternalHash) -> None:
        if each in self._names:  # else a block of an output, or of a prompt whose KV a peer computes
            if not self._cached[each]:
                self._changes.append((self._names[each], True))
            self._cached[each] += 1
            self._wanted[each] += 1

    def _removed(self, each: ExternalHash) -> None:
        if self._cached.get(each):
            self._cached[each] -= 1
            if not self._cached[each]:
                del self._cached[each]
                self._changes.append((self._names[each], False))
            self._release(each)

    def _release(self, each: ExternalHash) -> None:
        self._wanted[each] -= 1
        if not self._wanted[each]:
            del self._wanted[each], self._names[each]


def engine_config(name: str, *, prefix_caching: bool, **options: Any) -> VllmConfig:  # noqa: ANN401  (vLLM checks them)
    """Return the configuration of an engine with the bridge `name` for its KV connectors."""
    # The last logits processor selects the token. vLLM refuses any with drafts; `sample_drafts_by_key` adds one later.
    keyed = [] if options.get("speculative_config") else ["twofold.engine.vllm.sampling:KeyedSampling"]
    fixed: dict[str, Any] = {
        "kv_transfer_config": KVTransferConfig(
            kv_connector="TwofoldConnector",
            kv_connector_module_path="twofold.engine.vllm.connector",
            kv_role="kv_both",
            kv_connector_extra_config={BRIDGE: name},
        ),
        "kv_events_config": KVEventsConfig(enable_kv_cache_events=prefix_caching, publisher="null"),
        "logits_processors": [*options.get("logits_processors", ()), *keyed] or None,
        "skip_tokenizer_init": True,
        "enable_prefix_caching": prefix_caching,
    }
    usual = {"use_tqdm_on_load": False, "async_scheduling": False}
    return EngineArgs(**{**usual, **options, **fixed}).create_engine_config()


class VllmCore:
    """Runs vLLM one iteration at a time."""

    def __init__(
        self,
        name: str,
        bridge: ConnectorBridge,
        *,
        prefix_caching: bool,
        executor: Callable[[VllmConfig], Executor],
        **options: Any,  # noqa: ANN401  (vLLM checks them)
    ) -> None:
        """Start vLLM with the engine arguments `options`."""
        BRIDGES[name] = bridge  # for vLLM's KV connectors
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        self.config = engine_config(name, prefix_caching=prefix_caching, **options)
        self.load_s = 0.0  # for loading the weights, and setting up the executor
        self._core = EngineCore(self.config, self._timed(executor), log_stats=False)
        if self.config.speculative_config is not None:
            self._core.collective_rpc(sample_drafts_by_key)
        self._scheduler: Any = self._core.scheduler  # typed as Any: its interface has neither queues nor blocks
        # With asynchronous scheduling, an iteration starts before the outputs of the previous one are processed.
        self.concurrent_batches: int = self._core.batch_queue_size if self._core.async_scheduling else 1
        self._step = self._core.step if self.concurrent_batches == 1 else self._core.step_with_batch_queue
        self._block_size = options["block_size"]  # of `keys`
        self.prompt_blocks = CachedPromptBlocks()
        if prefix_caching:
            self._scheduler.kv_event_publisher = self.prompt_blocks

    def _timed(self, executor: Callable[[VllmConfig], Executor]) -> Callable[[VllmConfig], Executor]:
        def make(config: VllmConfig) -> Executor:
            began_s = time.monotonic()
            made = executor(config)
            self.load_s = time.monotonic() - began_s
            return made

        return make

    def add(
        self,
        request_id: str,
        token_ids: Sequence[int],
        sampling: VllmSampling,
        cache_salt: str | None,  # requests share cached blocks only if they have the same salt
        keys: Sequence[BlockKey] = (),
        adapter: str = "",
    ) -> None:
        """Queue a request, whose prompt has the block keys `keys`, for the LoRA adapter with the name `adapter`."""
        request = EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=list(token_ids),
            mm_features=None,
            sampling_params=sampling,
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=self._adapters[adapter] if adapter else None,
            cache_salt=cache_salt or None,
            data_parallel_rank=None,
        )
        prepared, wave = self._core.preprocess_add_request(request)
        if keys and self._scheduler.hash_block_size == self._block_size:  # vLLM enlarges blocks of models with states
            self.prompt_blocks.expect(request_id, prepared.block_hashes, keys)
        self._core.add_request(prepared, wave)

    def load(self, adapters: Mapping[str, str]) -> None:
        """Load LoRA adapters from their directories, which are given by name. Raises ConfigurationError."""
        lora, on_cpu = self.config.lora_config, self.config.device_config.device_type == "cpu"
        few = on_cpu and lora is not None and lora.max_loras <= len(adapters)  # its last slot is for other requests
        require(not few, f"vLLM's option max_loras must be more than the {len(adapters)} LoRA adapters on a CPU")
        self._adapters = {name: LoRARequest(name, id_, path) for id_, (name, path) in enumerate(adapters.items(), 1)}
        for adapter in self._adapters.values():
            self._core.add_lora(adapter)

    def append_first_token(self, request_id: str, token_id: int) -> bool:
        """Append the first token, of a prefill worker, to a waiting request. Return False if the request is unknown."""
        request = self._scheduler.requests.get(request_id)
        if request is None or request.is_finished():
            return False
        # Only in the scheduler, because the model runner has not seen the request.
        request.prompt_token_ids.append(token_id)
        request._all_token_ids.append(token_id)  # noqa: SLF001  (vLLM has no public way to extend a prompt)
        request.num_prompt_tokens += 1
        request.update_block_hashes()
        return True

    def abort(self, request_id: str) -> None:
        """Abort a request; do nothing for unknown requests."""
        self._core.abort_requests([request_id])
        self.prompt_blocks.forget(request_id)

    def step(self) -> tuple[list[EngineCoreOutput], bool]:
        """Run one iteration. Return its outputs, and whether the iteration computed anything.

        With asynchronous scheduling, the outputs are those of the previous iteration.
        """
        outputs, ran = self._step()
        self._core.post_step(ran)
        made = [output for engine in (outputs or {}).values() for output in engine.outputs]
        for output in made:
            if output.finish_reason is not None:
                self.prompt_blocks.forget(output.request_id)
        return made, ran

    def drafts(self) -> Mapping[str, list[int]]:
        """Return the draft tokens that the last iteration has added to the output of each request."""
        if self.config.speculative_config is None:
            return {}
        made = self._core.model_executor.take_draft_token_ids()
        return {} if made is None else dict(zip(made.req_ids, made.draft_token_ids, strict=True))

    @property
    def busy(self) -> bool:
        """Whether vLLM has unfinished requests, finished requests that are not cleaned up, or unprocessed outputs."""
        return bool(self._scheduler.has_requests() or self._core.batch_queue)

    @property  # the only member that other threads may use
    def blocks(self) -> VllmBlockCounts:
        pool = self._scheduler.kv_cache_manager.block_pool
        return VllmBlockCounts(pool.num_gpu_blocks - 1, pool.get_num_free_blocks())  # vLLM never allocates block 0
