"""Overload ledger: tracks the requests placed on each instance, and predicts their latencies."""

from collections.abc import Mapping, Sequence
from operator import itemgetter

import msgspec

from twofold.events import PlacedRequest, RequestSubscriber
from twofold.performance.base import PerformanceModel
from twofold.scheduling.admission.prefill_queue import (
    PredictionMargin,
    PrefillQueue,
    QueuedPrompt,
    RunningMean,
    SpeedFactor,
)
from twofold.scheduling.cluster.pools import Pools


class InstanceCapacity(msgspec.Struct, frozen=True, kw_only=True):
    """Token and sequence limits of an instance, and the performance model of its iterations."""

    model: PerformanceModel
    max_num_batched_tokens: int
    max_num_seqs: int
    capacity_tokens: int


class DecodeLoad(msgspec.Struct, frozen=True):
    """Number of sequences that decode on an instance, and the sum of their prompt tokens."""

    sequences: int = 0
    prompt_tokens: int = 0

    def __add__(self, other: "DecodeLoad") -> "DecodeLoad":
        return DecodeLoad(self.sequences + other.sequences, self.prompt_tokens + other.prompt_tokens)

    def __sub__(self, other: "DecodeLoad") -> "DecodeLoad":
        return DecodeLoad(self.sequences - other.sequences, self.prompt_tokens - other.prompt_tokens)


class InstanceDecodes:
    """Decode load of an instance, from its decoding requests and from requests still in prefill."""

    def __init__(self, capacity: InstanceCapacity, speed: SpeedFactor) -> None:
        self.current, self.promised = DecodeLoad(), DecodeLoad()  # of decoding requests, of requests in prefill
        self._capacity, self._speed = capacity, speed
        self.coming: dict[str, DecodeLoad] = {}  # the promised requests
        self.members: dict[str, tuple[float, DecodeLoad]] = {}  # start and load of each decoding request, in order

    def promise(self, request_id: str, prompt_tokens: int) -> None:
        """Add a request that will decode on this instance after its prefill."""
        self.coming[request_id] = one = DecodeLoad(1, prompt_tokens)
        self.promised += one

    def join(self, request_id: str, now: float) -> None:
        """Record that a request starts to decode."""
        one = self.coming.pop(request_id)
        self.promised -= one
        self.members[request_id] = now, one
        self.current += one

    def leave(self, request_id: str) -> float | None:
        """Remove a request; return the start time of its decode, or None if it has not started."""
        came = self.coming.pop(request_id, None)
        if came is not None:
            self.promised -= came
        began, one = self.members.pop(request_id, (None, None))
        if one is not None:
            self.current -= one
        return began

    def observe_iteration(self, sequences: int, seconds: float, written: float) -> None:
        """Update the correction factor of predicted decode times from one measured iteration."""
        # `written` is the mean number of output tokens so far.
        if self.current.sequences:
            prompt_tokens = self.current.prompt_tokens / self.current.sequences
            modelled_s = self._iteration_s(sequences, sequences * (prompt_tokens + written))
            self._speed.observe(modelled_s, seconds)

    def tbt_s(self, load: DecodeLoad, written: float) -> float:
        """Predict the time between tokens in seconds if the sequences in `load` decode together."""
        sequences = load.sequences
        if not sequences:
            return 0.0
        context = load.prompt_tokens + sequences * written
        # Beyond the limits of an iteration, sequences take turns.
        most = self._capacity.max_num_seqs
        rounds = max(1.0, sequences / most, context / self._capacity.capacity_tokens)
        return rounds * self._iteration_s(min(sequences, most), context) * self._speed.factor

    def _iteration_s(self, sequences: int, context: float) -> float:
        cost = self._capacity.model.decode_cost(sequences)
        return cost.base_s + cost.context_s * context


class OverloadLedger(RequestSubscriber):
    """Tracks the requests placed on the instances of `pools`, and predicts prefill and decode loads.

    A load is a predicted latency divided by its bound: TTFT for prefill, time between tokens (TBT) for decode.
    """

    def __init__(
        self, pools: Pools, capacities: Mapping[str, InstanceCapacity], *, ttft_s: float, tbt_s: float
    ) -> None:
        self.ttft_s, self.tbt_s = ttft_s, tbt_s
        self._decode_s = RunningMean()  # of finished requests
        self._output_tokens = RunningMean()  # of finished requests
        self._pools = pools
        prefill_speed, decode_speed = SpeedFactor(), SpeedFactor()
        self._queues = {
            name: PrefillQueue(each.model, each.max_num_batched_tokens, prefill_speed)
            for name, each in capacities.items()
        }
        self._decodes = {name: InstanceDecodes(each, decode_speed) for name, each in capacities.items()}
        self._placed: dict[str, PlacedRequest] = {}
        self._predicted_ttft_s: dict[str, float] = {}  # of requests in prefill
        self._margin = PredictionMargin()  # of prefill loads: 90% of the requests with a load up to 1 meet the bound

    def get(self, request_id: str) -> PlacedRequest | None:
        """Return the placed request with this id; None if it is unknown or has ended."""
        return self._placed.get(request_id)

    def placed(self, placed: PlacedRequest, now: float) -> None:
        self._placed[placed.id] = placed
        self._predicted_ttft_s[placed.id] = self.ttft(placed, now)
        self._queues[placed.route.prefill].join(_prompt(placed), now)
        if _decodes(placed):
            self._decodes[placed.route.decode].promise(placed.id, placed.request.prompt_tokens)

    def first_token(self, request_id: str, now: float) -> None:
        placed = self._placed.get(request_id)
        if placed is not None:
            self._queues[placed.route.prefill].done(request_id, now)
            predicted_s = self._predicted_ttft_s.pop(request_id, None)
            if predicted_s is not None:
                self._margin.observe(predicted_s, now - placed.request.arrival_s)

    def start_decode(self, placed: PlacedRequest, now: float) -> None:
        """Count a request as decoding on its decode instance."""
        self._decodes[placed.route.decode].join(placed.id, now)

    def observe_iteration(self, decode: str, sequences: int, seconds: float) -> None:
        """Correct later predictions by the measured time of a decode iteration."""
        self._decodes[decode].observe_iteration(sequences, seconds, self._mean_written)

    def finished(self, request_id: str, output_tokens: int, now: float) -> None:
        began = self._remove(request_id, now)
        if began is not None and output_tokens > 1:
            self._decode_s.add(now - began)
            self._output_tokens.add(float(output_tokens))

    def aborted(self, request_id: str, now: float) -> None:
        self._remove(request_id, now)

    def _remove(self, request_id: str, now: float) -> float | None:
        placed = self._placed.pop(request_id, None)
        if placed is None:
            return None
        self._predicted_ttft_s.pop(request_id, None)
        self._queues[placed.route.prefill].drop(request_id, now)
        return self._decodes[placed.route.decode].leave(request_id)

    def computed_tokens(self, request_id: str) -> int:
        """Return the number of a request's prompt tokens that are not reused from a cache."""
        return _prompt(self._placed[request_id]).tokens

    def predicted_ttft_s(self, request_id: str) -> float | None:
        """Return the TTFT in seconds that was predicted when a request was placed; None after the request's prefill."""
        return self._predicted_ttft_s.get(request_id)

    def ttft(self, placed: PlacedRequest, now: float) -> float:
        """Predict the TTFT in seconds of a request that joins the queue of its prefill instance now."""
        wait_s = self._queues[placed.route.prefill].wait_s(_prompt(placed), now)
        return now - placed.request.arrival_s + wait_s

    def alone(self, placed: PlacedRequest) -> tuple[float, float]:
        """Return the prefill and the decode load that a request would cause on idle instances."""
        alone_s = self._queues[placed.route.prefill].alone_s(_prompt(placed))
        return alone_s / self.ttft_s, self._load_with(placed, DecodeLoad())

    def prefill_load(self, placed: PlacedRequest, now: float) -> float:
        """Return the prefill load of a request: its predicted TTFT divided by the TTFT bound."""
        ttft_s = self.ttft(placed, now)
        first = self._queues[placed.route.prefill].oldest_companion(_prompt(placed), now)
        if first is not None:
            # The oldest queued request of the iteration counts, so that admitted requests are not delayed too much.
            ttft_s += max(0.0, placed.request.arrival_s - self._placed[first].request.arrival_s)
        return ttft_s * self._margin.factor / self.ttft_s

    def decode_load(self, placed: PlacedRequest, *, coming: bool = False) -> float:
        """Return the decode load of a request: its predicted time between tokens, divided by the SLO bound.

        The prediction assumes that the request decodes together with the requests that decode on its
        instance. If `coming` is true, requests in prefill that will decode on the instance count as decoding.
        """
        decodes = self._decodes[placed.route.decode]
        return self._load_with(placed, decodes.current + decodes.promised if coming else decodes.current)

    def loads(self, now: float) -> tuple[float, float]:
        """Return the mean load of the prefill instances and the mean load of the decode instances."""
        prefill = [self._queues[load.id].busy_s(now) / self.ttft_s for load in self._pools.prefill]
        decodes = [self._decodes[load.id] for load in self._pools.decode]
        return _mean(prefill), _mean([self._load(each, each.current) for each in decodes])

    def decode_relief_s(self, placed: PlacedRequest, limit: float, now: float) -> float:
        """Predict the seconds until a request's TBT falls to `limit` times its bound, if no more requests arrive."""
        decodes = self._decodes[placed.route.decode]
        oldest = next(iter(decodes.members.values()), (now, None))[0]
        # Before any request has finished, the oldest request shows the decode time.
        decode_s = self._decode_s.value if self._decode_s.known else now - oldest
        leaving = [(began + decode_s, one) for began, one in decodes.members.values()]
        for queue in self._queues.values():
            for request_id, end in queue.ends(now):
                one = decodes.coming.get(request_id)
                if one is not None:
                    leaving.append((end + decode_s, one))
        left = decodes.current + decodes.promised  # requests in prefill count as decoding
        for at, one in sorted(leaving, key=itemgetter(0)):
            left -= one
            if self._load_with(placed, left) <= limit:
                return max(0.0, at - now)
        return 0.0

    def _load_with(self, placed: PlacedRequest, others: DecodeLoad) -> float:
        """Predict a request's time between tokens in a batch with `others`, as a fraction of the SLO bound."""
        if not _decodes(placed):  # one output token
            return 0.0
        total = others + DecodeLoad(1, placed.request.prompt_tokens)
        return self._load(self._decodes[placed.route.decode], total)

    def _load(self, decodes: InstanceDecodes, total: DecodeLoad) -> float:
        return decodes.tbt_s(total, self._mean_written) / self.tbt_s

    @property
    def _mean_written(self) -> float:
        """Estimated number of tokens generated so far by a decoding request: half the mean output length."""
        return self._output_tokens.value / 2  # half the mean output length


def _prompt(placed: PlacedRequest) -> QueuedPrompt:
    route, request = placed.route, placed.request
    reused = route.reused_tokens
    return QueuedPrompt(placed.id, request.prompt_tokens - reused, reused, fetches=route.fetch is not None)


def _decodes(placed: PlacedRequest) -> bool:
    return placed.request.output_tokens > 1


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
