"""Main loop of a vLLM worker: applies queued actions, runs iterations, and sends tokens to the controller."""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine import FinishReason as VllmReason
from vllm.v1.outputs import LogprobsTensors

from twofold.engine.base import KvLayout
from twofold.engine.torch.pool import LayerNotifier
from twofold.engine.vllm.bridge import SettledTransfers
from twofold.engine.vllm.core import VllmCore
from twofold.engine.vllm.sampling import ConstrainedOutput, vllm_sampling
from twofold.request import FinishReason, TokenOutput, TokenScore
from twofold.serving.worker.state import SharedWorkerState, TokenSequence
from twofold.serving.worker.vllm.scheduler import VllmOrder, VllmRequest, VllmRequestState, VllmScheduler
from twofold.transport.pooled import PooledTransport

MakePool = Callable[[KvLayout, int], PooledTransport]
NOTHING = SettledTransfers(set(), set())


class WorkerBridge:
    """Forwards the calls of vLLM's KV connector to the worker."""

    def __init__(self, make: MakePool) -> None:
        self._make = make
        self._transport: PooledTransport | None = None
        self._bound: tuple[SharedWorkerState, VllmScheduler] | None = None
        self.started: list[str] = []  # prompts started by the last iteration
        self.settled = False  # whether the last iteration reported ended transfers

    @property
    def transport(self) -> PooledTransport:
        assert self._transport is not None  # noqa: S101  (VllmCore places its cache when it is created)
        return self._transport

    def bind(self, state: SharedWorkerState, instance: VllmScheduler) -> None:
        self._bound = (state, instance)

    def place_cache(self, layout: KvLayout, num_blocks: int) -> torch.Tensor:
        self._transport = self._make(layout, num_blocks)
        self._notifier = LayerNotifier(self._transport.engine_pool.device)
        return self._transport.engine_pool.memory

    def is_remote(self, request_id: str) -> bool:
        if self._bound is None:
            return False
        state, instance = self._bound
        with state.changed:
            return instance.is_remote(request_id)

    def allocated(self, request_id: str, blocks: Sequence[int]) -> None:
        if self._bound is not None:
            state, instance = self._bound
            with state.changed:
                instance.allocated(request_id, blocks)
                state.grant()  # without waiting for the end of the next iteration

    def prefills_start(self, request_ids: Sequence[str]) -> None:
        if self._bound is None:
            return
        state, instance = self._bound
        with state.changed:
            for request_id in request_ids:
                held = instance.find(request_id)
                if held is None or held.stage is not VllmRequestState.WAITING:
                    continue
                instance.starts(held)
                self.started.append(request_id)
                state.prefill_starts(request_id)

    def prompt_completes(self, request_id: str, computed: int, blocks: Sequence[int]) -> bool:
        if self._bound is None:
            return False
        state, instance = self._bound
        with state.changed:
            held = instance.find(request_id)
            hands_off = held is not None and not held.decodes_here
            complete = held is not None and computed >= held.request.prompt_tokens
        return hands_off and complete and state.sender.begin(request_id, blocks)

    def drafts(self, request_id: str) -> list[int]:
        if self._bound is None:
            return []
        state, _ = self._bound
        with state.changed:
            sequence = state.sequences.get(request_id)
            return [] if sequence is None else sequence.drafts

    def layer_computed(self, request_ids: Sequence[str], layer: int) -> None:
        self._notifier.after(partial(self.report_layer, request_ids, layer))

    def report_layer(self, request_ids: Sequence[str], layer: int) -> None:
        """Report that a layer of these requests' prompts is in the KV cache."""
        if self._bound is not None:
            self._bound[0].sender.layer_computed(request_ids, layer)

    def holds_blocks(self, request_id: str) -> bool:
        if self._bound is None:
            return False
        state, instance = self._bound
        with state.changed:
            return instance.holds(request_id)

    def is_sending(self) -> bool:
        return self._bound is not None and self._bound[1].sending

    def settle(self) -> SettledTransfers:
        if self._bound is None:
            return NOTHING
        state, instance = self._bound
        with state.changed:
            settled = instance.settle()
        self.settled = bool(settled.sent or settled.received)
        return settled


class VllmLoop:
    """Main loop of a vLLM worker: runs iterations while vLLM has requests, and waits otherwise."""

    def __init__(
        self,
        state: SharedWorkerState,
        instance: VllmScheduler,
        core: VllmCore,
        bridge: WorkerBridge,
        eos_token_ids: frozenset[int],
    ) -> None:
        self._state, self._instance, self._core, self._bridge = state, instance, core, bridge
        self._eos = eos_token_ids
        self._failures: dict[str, str] = {}  # requests with a failed constraint
        self._unchanged = core.concurrent_batches  # last iterations that changed nothing; so many make others useless
        bridge.bind(state, instance)

    def run(self) -> None:
        while (began := self._begin()) is not None:
            self._bridge.started, self._bridge.settled = [], False
            outputs, ran = self._core.step()
            self._failures |= ConstrainedOutput.failures
            ConstrainedOutput.failures = {}
            self._unchanged = 0 if ran or self._bridge.settled else self._unchanged + 1
            self._account(outputs, began)

    def _begin(self) -> float | None:
        state, instance = self._state, self._instance
        with state.changed:
            while not state.closing:
                orders = instance.take_orders()
                for order, request_id in orders:
                    self._apply(order, request_id)
                idle = self._unchanged >= self._core.concurrent_batches
                if self._core.busy and (orders or instance.unsettled or not idle):
                    began = time.monotonic()
                    state.batches_started_s.append(began)
                    return began
                state.report_changes()
                state.changed.wait()
        return None

    def _apply(self, order: VllmOrder, request_id: str) -> None:
        if order is VllmOrder.ABORT:
            self._core.abort(request_id)
            self._failures.pop(request_id, None)
            return
        held = self._instance.find(request_id)
        if held is None:  # aborted
            return
        if order is VllmOrder.ADD:
            self._add(held)
        elif self._core.append_first_token(request_id, self._state.sequences[request_id].token_ids[-1]):
            self._instance.resume(held)

    def _add(self, held: VllmRequest) -> None:
        request, sequence = held.request, self._state.sequences[held.request.id]
        output = request.output_tokens if held.decodes_here else 1
        elsewhere = 1 if held.source else 0  # output tokens that the source computed
        constraint = sequence.sampling.constraint
        constrained = None if constraint is None else ConstrainedOutput(request.id, constraint)
        here = max(1, output - elsewhere)
        sampling = vllm_sampling(sequence.sampling, request.prompt_tokens, here, self._eos, constrained)
        # No sharing of blocks that a peer writes. The root of block keys differs by tenant, `cache_salt` and adapter.
        salt = request.id if held.source or sequence.chain is None else sequence.chain.root.hex()
        keys = () if held.source else sequence.block_keys
        self._core.add(request.id, sequence.token_ids, sampling, salt, keys, request.adapter)

    def _account(self, outputs: list[EngineCoreOutput], began: float) -> None:
        state, tokens, ended = self._state, list[tuple[str, TokenOutput]](), list[tuple[str, int | None]]()
        with state.changed:
            state.batches_started_s.popleft()
            self._core.prompt_blocks.report(state.blocks)
            for output in outputs:
                held = self._instance.find(output.request_id)
                if held is not None:  # not aborted during the iteration
                    self._take(held, output, tokens, ended)
            state.grant()
            if not (tokens or self._bridge.started):
                state.report_changes()
                return
            report = state.next_report()
            state.report_blocks()
        state.tell_step(report, began, self._bridge.started, tokens)
        drafts = self._core.drafts() if ended else {}
        for request_id, first_token in ended:
            seeded = None if first_token is None else [first_token, *drafts.get(request_id, [])]
            state.prefill_ended(request_id, seeded)

    def _take(
        self,
        held: VllmRequest,
        output: EngineCoreOutput,
        tokens: list[tuple[str, TokenOutput]],
        ended: list[tuple[str, int | None]],
    ) -> None:
        # `ended` gets the requests that a peer decodes, with None if the first token ended the output.
        request_id, state = held.request.id, self._state
        if output.finish_reason in {VllmReason.ABORT, VllmReason.ERROR}:
            state.fail(request_id, f"vLLM ended the request: {output.finish_reason}")
            return
        if request_id in self._failures:
            state.fail(request_id, self._failures[request_id])
            return
        sequence, made = state.sequences[request_id], len(output.new_token_ids)
        if output.new_prompt_logprobs_tensors is not None:
            sequence.prompt_scores.extend(_prompt_scores(output.new_prompt_logprobs_tensors))
        over = output.finish_reason is not None
        hands_off = over and _hands_off(held, output)
        reason = FinishReason.STOP if output.finish_reason is VllmReason.STOP else FinishReason.LENGTH
        for place, token_id in enumerate(output.new_token_ids):
            ends = over and not hands_off and place == made - 1
            token = _token(output, place, sequence, reason if ends else None)
            tokens.append((request_id, token))
            sequence.append(token_id)
        if over:
            del state.sequences[request_id]
            self._instance.ended(request_id)
            if not held.decodes_here:
                ended.append((request_id, output.new_token_ids[-1] if hands_off else None))


def _hands_off(held: VllmRequest, output: EngineCoreOutput) -> bool:
    # vLLM generates one token only, because a peer decodes the rest.
    here_only = not held.decodes_here and output.finish_reason is VllmReason.LENGTH
    return here_only and held.request.output_tokens > 1


def _token(output: EngineCoreOutput, place: int, sequence: TokenSequence, reason: FinishReason | None) -> TokenOutput:
    logprob, top = None, tuple[tuple[int, float], ...]()
    if output.new_logprobs is not None:
        ids = output.new_logprobs.logprob_token_ids[place].tolist()
        values = output.new_logprobs.logprobs[place].tolist()
        logprob, top = values[0], tuple(zip(ids[1:], values[1:], strict=True))
    stats, index = output.prefill_stats, sequence.generated
    return TokenOutput(
        index=index,
        token_id=output.new_token_ids[place],
        logprob=logprob,
        top_logprobs=top,
        finish_reason=reason,
        reused_tokens=0 if stats is None or index else stats.num_local_cached_tokens,
        prompt_scores=() if index else tuple(sequence.prompt_scores),
    )


def _prompt_scores(found: LogprobsTensors) -> Iterator[TokenScore]:
    # Each row has the prompt token first, and then the most likely tokens.
    for ids, values in zip(found.logprob_token_ids.tolist(), found.logprobs.tolist(), strict=True):
        yield TokenScore(values[0], tuple(zip(ids[1:], values[1:], strict=True)))
