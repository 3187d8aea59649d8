"""Admission that rejects requests by overload control."""

from support.ledgers import MODEL
from support.routed import cluster, request
from twofold.instance import Role
from twofold.scheduling.admission.admission import QueuedRequest
from twofold.scheduling.admission.ledger import InstanceCapacity, OverloadLedger
from twofold.scheduling.admission.limits import AdmissionLimits, RefusalReason
from twofold.scheduling.admission.overload import OverloadAdmission, OverloadControl, create_overload_rule


def door(*roles, ttft_s=0.25):
    """Create a cluster with instances of the given roles.

    Return the cluster's scheduler, overload control and admission control.
    """
    scheduler = cluster(list(roles))
    capacities = {
        load.id: InstanceCapacity(model=MODEL, max_num_batched_tokens=100, max_num_seqs=8, capacity_tokens=10_000)
        for load in scheduler.pools
    }
    ledger = OverloadLedger(scheduler.pools, capacities, ttft_s=ttft_s, tbt_s=1.0)
    control = OverloadControl(create_overload_rule("early"), ledger)
    return scheduler, control, OverloadAdmission(AdmissionLimits(), scheduler, control)


def loads(scheduler):
    return [(load.pending_prefill_tokens, load.reserved_tokens, load.requests) for load in scheduler.pools]


def test_rejects_late_requests_without_placing_them():
    scheduler, control, admission = door(Role.PREFILL, Role.PREFILL, Role.DECODE)
    for number in range(4):
        each = request(f"r{number}")
        assert admission.offer(QueuedRequest(each), 0.0) is None
        control.ledger.placed(scheduler.place(each, 0.0), 0.0)
    before = loads(scheduler)
    refusal = admission.offer(QueuedRequest(request("late")), 0.0)
    assert (refusal.reason, refusal.retry_after_s) == (RefusalReason.PREFILL_LOAD, 1)
    assert loads(scheduler) == before
    assert "late" not in admission._queue


def test_unplaceable_requests_wait():
    _, _, admission = door(Role.PREFILL)
    assert admission.offer(QueuedRequest(request("a")), 0.0) is None
    assert admission.waiting == 1
