"""Leases: which peer may write which blocks of this instance, for how long."""

from mypy_extensions import mypyc_attr

from twofold.errors import StaleEpochError
from twofold.handoff import Lease, LeaseWatcher
from twofold.kvcache.allocator import BlockAllocation, BlockAllocator


@mypyc_attr(free_list_len=1)
class _Term:
    """A lease, the blocks that it is for, and until when it lasts without a sign of life from its source."""

    __slots__ = ("deadline", "expired", "grant", "lease", "source")

    def __init__(self, lease: Lease, grant: BlockAllocation, source: str, deadline: float) -> None:
        self.lease = lease
        self.grant = grant
        self.source = source
        self.deadline = deadline
        self.expired = False


class LeaseTable:
    """Grants leases on the blocks of one life (`epoch`) of one instance and tracks the writes they allow.

    Granting a lease puts its blocks in flight: the peer may write them at any moment until the lease ends.
    `lease_s` is how long a lease lasts without a sign of life from its source; times are on the clock that
    the caller passes in.
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
        """Lease the blocks that a request was granted to `source`."""
        request_id, deadline = grant.owner, now + self._lease_s
        if request_id in self._terms:
            raise ValueError(f"there is a lease for {request_id} already")
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
        """A heartbeat of `source`: every lease it holds lasts `lease_s` from now."""
        for term in self._terms.values():
            if term.source == source:
                term.deadline = now + self._lease_s

    def renew_all(self, now: float) -> None:
        """Nobody is to blame for a time in which this instance itself could not listen."""
        for term in self._terms.values():
            term.deadline = now + self._lease_s

    def end(self, request_id: str, epoch: int) -> bool:
        """The source will write no more. False if there is no such lease (it ended before).

        Raises StaleEpochError when `epoch` names an earlier life of this instance.
        """
        if epoch != self.epoch:
            raise StaleEpochError(
                f"epoch {epoch} of {self._instance} is over; it lives in epoch {self.epoch}"
            )
        term = self._terms.get(request_id)
        if term is None:
            return False
        del self._terms[request_id]
        if self._watcher is not None:
            self._watcher.ended(term.lease)
        self._blocks.end_transfer(term.grant)
        return True

    def expired(self, now: float) -> list[Lease]:
        """Leases whose source has shown no life until their deadline, each reported once.

        Their blocks stay in flight until `end`: a source that sleeps may yet wake and write.
        """
        late = [term for term in self._terms.values() if term.deadline < now and not term.expired]
        for term in late:
            term.expired = True
        return [term.lease for term in late]

    def find(self, request_id: str) -> Lease | None:
        """The lease on the blocks of a request, if there is one."""
        term = self._terms.get(request_id)
        return None if term is None else term.lease

    def held_by(self, source: str) -> list[Lease]:
        return [term.lease for term in self._terms.values() if term.source == source]
