"""What every endpoint of the gateway works with."""

from dataclasses import dataclass

from twofold.errors import RequestError
from twofold.serving.gateway.limits import Limits
from twofold.serving.gateway.logprobs import LogprobFormat
from twofold.serving.gateway.tokenizer import TextTokenizer
from twofold.serving.service import Service


@dataclass(frozen=True, slots=True)
class Gateway:
    """The service behind the gateway, the tokenizer of its model (if it has one) and the limits."""

    service: Service
    tokenizer: TextTokenizer | None
    limits: Limits

    def check_model(self, name: str) -> None:
        """Raise RequestError (404) where another model is asked for than the one served."""
        served = self.service.model.name
        if name != served:
            raise RequestError(
                f"model: {name!r} is not served here; {served!r} is",
                param="model",
                status=404,
                code="model_not_found",
            )

    def require_tokenizer(self, field: str) -> TextTokenizer:
        """The tokenizer, for a request whose `field` cannot do without."""
        if self.tokenizer is None:
            raise RequestError(
                f"{field}: this model has no tokenizer, so only prompts of token ids are taken", param=field
            )
        return self.tokenizer

    def logprob_format(self) -> LogprobFormat:
        return LogprobFormat(None if self.tokenizer is None else self.tokenizer.bytes)
