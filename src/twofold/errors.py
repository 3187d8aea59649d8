"""The one exception tree.

TwofoldError
├── UserError                 the user's input is wrong; one sentence says what, where and what would be right
│   ├── ConfigurationError    a flag, a file or the machine cannot give what was asked for
│   ├── WorkloadError         a line of a trace is wrong (carries file, line number and reason)
│   ├── ModelError            a model directory is missing, unreadable or of an unsupported kind
│   └── RequestError          one request is wrong (HTTP 400); names the parameter
├── OutOfBlocksError          the KV cache has fewer free blocks than were asked for
├── StaleEpochError           a message or a write carries the epoch of an earlier life of an instance
├── InstanceLostError         the instance that held a request is gone
└── SearchError               a search for a better plan gave no answer
"""


class TwofoldError(Exception):
    """Root of everything Twofold raises on purpose."""


class UserError(TwofoldError):
    """The user's input is wrong: shown as one sentence, never as a traceback."""


class ConfigurationError(UserError):
    """A flag, a file or the machine cannot give what was asked for."""


class ModelError(UserError):
    """A model directory is missing, unreadable or of an unsupported kind."""


class WorkloadError(UserError):
    """A trace cannot be read; the message names file, line and reason."""

    def __init__(self, path: str, reason: str, line: int | None = None) -> None:
        super().__init__(f"{path}:{line}: {reason}" if line is not None else f"{path}: {reason}")
        self.path, self.reason, self.line = path, reason, line


class RequestError(UserError):
    """One request is wrong (HTTP 400 unless `status` says otherwise); `param` names the field.

    `retry_after_s`: the same request would be taken so many whole seconds later.
    """

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        status: int = 400,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.param, self.status, self.code, self.retry_after_s = param, status, code, retry_after_s


class OutOfBlocksError(TwofoldError):
    """The KV cache has fewer free blocks than were asked for."""


class StaleEpochError(TwofoldError):
    """A message or a write carries the epoch of an earlier life of an instance."""


class InstanceLostError(TwofoldError):
    """The instance that held a request is gone."""


class SearchError(TwofoldError):
    """A search for a better plan gave no answer; the message says why."""
