"""What vLLM's connector asks of the worker and tells it, on the thread that runs vLLM."""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from twofold.engine.base import KvLayout
from twofold.engine.torch.streams import Announcer
from twofold.engine.vllm.ties import Settled
from twofold.serving.messages import PrefillStarted
from twofold.serving.worker.state import WorkerState
from twofold.serving.worker.vllm.instance import Stage, VllmInstance
from twofold.transport.pooled import PooledTransport

MakePool = Callable[[KvLayout, int], PooledTransport]
NOTHING = Settled(set(), set())


class WorkerTies:
    """First the memory of the engine is placed; the worker is there, and `bind` called, when the engine is."""

    def __init__(self, make: MakePool) -> None:
        self._make = make
        self._transport: PooledTransport | None = None
        self._bound: tuple[WorkerState, VllmInstance] | None = None
        self.started: list[str] = []  # prompts that started with the last iteration
        self.settled = False  # whether the last iteration has told vLLM something

    @property
    def transport(self) -> PooledTransport:
        assert self._transport is not None  # noqa: S101  (every engine places its cache when it is made)
        return self._transport

    def bind(self, state: WorkerState, instance: VllmInstance) -> None:
        self._bound = (state, instance)

    # -- as `Ties` --------------------------------------------------------------------------------------------------

    def place(self, layout: KvLayout, num_blocks: int) -> torch.Tensor:
        self._transport = self._make(layout, num_blocks)
        self._announcer = Announcer(self._transport.engine_pool.device)
        return self._transport.engine_pool.memory

    def comes(self, request_id: str) -> bool:
        if self._bound is None:
            return False
        state, instance = self._bound
        with state.changed:
            return instance.comes(request_id)

    def allocated(self, request_id: str, blocks: Sequence[int]) -> None:
        if self._bound is not None:
            state, instance = self._bound
            with state.changed:
                instance.allocated(request_id, blocks)
                state.grant()  # at once: the iteration that follows may be long

    def starting(self, request_ids: Sequence[str]) -> None:
        self.started = []
        if self._bound is None:
            return
        state, instance = self._bound
        with state.changed:
            for request_id in request_ids:
                held = instance.find(request_id)
                if held is None or held.stage is not Stage.WAITING:
                    continue
                instance.starts(held)
                self.started.append(request_id)
                if request_id in state.announced:
                    state.announced.remove(request_id)
                    state.tell(PrefillStarted(request_id=request_id))

    def completing(self, request_id: str, computed: int, blocks: Sequence[int]) -> bool:
        if self._bound is None:
            return False
        state, instance = self._bound
        with state.changed:
            held = instance.find(request_id)
            hands_off = held is not None and not held.decodes_here
            complete = held is not None and computed >= held.request.prompt_tokens
        return hands_off and complete and state.sender.begin(request_id, blocks)

    def computed(self, request_ids: Sequence[str], layer: int) -> None:
        if self._bound is not None:
            tell = partial(self._bound[0].sender.layer_computed, request_ids, layer)
            self._announcer.after(tell)

    def holds(self, request_id: str) -> bool:
        if self._bound is None:
            return False
        state, instance = self._bound
        with state.changed:
            return instance.holds(request_id)

    def sending(self) -> bool:
        return self._bound is not None and self._bound[1].sending

    def settle(self) -> Settled:
        if self._bound is None:
            return NOTHING
        state, instance = self._bound
        with state.changed:
            settled = instance.settle()
        self.settled = bool(settled.sent or settled.received)
        return settled
