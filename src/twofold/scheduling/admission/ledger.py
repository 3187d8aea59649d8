"""What an overload rule knows: who is on the way through which instance, and what follows from that."""

from collections.abc import Mapping, Sequence
from operator import itemgetter

from twofold.performance.base import PerformanceModel
from twofold.request import Request
from twofold.scheduling.admission.decode_load import DecodeLoad, InstanceDecodes
from twofold.scheduling.admission.estimates import PredictionMargin, RunningMean, SpeedFactor
from twofold.scheduling.admission.prefill_queue import PrefillQueue, QueuedPrompt
from twofold.scheduling.cluster.pools import Pools
from twofold.scheduling.cluster.router import Route


class InstanceCapacity:
    """What is known of an instance before it has done anything; `model` has its times."""

    __slots__ = ("capacity_tokens", "max_num_batched_tokens", "max_num_seqs", "model")

    def __init__(
        self, model: PerformanceModel, *, max_num_batched_tokens: int, max_num_seqs: int, capacity_tokens: int
    ) -> None:
        self.model = model
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        self.capacity_tokens = capacity_tokens


class PlacedRequest:
    """A request and where it would run. `reused` tokens of its prompt are not computed; `fetches` as in
    `QueuedPrompt`.
    """

    __slots__ = ("arrival_s", "decode", "decodes", "fetches", "id", "prefill", "prompt_tokens", "reused")

    def __init__(
        self,
        request_id: str,
        arrival_s: float,
        prompt_tokens: int,
        prefill: str,
        decode: str,
        *,
        decodes: bool = True,
        reused: int = 0,
        fetches: bool = False,
    ) -> None:
        self.id = request_id
        self.arrival_s = arrival_s
        self.prompt_tokens = prompt_tokens
        self.prefill = prefill
        self.decode = decode
        self.decodes = decodes  # past its first token
        self.reused = reused
        self.fetches = fetches

    @classmethod
    def of(cls, request: Request, route: Route) -> "PlacedRequest":
        """A request where it is routed to."""
        return cls(
            request.id,
            request.arrival_s,
            request.prompt_tokens,
            route.prefill,
            route.decode,
            decodes=request.output_tokens > 1,
            reused=route.reused_tokens,
            fetches=route.fetch is not None,
        )

    @property
    def prompt(self) -> QueuedPrompt:
        return QueuedPrompt(self.id, self.prompt_tokens - self.reused, self.reused, fetches=self.fetches)


class OverloadLedger:
    """Follows requests through the instances of `pools`, and predicts.

    `ttft_s` and `tbt_s` are the bounds that loads are shares of. How long requests decode, and how much they write, is
    the mean of those that have ended; it is not known of any before it has.
    Loads leave the room that predictions turned out to need: nine in ten of those within a load of 1 meet their bound.
    """

    def __init__(
        self, pools: Pools, facts: Mapping[str, InstanceCapacity], *, ttft_s: float, tbt_s: float
    ) -> None:
        self.ttft_s, self.tbt_s = ttft_s, tbt_s
        self._decode_s = RunningMean()
        self._output_tokens = RunningMean()
        self._pools = pools
        speed, pace = SpeedFactor(), SpeedFactor()
        self._lines = {
            name: PrefillQueue(each.model, each.max_num_batched_tokens, speed) for name, each in facts.items()
        }
        self._decodings = {
            name: InstanceDecodes(each.model, each.max_num_seqs, each.capacity_tokens, pace)
            for name, each in facts.items()
        }
        self._placed: dict[str, PlacedRequest] = {}
        self._promised_s: dict[str, float] = {}  # predicted TTFT of those that are placed, and not prefilled
        self._margin = PredictionMargin()

    # -- what happens ---------------------------------------------------------------------------------------------

    def placed(self, newcomer: PlacedRequest, now: float) -> float:
        """A request is on its way to its prefill instance; returns its predicted TTFT."""
        self._placed[newcomer.id] = newcomer
        self._promised_s[newcomer.id] = ttft_s = self.ttft(newcomer, now)
        self._lines[newcomer.prefill].join(newcomer.prompt, now)
        if newcomer.decodes:
            self._decodings[newcomer.decode].promise(newcomer.id, newcomer.prompt_tokens)
        return ttft_s

    def prefilled(self, request_id: str, now: float) -> PlacedRequest | None:
        """The first token of a request is there; None if it was not placed, or has ended."""
        newcomer = self._placed.get(request_id)
        if newcomer is not None:
            self._lines[newcomer.prefill].done(request_id, now)
            promised_s = self._promised_s.pop(request_id, None)
            if promised_s is not None:
                self._margin.turned_out(promised_s, now - newcomer.arrival_s)
        return newcomer

    def decodes(self, newcomer: PlacedRequest, now: float) -> None:
        """Its decode instance takes it."""
        self._decodings[newcomer.decode].join(newcomer.id, now)

    def stepped(self, decode: str, sequences: int, seconds: float) -> None:
        """An iteration of so many decoding sequences took so long, where a driver knows."""
        self._decodings[decode].stepped(sequences, seconds, self._written)

    def ended(self, request_id: str, now: float, output_tokens: int | None = None) -> None:
        """A request is over, wherever it was; `output_tokens` if it is complete."""
        newcomer = self._placed.pop(request_id, None)
        if newcomer is None:
            return
        self._promised_s.pop(request_id, None)
        self._lines[newcomer.prefill].drop(request_id, now)
        began = self._decodings[newcomer.decode].leave(request_id)
        if began is not None and output_tokens is not None and output_tokens > 1:
            self._decode_s.add(now - began)
            self._output_tokens.add(float(output_tokens))

    def computed_tokens(self, request_id: str) -> int:
        """Prompt tokens of a request under way that are computed for it, and not reused."""
        return self._placed[request_id].prompt.tokens

    # -- what follows ---------------------------------------------------------------------------------------------

    def ttft(self, newcomer: PlacedRequest, now: float) -> float:
        """Predicted seconds from the arrival of a newcomer to its first token, if it joined its line now."""
        return now - newcomer.arrival_s + self._lines[newcomer.prefill].wait_s(newcomer.prompt, now)

    def alone(self, newcomer: PlacedRequest) -> tuple[float, float]:
        """The prefill and the decode load that it would be if nobody else were there."""
        alone_s = self._lines[newcomer.prefill].alone_s(newcomer.prompt)
        return alone_s / self.ttft_s, self._with(newcomer, DecodeLoad())

    def prefill_load(self, newcomer: PlacedRequest, now: float) -> float:
        """Predicted TTFT over its bound, of the newcomer or of who has been longest in the iteration that it would
        join: those who were taken are not made late by those who come after them."""
        ttft_s = self.ttft(newcomer, now)
        first = self._lines[newcomer.prefill].first_with(newcomer.prompt, now)
        if first is not None:
            ttft_s += max(0.0, newcomer.arrival_s - self._placed[first].arrival_s)
        return ttft_s * self._margin.factor / self.ttft_s

    def decode_load(self, newcomer: PlacedRequest, now: float) -> float:
        """Time between tokens over its bound, on its decode instance as it is now, with the newcomer."""
        return self._with(newcomer, self._decodings[newcomer.decode].here)

    def coming_decode_load(self, newcomer: PlacedRequest, now: float) -> float:
        """The same when all have come who were taken before it."""
        decoding = self._decodings[newcomer.decode]
        return self._with(newcomer, decoding.here + decoding.promised)

    def loads(self, now: float) -> tuple[float, float]:
        """Of prefill and of decode, as means over their instances: what a prompt without a token, or nobody, finds."""
        prefill = [self._lines[load.id].busy_s(now) / self.ttft_s for load in self._pools.prefill]
        decodings = [self._decodings[load.id] for load in self._pools.decode]
        return _mean(prefill), _mean([self._load(each, each.here) for each in decodings])

    def decode_relief_s(self, newcomer: PlacedRequest, most: float, now: float) -> float:
        """Seconds until the decode load on the newcomer's instance is at most `most`, if nobody else comes.

        Whoever is to come counts from the start on. All decode for as long as those that have ended, on average; before
        any has, for as long as the first has by now.
        """
        decoding = self._decodings[newcomer.decode]
        oldest = next(decoding.members(), (now, DecodeLoad()))[0]
        decode_s = self._decode_s.value if self._decode_s.known else now - oldest
        leaving = [(began + decode_s, one) for began, one in decoding.members()]
        for line in self._lines.values():
            for request_id, end in line.ends(now):
                one = decoding.coming(request_id)
                if one is not None:
                    leaving.append((end + decode_s, one))
        there = decoding.here + decoding.promised
        for at, one in sorted(leaving, key=itemgetter(0)):
            there -= one
            if self._with(newcomer, there) <= most:
                return max(0.0, at - now)
        return 0.0

    def _with(self, newcomer: PlacedRequest, others: DecodeLoad) -> float:
        """The load of a newcomer beside others; one that ends with its first token brings none."""
        if not newcomer.decodes:
            return 0.0
        together = others + DecodeLoad(1, newcomer.prompt_tokens)
        return self._load(self._decodings[newcomer.decode], together)

    def _load(self, decoding: InstanceDecodes, together: DecodeLoad) -> float:
        return decoding.tbt_s(together, self._written) / self.tbt_s

    @property
    def _written(self) -> float:
        """Output tokens that a decoding request has at any time, on average: half of what it has in the end."""
        return self._output_tokens.value / 2


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
