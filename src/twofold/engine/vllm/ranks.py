"""vLLM on several ranks: rank 0 runs vLLM's scheduler, and every rank runs a vLLM worker with its part of the model."""

import os
import pickle
import queue
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import msgspec
from vllm.config import VllmConfig
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.outputs import ModelRunnerOutput

from twofold.engine.rank_link import FirstRankLink, RankHeartbeat, RankLinks
from twofold.engine.vllm.bridge import BRIDGES, ConnectorBridge
from twofold.engine.vllm.connector import BRIDGE
from twofold.engine.vllm.sampling import ConstrainedOutput
from twofold.kvcache.sharding import Sharding


class RankResult(msgspec.Struct, frozen=True, tag=True):
    """Message to rank 0 with the pickled result of a method, and the requests that could not be constrained."""

    pickled: bytes
    failures: dict[str, str]


class LayerComputed(msgspec.Struct, frozen=True, tag=True):
    """Message to rank 0: the sender has computed its part of a layer of these requests' prompts."""

    request_ids: Sequence[str]
    layer: int


class OtherVllmRanks:
    """Rank 0's access to the other ranks."""

    def __init__(self, pipes: Sequence[Connection], on_layer: Callable[[Sequence[str], int], None]) -> None:
        self._on_layer = on_layer
        self._results = [queue.SimpleQueue[bytes]() for _ in pipes]
        self._links = RankLinks(pipes, RankResult | LayerComputed | RankHeartbeat, self._handle)
        self.alive = self._links.alive

    def send(self, content: object) -> None:
        self._links.send(pickle.dumps(content))

    def results(self) -> list[Any]:
        """Wait for the results of all other ranks."""
        return [pickle.loads(each.get()) for each in self._results]  # noqa: S301  (from this worker's own processes)

    def _handle(self, place: int, message: object) -> None:
        if isinstance(message, RankResult):
            ConstrainedOutput.failures.update(message.failures)
            self._results[place].put(message.pickled)
        elif isinstance(message, LayerComputed):
            self._on_layer(message.request_ids, message.layer)


# vLLM's MultiprocExecutor would start the ranks itself. The fork server starts ours, because it reports the end of a
# worker only when the last process that may write for it has ended.
class RankExecutor(UniProcExecutor):
    """vLLM executor of one rank. `store` is the file with which the ranks form a process group."""

    supports_pp = True

    def __init__(self, vllm_config: VllmConfig, split: Sharding, rank: int, store: str) -> None:
        self._split, self._rank, self._store = split, rank, store
        super().__init__(vllm_config)

    def _distributed_args(self) -> tuple[str, int, int]:
        return f"file://{self._store}", self._rank, self._rank

    def _init_executor(self) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        layers, split = self.model_config.get_total_num_hidden_layers(), self._split
        if split.pipeline > 1:  # vLLM may divide the layers in another way than the hand-off plan
            stages = [len(split.layers(rank, layers)) for rank in range(0, split.ranks, split.tensor)]
            os.environ["VLLM_PP_LAYER_PARTITION"] = ",".join(map(str, stages))
        if split.tensor > 1 and self.parallel_config.enable_expert_parallel:
            _apply_own_experts_only()
        super()._init_executor()
        self.driver_worker.global_rank = self._rank
        runner = self.driver_worker.worker.model_runner
        if self._rank >= split.tensor and runner.intermediate_tensors is None:
            # Input of later stages. vLLM allocates it in a profiling run, which it skips on a CPU in eager mode.
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=self.model_config.dtype, device=runner.device
            )


def _apply_own_experts_only() -> None:
    """Let vLLM's experts for CPUs use the map of a rank's experts. They ignore it, and read past the rank's weights."""
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe  # noqa: PLC0415  (of vLLM's build for CPUs)

    apply = cpu_moe.CPUUnquantizedExperts.apply

    def apply_own(self: Any, *, topk_weights: Any, topk_ids: Any, expert_map: Any, **others: Any) -> None:  # noqa: ANN401
        own = expert_map[topk_ids]  # -1 for the experts of other ranks
        weights = topk_weights.where(own >= 0, 0.0)
        apply(self, topk_weights=weights, topk_ids=own.clamp(min=0), expert_map=expert_map, **others)

    cpu_moe.CPUUnquantizedExperts.apply = apply_own


class SplitExecutor(RankExecutor):
    """vLLM executor of rank 0, which also runs the workers of the other ranks."""

    def __init__(self, vllm_config: VllmConfig, split: Sharding, others: OtherVllmRanks, store: str) -> None:
        self._others = others
        others.send(vllm_config)
        super().__init__(vllm_config, split, 0, store)

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
        single_value: bool = False,
    ) -> Any:  # noqa: ANN401
        self._others.send((method, args, kwargs))
        results = [*super().collective_rpc(method, None, args, kwargs), *self._others.results()]
        done: Future[Any] = Future()
        done.set_result(self._output(results) if single_value else results)
        return done if non_block else done.result()

    def _output(self, results: list[Any]) -> Any:  # noqa: ANN401
        own, output = results[0], results[-self._split.tensor]  # of the first rank of the last stage, as in vLLM
        if isinstance(own, ModelRunnerOutput) and output is not own:
            output.kv_connector_output = own.kv_connector_output  # only rank 0 reports ended transfers
        return output


def run_rank(link: FirstRankLink[bytes], bridge: ConnectorBridge, split: Sharding, rank: int, store: str) -> None:
    """Run the calls that rank 0 sends on this rank's vLLM worker, until rank 0 exits."""
    with suppress(EOFError, ConnectionError):
        config = pickle.loads(link.recv())  # noqa: S301  (first, rank 0 sends vLLM's configuration)
        BRIDGES[config.kv_transfer_config.kv_connector_extra_config[BRIDGE]] = bridge
        executor = RankExecutor(config, split, rank, store)
        while True:
            method, args, kwargs = pickle.loads(link.recv())  # noqa: S301
            (result,) = executor.collective_rpc(method, None, args, kwargs)
            link.send(RankResult(pickle.dumps(result), ConstrainedOutput.failures))
            ConstrainedOutput.failures = {}
