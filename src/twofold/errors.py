"""Exceptions raised by Twofold."""


class TwofoldError(Exception):
    """Base class of all exceptions that Twofold raises."""


class UserError(TwofoldError):
    """Base class of errors in user input. The message is one sentence, shown without a traceback."""


class ConfigurationError(UserError):
    """A flag or file is invalid, or requires a feature that the machine does not support."""


def require(condition: bool, message: str) -> None:
    """Raise ConfigurationError with `message` unless `condition` is true."""
    if not condition:
        raise ConfigurationError(message)


class ModelError(UserError):
    """A model directory is missing, unreadable or of an unsupported kind."""


class WorkloadError(UserError):
    """A trace or workload is invalid."""

    def __init__(self, path: str, reason: str, line: int | None = None) -> None:
        super().__init__(f"{path}:{line}: {reason}" if line is not None else f"{path}: {reason}")
        self.path, self.reason, self.line = path, reason, line


class RequestError(UserError):
    """A request is refused with an HTTP error."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,  # name of the invalid field
        status: int = 400,
        code: str | None = None,
        retry_after_s: int | None = None,  # a later retry may succeed
    ) -> None:
        super().__init__(message)
        self.param, self.status, self.code, self.retry_after_s = param, status, code, retry_after_s


class UnsupportedError(RequestError):
    """A request needs a feature that this service does not have, but that the servers behind it may have."""


class OutOfBlocksError(TwofoldError):
    """The KV cache has too few free blocks."""


class StaleEpochError(TwofoldError):
    """A message or write has an outdated epoch: it is from before the restart of an instance."""


class InstanceLostError(TwofoldError):
    """The instance that ran the request has failed or left the service."""


class SearchError(TwofoldError):
    """A search for a better plan failed."""
