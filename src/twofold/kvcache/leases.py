"""Leases: which peer may write which blocks of an instance, and for how long."""

from mypy_extensions import mypyc_attr

from twofold.errors import StaleEpochError
from twofold.handoff import Lease, LeaseWatcher
from twofold.kvcache.allocator import BlockAllocation, BlockAllocator


@mypyc_attr(free_list_len=1)
class _Term:
    """A lease, its blocks, and the deadline for the next heartbeat of its source."""

    __slots__ = ("deadline", "expired", "grant", "lease", "source")

    def __init__(self, lease: Lease, grant: BlockAllocation, source: str, deadline: float) -> None:
        self.lease = lease
        self.grant = grant
        self.source = source
        self.deadline = deadline
        self.expired = False


class LeaseTable:
    """Leases on the blocks of one epoch of an instance.

    The blocks of a lease are in flight until it ends, because the peer may write them at any moment. A lease expires
    `lease_s` seconds after the last heartbeat of its source. The caller supplies the clock.
    """

    def __init__(
        self,
        blocks: BlockAllocator,
        instance: str,
        epoch: int,
        lease_s: float,
        watcher: LeaseWatcher | None = None,
    ) -> None:
        self._blocks = blocks
        self._watcher = watcher
        self._instance = instance
        self._lease_s = lease_s
        self._terms: dict[str, _Term] = {}
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self._terms)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._terms

    def grant(self, grant: BlockAllocation, source: str, now: float) -> Lease:
        """Lease the allocated blocks of a request to `source`."""
        request_id, deadline = grant.owner, now + self._lease_s
        if request_id in self._terms:
            raise ValueError(f"{request_id} already has a lease")
        lease = Lease(
            request_id=request_id,
            source=source,
            instance=self._instance,
            epoch=self.epoch,
            blocks=tuple(self._blocks.blocks_of(grant)),
            deadline_s=deadline,
        )
        self._blocks.begin_transfer(grant)
        self._terms[request_id] = _Term(lease, grant, source, deadline)
        if self._watcher is not None:
            self._watcher.granted(lease)
        return lease

    def renew(self, source: str, now: float) -> None:
        """Extend every lease of `source` to `lease_s` from now, after its heartbeat."""
        for term in self._terms.values():
            if term.source == source:
                term.deadline = now + self._lease_s

    def renew_all(self, now: float) -> None:
        """Extend all leases after a time in which this instance received no heartbeats."""
        for term in self._terms.values():
            term.deadline = now + self._lease_s

    def end(self, request_id: str, epoch: int) -> bool:
        """End the lease of a request; False if there is none. Raises StaleEpochError for another epoch."""
        if epoch != self.epoch:
            raise StaleEpochError(f"epoch {epoch} of {self._instance} is over; its epoch is {self.epoch}")
        term = self._terms.get(request_id)
        if term is None:
            return False
        del self._terms[request_id]
        if self._watcher is not None:
            self._watcher.ended(term.lease)
        self._blocks.end_transfer(term.grant)
        return True

    def expired(self, now: float) -> list[Lease]:
        """Leases without a heartbeat of their source before the deadline, each reported once.

        Their blocks stay in flight until `end`, because a stalled source may still write.
        """
        late = [term for term in self._terms.values() if term.deadline < now and not term.expired]
        for term in late:
            term.expired = True
        return [term.lease for term in late]

    def find(self, request_id: str) -> Lease | None:
        """The lease of a request, if any."""
        term = self._terms.get(request_id)
        return None if term is None else term.lease

    def held_by(self, source: str) -> list[Lease]:
        return [term.lease for term in self._terms.values() if term.source == source]
