"""The executor seam: trials go in, evaluations come out in any order."""

from concurrent.futures import Future
from typing import Protocol, Self

from twofold.errors import UserError
from twofold.planning.evaluation import Simulated, Trial


class Refused(Exception):  # noqa: N818 (a message on its way, not an error of this process)
    """A mistake of the user's that a worker found; only its sentence travels."""


class Executor(Protocol):
    """Runs trials beside each other; as a context it frees what it holds, dropping trials that have not begun."""

    def submit(self, trial: Trial) -> Future[Simulated]:
        """The future's exception is a UserError where the trial cannot be simulated."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_exception: object) -> None: ...


def sentence(error: UserError) -> Refused:
    """A UserError in a form that any process boundary lets through."""
    return Refused(str(error))
