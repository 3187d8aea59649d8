"""What was measured of a live service: how fast an instance prefills, and what the way to a peer carries."""

import msgspec

from twofold.performance.transfer import TransferModel


class PrefillSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a prefill: some for each iteration, and some for each token of the prompt."""

    fixed_s: float
    s_per_token: float

    def seconds(self, tokens: int) -> float:
        return self.fixed_s + self.s_per_token * tokens


class LinkSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """The way from one instance to another: what each transfer costs by itself, and then per byte."""

    overhead_s: float
    bytes_per_s: float

    @classmethod
    def fit(cls, small: tuple[int, float], large: tuple[int, float]) -> "LinkSpeed":
        """From two transfers, as (bytes, seconds). However noisy they are, half of the small one's time is overhead."""
        (few, few_s), (many, many_s) = small, large
        per_byte_s = max(many_s - few_s, many_s * 0.01) / (many - few)
        return cls(overhead_s=max(few_s / 2, few_s - few * per_byte_s), bytes_per_s=1.0 / per_byte_s)

    def transfer(self, kv_bytes_per_token: int, layers: int) -> TransferModel:
        """The path of a hand-off over it, if each layer is sent by itself.

        Then each but the last costs an overhead more, on the link and to the prefill beside it.
        """
        return TransferModel(
            kv_bytes_per_token=kv_bytes_per_token,
            layers=layers,
            bytes_per_s=self.bytes_per_s,
            latency_s=self.overhead_s,
            sync_s=(layers - 1) * self.overhead_s,
        )
