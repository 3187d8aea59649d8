"""Process of fake workers that send the messages of real workers to a controller but run no model.

The benchmark incoming.py starts this process.
"""

import sys
from collections import defaultdict
from pathlib import Path

import msgspec
import zmq

from twofold.engine.base import KvLayout, LayerShape
from twofold.handoff import Lease
from twofold.instance import Role
from twofold.performance.transfer import LinkSpeed, PrefillSpeed
from twofold.request import FinishReason, TokenOutput
from twofold.scheduling.instance.status import InstanceStatus
from twofold.serving.messages import (
    Alive,
    HandoffReport,
    LeaseGranted,
    LinkMeasured,
    Message,
    Peer,
    Prefill,
    Registered,
    Reserve,
    Status,
    StepDone,
    ToWorker,
)
from twofold.transport.base import MemoryDescriptor

LAYERS = 32
LAYOUT = KvLayout(
    layers=tuple(LayerShape(8, 128, 128) for _ in range(LAYERS)), block_size=16, dtype="bfloat16", itemsize=2
)
STATUS = InstanceStatus(0, 8, 0, 0, 0, 4096, 4000, 0)
SPEED = PrefillSpeed(fixed_s=0.01, s_per_token=1e-4)
PROMPT = 1000
ENCODE = msgspec.msgpack.encode


def role_of(number: int) -> Role:
    return Role.DECODE if number % 4 else Role.PREFILL


def name_of(number: int) -> str:
    return f"{role_of(number).value}-{number}"


def number_of(instance: str) -> int:
    return int(instance.rpartition("-")[2])


def registered(number: int, inbox: str) -> Registered:
    memory = MemoryDescriptor(instance=name_of(number), epoch=1, address="x" * 40, num_blocks=4096, layout=LAYOUT)
    return Registered(
        peer=Peer(inbox=inbox, memory=memory), role=role_of(number), model="/model", status=STATUS, prefill=SPEED
    )


def outputs(index: int, last: int) -> TokenOutput:
    reason = FinishReason.LENGTH if index == last else None
    return TokenOutput(index=index, token_id=7, finish_reason=reason)


class Workers:
    """Fake workers that read commands from stdin and send the requested messages to the controller."""

    def __init__(self, directory: Path, count: int) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        context.set(zmq.MAX_SOCKETS, count + 64)
        self.inbox = f"ipc://{directory}/workers.sock"
        self._pull = context.socket(zmq.PULL)
        self._pull.set_hwm(0)
        self._pull.bind(self.inbox)
        self._pushes = [context.socket(zmq.PUSH) for _ in range(count)]
        for push in self._pushes:
            push.set_hwm(0)
            push.connect(f"ipc://{directory}/controller.sock")
        self._count = count
        self._numbers = [0] * count
        self._decoding: dict[str, tuple[int, int]] = {}  # decode worker and last token of each request
        self._decoder: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)

    def say(self, number: int, message: Message) -> None:
        self._pushes[number].send(ENCODE(message))

    def follow(self) -> None:
        """Call the methods named by the lines on stdin."""
        for line in sys.stdin:
            kind, *numbers = line.split()
            getattr(self, kind)(*map(int, numbers))

    def register(self) -> None:
        for number in range(self._count):
            self.say(number, registered(number, self.inbox))

    def restart(self) -> None:
        self.say(0, registered(0, self.inbox))

    def links(self) -> None:
        speed = LinkSpeed(overhead_s=1e-4, bytes_per_s=1e9)
        for source in range(0, self._count, 4):
            for target in range(self._count):
                if target % 4:
                    self.say(source, LinkMeasured(source=name_of(source), target=name_of(target), speed=speed))

    def alive(self, count: int) -> None:
        frames = [ENCODE(Alive(instance=name_of(number), epoch=1)) for number in range(self._count)]
        for turn in range(count):
            number = turn % self._count
            self._pushes[number].send(frames[number])

    def status(self, count: int) -> None:
        for turn in range(count):
            number = turn % self._count
            self.say(number, Status(instance=name_of(number), epoch=1, status=STATUS, number=self._next(number)))

    def steps(self, count: int) -> None:
        """Report `count` completed iterations that produced no tokens."""
        for turn in range(count):
            number = turn % self._count
            self.say(number, self._step(number, []))

    def requests(self, count: int) -> None:
        """Send the controller the messages of workers that prefill and hand off `count` requests."""
        while count:
            message = self._decoder.decode(self._pull.recv())
            if isinstance(message, Prefill) and message.target is not None:
                request_id = message.generation.request.id
                last = message.generation.sampling.max_tokens - 1
                self._decoding[request_id] = number_of(message.target), last
            elif isinstance(message, Reserve):
                count -= 1
                self._run(message.request.id, number_of(message.source))

    def _run(self, request_id: str, prefill: int) -> None:
        decode, last = self._decoding[request_id]
        lease = Lease(
            request_id=request_id,
            source=name_of(prefill),
            instance=name_of(decode),
            epoch=1,
            blocks=tuple(range(PROMPT // 16)),
            deadline_s=0.0,
        )
        self.say(decode, LeaseGranted(lease=lease))
        self.say(prefill, self._step(prefill, [(request_id, outputs(0, last))]))
        report = HandoffReport(
            instance=name_of(prefill), request_id=request_id, started_s=0.0, ended_s=0.1, bytes_moved=1
        )
        self.say(prefill, report)

    def tokens(self, batch: int) -> None:
        """Send the remaining tokens of every request."""
        on: dict[int, list[str]] = defaultdict(list)
        last = 0
        for request_id, (decode, last) in self._decoding.items():  # noqa: B007  (all have the same last token)
            on[decode].append(request_id)
        for index in range(1, last + 1):
            for decode, ids in on.items():
                for first in range(0, len(ids), batch):
                    made = [(each, outputs(index, last)) for each in ids[first : first + batch]]
                    self.say(decode, self._step(decode, made))
        self._decoding.clear()

    def _step(self, number: int, tokens: list[tuple[str, TokenOutput]]) -> StepDone:
        return StepDone(
            instance=name_of(number),
            epoch=1,
            started_s=0.0,
            started=[request_id for request_id, output in tokens if not output.index],
            tokens=tokens,
            status=STATUS,
            number=self._next(number),
        )

    def _next(self, number: int) -> int:
        self._numbers[number] += 1
        return self._numbers[number]


if __name__ == "__main__":
    Workers(Path(sys.argv[1]), int(sys.argv[2])).follow()
