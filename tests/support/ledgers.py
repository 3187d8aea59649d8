"""Helpers for tests of overload control."""

from support.routed import load, pools
from support.toy import ToyModel
from twofold.events import PlacedRequest, Route
from twofold.request import Request
from twofold.scheduling.admission.ledger import InstanceCapacity, OverloadLedger
from twofold.scheduling.admission.overload import OverloadControl, create_overload_rule

MODEL = ToyModel(base=0, per_sequence=10)


def ledger(*names, ttft_s=1.0, tbt_s=0.1, budget=100, max_num_seqs=64, capacity=10_000, model=MODEL):
    facts = {
        name: InstanceCapacity(
            model=model, max_num_batched_tokens=budget, max_num_seqs=max_num_seqs, capacity_tokens=capacity
        )
        for name in names
    }
    return OverloadLedger(pools(*(load(name) for name in names)), facts, ttft_s=ttft_s, tbt_s=tbt_s)


def control(rule, *names, **how):
    return OverloadControl(create_overload_rule(rule), ledger(*names, **how))


def placed(name, *, prompt=100, prefill="p0", decode="d0", arrival_s=0.0, output=2, reused=0, fetch=None):
    """Return a request that is routed to a prefill and a decode instance."""
    request = Request(id=name, arrival_s=arrival_s, prompt_tokens=prompt, output_tokens=output)
    return PlacedRequest(request, Route(prefill, decode, (), reused, fetch))


def decoding(made, *names, prompt=100, decode="d0", now=0.0):
    """Add decoding requests to a ledger of predicted instance loads."""
    for name in names:
        each = placed(name, prompt=prompt, decode=decode)
        made.placed(each, now)
        made.first_token(name, now)
        made.start_decode(each, now)
