"""Helper functions for benchmarks of the CPU time that a cluster scheduler needs per routing decision."""

import random
import time
from collections import deque
from collections.abc import Callable

from twofold.request import Request
from twofold.scheduling.cluster.scheduler import ClusterScheduler

LOOP_ITERATIONS = 1_000_000


def cpu_seconds(work: Callable[[], object]) -> float:
    """Call `work` and return the CPU seconds that this process spent in the call."""
    began = time.process_time()
    work()
    return time.process_time() - began


def reference_loop() -> int:
    """Run a million iterations of a plain Python loop, to compare the speed of machines."""
    total = 0
    for number in range(LOOP_ITERATIONS):
        total += number & 7
    return total


def sample_requests(count: int) -> list[Request]:
    """Return `count` requests with seeded random lengths: 1 to 4,000 prompt tokens and 1 to 500 output tokens."""
    draw = random.Random(0)
    return [
        Request(id=f"r{n}", arrival_s=0.0, prompt_tokens=draw.randint(1, 4000), output_tokens=draw.randint(1, 500))
        for n in range(count)
    ]


def decisions_per_s(cluster: ClusterScheduler, decisions: int, *, held: int) -> float:
    """Return the routing decisions per CPU second of a cluster scheduler with `held` unfinished requests."""
    held_ids: deque[str] = deque()

    def place(request: Request) -> None:
        if cluster.place(request, 0.0) is None:
            raise RuntimeError("the router placed nothing on a cluster with room")
        held_ids.append(request.id)

    def finish_oldest() -> None:
        request_id = held_ids.popleft()
        cluster.first_token(request_id, 0.0)
        cluster.handed_off(request_id, 0.0, 0.0)
        cluster.finished(request_id, 1, 0.0)

    asked = sample_requests(held + decisions)
    for request in asked[:held]:
        place(request)

    def work() -> None:
        for request in asked[held:]:
            finish_oldest()
            place(request)

    return decisions / cpu_seconds(work)
