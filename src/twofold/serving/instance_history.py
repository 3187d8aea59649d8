"""The recent past of one instance."""

from collections import deque
from typing import Final

from twofold.instance import Role
from twofold.scheduling.instance import InstanceStatus
from twofold.serving.snapshot import InstanceSeries, InstanceSnapshot, InstanceState, RoleSpan

NOTHING: Final = InstanceStatus(0, 0, 0, 0, 0, 0, 0, 0)


class InstanceHistory:
    """What is known of one instance now, and its series."""

    def __init__(self, role: Role, length: int) -> None:
        self.home = role
        self.role = role
        self.state = InstanceState.STARTING
        self.status = NOTHING
        self.batch = 0
        self.restarts = 0
        self.roles: deque[RoleSpan] = deque(maxlen=64)
        self._iterations = 0
        self._sequences = 0
        self._series: tuple[deque[float], deque[int], deque[float]] = (
            deque(maxlen=length),
            deque(maxlen=length),
            deque(maxlen=length),
        )

    def step(self, sequences: int) -> None:
        self.batch = sequences
        self._iterations += 1
        self._sequences += sequences

    def sample(self) -> None:
        """One second is over."""
        batch, waiting, kv_used = self._series
        status = self.status
        if self._iterations:
            batch.append(round(self._sequences / self._iterations, 2))
        else:  # an iteration may take longer than a second
            batch.append(self.batch if status.running else 0)
        self._iterations = self._sequences = 0
        waiting.append(status.waiting + status.lease_queue)
        kv_used.append(round(1 - status.blocks_free / status.blocks_total, 4) if status.blocks_total else 0.0)

    def snapshot(self, name: str) -> InstanceSnapshot:
        batch, waiting, kv_used = self._series
        status = self.status
        return InstanceSnapshot(
            instance=name,
            role=self.role,
            home=self.home,
            state=self.state,
            waiting=status.waiting,
            running=status.running,
            lease_queue=status.lease_queue,
            arriving=status.arriving,
            handing_off=status.handing_off,
            batch=self.batch if status.running else 0,
            blocks_total=status.blocks_total,
            blocks_free=status.blocks_free,
            blocks_in_flight=status.blocks_in_flight,
            restarts=self.restarts,
            roles=tuple(self.roles),
            series=InstanceSeries(batch=list(batch), waiting=list(waiting), kv_used=list(kv_used)),
        )
