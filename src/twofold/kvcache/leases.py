"""Leases: which peer may write which blocks of this instance, for how long."""

from twofold.errors import StaleEpochError
from twofold.handoff import Lease
from twofold.kvcache.accounts import BlockAccounts


class LeaseBook:
    """Grants leases on the blocks of one life (`epoch`) of one instance and tracks the writes they allow.

    Granting a lease puts its blocks in flight: the peer may write them at any moment until the lease ends.
    `lease_s` is how long a lease lasts without a sign of life from its source; times are on the clock that
    the caller passes in.
    """

    def __init__(self, blocks: BlockAccounts, instance: str, epoch: int, lease_s: float) -> None:
        self._blocks = blocks
        self._instance = instance
        self._lease_s = lease_s
        self._deadlines: dict[str, float] = {}
        self._leases: dict[str, Lease] = {}
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._leases

    def grant(self, request_id: str, source: str, now: float) -> Lease:
        """Lease the blocks that `request_id` already owns to `source`."""
        lease = Lease(
            request_id=request_id,
            source=source,
            instance=self._instance,
            epoch=self.epoch,
            blocks=tuple(self._blocks.blocks_of(request_id)),
            deadline_s=now + self._lease_s,
        )
        self._blocks.begin_transfer(transfer_name(request_id), request_id)
        self._leases[request_id] = lease
        self._deadlines[request_id] = lease.deadline_s
        return lease

    def renew(self, source: str, now: float) -> None:
        """A heartbeat of `source`: every lease it holds lasts `lease_s` from now."""
        for request_id in self._deadlines:
            if self._leases[request_id].source == source:
                self._deadlines[request_id] = now + self._lease_s

    def renew_all(self, now: float) -> None:
        """Nobody is to blame for a time in which this instance itself could not listen."""
        self._deadlines = dict.fromkeys(self._deadlines, now + self._lease_s)

    def end(self, request_id: str, epoch: int) -> bool:
        """The source will write no more. False if there is no such lease (it ended before).

        Raises StaleEpochError when `epoch` names an earlier life of this instance.
        """
        if epoch != self.epoch:
            raise StaleEpochError(
                f"epoch {epoch} of {self._instance} is over; it lives in epoch {self.epoch}"
            )
        if self._leases.pop(request_id, None) is None:
            return False
        self._deadlines.pop(request_id, None)
        self._blocks.end_transfer(transfer_name(request_id))
        return True

    def expired(self, now: float) -> list[Lease]:
        """Leases whose source has shown no life until their deadline, each reported once.

        Their blocks stay in flight until `end`: a source that sleeps may yet wake and write.
        """
        late = [request_id for request_id, deadline in self._deadlines.items() if deadline < now]
        for request_id in late:
            del self._deadlines[request_id]
        return [self._leases[request_id] for request_id in late]

    def find(self, request_id: str) -> Lease | None:
        """The lease on the blocks of a request, if there is one."""
        return self._leases.get(request_id)

    def held_by(self, source: str) -> list[Lease]:
        return [lease for lease in self._leases.values() if lease.source == source]


def transfer_name(request_id: str) -> str:
    """The name under which the block accounts know the writes that a lease allows."""
    return f"lease:{request_id}"
