"""One life of a store, as one of its clients knows it."""

import os
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import TypeVar

from twofold.errors import ConfigurationError
from twofold.serving.store.memory import SlotMemory
from twofold.serving.store.messages import Answer, Answered, Asked, Fetched, Found, Held, Leased, Welcome

R = TypeVar("R", Found, Held, Leased, Fetched)
Say = Callable[[int, int, Asked], None]  # (epoch, number of the question, what is asked)


class Question:
    """Something that is asked of one life of a store, and what that answers; `memory` is that life's."""

    def __init__(
        self, number: int, memory: SlotMemory, say: Callable[[Asked], None], patience_s: float
    ) -> None:
        self.number, self.memory, self.say = number, memory, say
        self.silent = False  # it was not answered in time
        self._patience_s = patience_s
        self._answers: SimpleQueue[Answered | None] = SimpleQueue()

    def answer(self, kind: type[R], after_s: float = 0.0) -> R | None:
        """Wait for the next answer; None where there will be none, because the store is dead or silent.

        It is silent when `after_s`, which it was given for the answer, and the patience with it are over.
        """
        try:
            answer = self._answers.get(timeout=after_s + self._patience_s)
        except Empty:
            self.silent = True
            return None
        return answer if isinstance(answer, kind) else None

    def hear(self, answer: Answered | None) -> None:
        self._answers.put(answer)


class Link:
    """A life of a store: its epoch, its memory, its end (`fileno` is readable then) and the questions under way."""

    def __init__(self, welcome: Welcome, say: Say, patience_s: float) -> None:
        """Raises ConfigurationError or OSError where that life is over."""
        self.epoch = welcome.epoch
        self._say, self._patience_s = say, patience_s
        self._questions: dict[int, Question] = {}
        self._ended = False
        self._pidfd = os.pidfd_open(welcome.pid)
        try:
            self._memory = SlotMemory.open(welcome.address, welcome.slots, welcome.block_bytes)
        except ConfigurationError:
            os.close(self._pidfd)
            raise

    def fileno(self) -> int:
        return self._pidfd

    def begin(self, number: int) -> Question:
        question = Question(
            number, self._memory, lambda what: self._say(self.epoch, number, what), self._patience_s
        )
        self._questions[number] = question
        if self._ended:
            question.hear(None)
        return question

    def over(self, question: Question) -> None:
        """Nothing that is still answered to it matters."""
        self._questions.pop(question.number, None)

    def hear(self, message: Answer) -> None:
        question = self._questions.get(message.number)
        if question is not None:
            question.hear(message.what)

    def end(self) -> None:
        """This life is over: no question will be answered any more. Its memory stays, for those who still read it."""
        if not self._ended:
            self._ended = True
            for question in list(self._questions.values()):
                question.hear(None)
            self._memory.close()
            os.close(self._pidfd)
