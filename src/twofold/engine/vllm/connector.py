"""KV connector by which vLLM reports allocated blocks and computed layers to Twofold's worker."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

from twofold.engine.vllm.bridge import BRIDGES
from twofold.engine.vllm.cache import blocks_to_hand_off, cache_regions, move_caches, read_layout

BRIDGE = "twofold_bridge"  # key in kv_connector_extra_config for the bridge's name


class CompletingPrefills(KVConnectorMetadata):
    """Connector metadata: ids of requests whose prefill this iteration completes and whose KV is handed off."""

    def __init__(self, request_ids: Sequence[str]) -> None:
        self.request_ids = request_ids


# vLLM loads this class by its setting `kv_connector_module_path`. The worker's threads transfer the KV, so no forward
# pass waits. vLLM keeps the blocks of a request allocated until `get_finished` returns the request.
class TwofoldConnector(KVConnectorBase_V1, SupportsHMA):
    """KV connector of Twofold. vLLM creates one instance for its scheduler and one for its model runner."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._config = kv_cache_config
        speculation = vllm_config.speculative_config
        self._drafts = speculation is not None and (speculation.uses_draft_model() or speculation.use_eagle())
        self._bridge = BRIDGES[vllm_config.kv_transfer_config.kv_connector_extra_config[BRIDGE]]
        self._places: dict[str, int] = {}  # place of each layer in the order of computation
        self._last_places: list[int] = []  # for each region, the place at which it and all previous ones are computed
        self._reported = 0  # regions that were reported in this iteration

    # -- model runner -----------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Move vLLM's KV cache, which is still empty, into memory that peers can access."""
        context = self._vllm_config.compilation_config.static_forward_context
        self._places = {name: place for place, name in enumerate(context)}
        regions = cache_regions(self._config)
        self._last_places = list(accumulate((max(self._places[name] for name in each.layers) for each in regions), max))
        layout = read_layout(self._config, self._vllm_config.cache_config.cache_dtype)
        memory = self._bridge.place_cache(layout, self._config.num_blocks)
        move_caches(memory, [*kv_caches.values(), *(context[name].kv_cache for name in kv_caches)])

    def start_load_kv(self, forward_context: object, **kwargs: Any) -> None:
        """Do nothing: the worker's threads start transfers."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: vLLM runs a request only when all KV of the request has arrived."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: object, **kwargs: Any) -> None:
        # A drafter writes into the last block of the prompt once per draft, so its KV is complete only afterwards.
        if not self._drafts:
            self._computed(bisect_right(self._last_places, self._places[layer_name]))

    def wait_for_save(self) -> None:
        """Report the rest, because vLLM reports no layers with states. Transfers may continue after the iteration."""
        self._computed(len(self._last_places))
        self._reported = 0

    def _computed(self, regions: int) -> None:
        metadata = self._get_connector_metadata()
        if isinstance(metadata, CompletingPrefills) and metadata.request_ids:
            for region in range(self._reported, regions):
                self._bridge.layer_computed(metadata.request_ids, region)
        self._reported = max(self._reported, regions)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        settled = self._bridge.settle()
        return settled.sent or None, settled.received or None

    # -- scheduler --------------------------------------------------------------------------------------------------

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """Return the ids of all KV cache groups, because a KV transfer loads every group."""
        return tuple(range(len(self._config.kv_cache_groups)))  # vLLM would clear the blocks of other groups

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        if not self._bridge.is_remote(request.request_id):
            return 0, False
        return request.num_prompt_tokens - num_computed_tokens, True

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        if num_external_tokens:
            handed = self._to_hand_off(blocks.get_block_ids(), request.num_prompt_tokens)
            self._bridge.allocated(request.request_id, handed)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> CompletingPrefills:
        output, cached = scheduler_output, scheduler_output.scheduled_cached_reqs
        new = output.scheduled_new_reqs
        self._bridge.prefills_start([each.req_id for each in new])
        for each in new:
            self._replace_placeholders(output, each.req_id)
        before = {each.req_id: each.num_computed_tokens for each in new}
        before |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        scheduled = output.num_scheduled_tokens
        return CompletingPrefills([rid for rid, done in before.items() if self._follows(rid, done + scheduled[rid])])

    def _replace_placeholders(self, output: SchedulerOutput, request_id: str) -> None:
        # In the first iteration of a request that has only one token left to compute, vLLM verifies placeholders as
        # drafts, which are no valid tokens of the model.
        count = len(output.scheduled_spec_decode_tokens.get(request_id, ()))
        if count:
            drafts = self._bridge.drafts(request_id)[:count]
            missing = count - len(drafts)
            output.scheduled_spec_decode_tokens[request_id] = drafts + [0] * missing
            output.num_invalid_spec_tokens = (output.num_invalid_spec_tokens or {}) | {request_id: missing}

    def _follows(self, request_id: str, computed: int) -> bool:
        manager = self._kv_cache_manager
        assert manager is not None  # noqa: S101  (vLLM binds it before scheduling)
        blocks = self._to_hand_off(manager.get_block_ids(request_id), computed)
        return self._bridge.prompt_completes(request_id, computed, blocks)

    def _to_hand_off(self, block_ids: Sequence[Sequence[int]], computed: int) -> list[int]:
        assert self._kv_cache_manager is not None  # noqa: S101  (as above)
        return blocks_to_hand_off(self._kv_cache_manager.coordinator.single_type_managers, block_ids, computed)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._bridge.holds_blocks(request.request_id), None

    def has_pending_block_frees(self) -> bool:
        return self._bridge.is_sending()

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Return True, because a CUDA graph of the whole model would skip the connector's calls for each layer."""
        return True
