"""Sessions in the simulator: turns wait for one another, and find the KV of earlier turns."""

from itertools import pairwise

import msgspec
import pytest

from twofold.cluster.file import parse_cluster
from twofold.cluster.spec import CacheSpec
from twofold.errors import ConfigurationError
from twofold.events import RequestSubscriber
from twofold.hardware.catalog import load_catalog
from twofold.request import Request
from twofold.simulation.clients import ClosedLoop
from twofold.simulation.observers.base import Observer
from twofold.simulation.simulate import simulate
from twofold.workload.source import workload

CATALOG = load_catalog()
BLOCK = 16
TURNS = 5


def cluster(pools, router, **more):
    spec = parse_cluster(pools, model="llama-3.1-8b", catalog=CATALOG)
    cache = CacheSpec(dram="1000000 tokens", block_tokens=BLOCK)
    return msgspec.structs.replace(spec, performance="roofline", router=router, kv_cache=cache, **more)


def session(name, start_s=0.0, shared=0, turns=TURNS, prompt=100):
    made = []
    for turn in range(turns):
        how = {"session": name, "think_s": 0.5 * turn, "shared_tokens": shared}
        made.append(
            Request(id=f"{name}-{turn}", arrival_s=start_s, prompt_tokens=prompt, output_tokens=30 + turn, **how)
        )
        prompt += 30 + turn + 40
    return made


class Times(RequestSubscriber):
    """Arrival and end of each request, in seconds."""

    def __init__(self):
        self.arrived_s, self.ended_s = {}, {}

    def arrived(self, request, now):
        self.arrived_s[request.id] = now

    def ended(self, timeline, now):
        self.ended_s[timeline.request.id] = now


def run(spec, requests):
    times = Times()
    result = simulate(spec, requests, catalog=CATALOG, prepare=lambda made: made.events.subscribe(times))
    return result, times


def reusable(turns):
    """Return the tokens in full blocks that the turns after the first find. The last token of an output has no KV."""
    return sum((turn.prompt_tokens + turn.output_tokens - 1) // BLOCK * BLOCK for turn in turns[:-1])


def test_turns_arrive_after_the_turns_before_them():
    sessions = [session("a"), session("b", start_s=0.2, turns=3), session("c", start_s=50.0)]
    late = session("a", start_s=100.0, turns=1, prompt=1000)  # the session goes on at a given time
    late = [msgspec.structs.replace(late[0], id="a-late")]
    _, times = run(cluster("1xh100@1:mixed", "jsq"), [turn for each in (*sessions, late) for turn in each])
    for turns in sessions:
        assert times.arrived_s[turns[0].id] == turns[0].arrival_s
        for before, turn in pairwise(turns):
            assert times.arrived_s[turn.id] == pytest.approx(times.ended_s[before.id] + turn.think_s)
    assert times.arrived_s["a-late"] == 100.0
    assert len(times.ended_s) == 3 * TURNS - 2 + 1


def test_a_colocated_instance_finds_prompts_and_outputs():
    turns = session("a")
    result, _ = run(cluster("1xh100@1:mixed", "jsq"), turns)
    assert result.reuse.reused_tokens == reusable(turns)


def test_sessions_share_their_beginning_only():
    result, _ = run(
        cluster("1xh100@1:mixed", "jsq"), [*session("a", shared=64), *session("b", start_s=60.0, shared=64)]
    )
    assert result.reuse.reused_tokens == 2 * reusable(session("a")) + 64


def test_prefill_instances_find_prompts_but_not_outputs():
    turns = session("a")
    result, _ = run(cluster("1xh100@1:prefill,1xh100@1:decode", "local-prefix"), turns)
    assert result.handoffs == TURNS
    assert result.reuse.reused_tokens == sum(turn.prompt_tokens // BLOCK * BLOCK for turn in turns[:-1])


def test_decode_instances_append_to_the_sessions_that_they_cache():
    turns = session("a")
    result, _ = run(cluster("1xh100@1:prefill,2xh100@1:decode", "append"), turns)
    assert result.handoffs == 1, "the first turn is handed off, the others are appended"
    assert result.reuse.reused_tokens == reusable(turns)


class Sent(Observer):
    """Bytes of KV transfers, by request."""

    def __init__(self):
        self.bytes = {}

    def transfer(self, transfer):
        self.bytes[transfer.request_id] = transfer.bytes


def test_decode_instances_that_cache_receive_only_the_rest_of_a_prompt():
    first, second = session("a", turns=2)
    second = msgspec.structs.replace(second, prompt_tokens=600)  # too little of it is cached to append it
    sent = Sent()
    spec = cluster("1xh100@1:prefill,1xh100@1:decode", "append")
    simulate(spec, (first, second), catalog=CATALOG, observers=[sent])
    per_token = CATALOG.model("llama-3.1-8b").kv_bytes_per_token
    known = (first.prompt_tokens + first.output_tokens - 1) // BLOCK * BLOCK
    assert sent.bytes == {
        first.id: first.prompt_tokens * per_token,
        second.id: (second.prompt_tokens - known) * per_token,
    }


def test_a_closed_loop_takes_no_sessions():
    loop = ClosedLoop(session("a"), 2)
    with pytest.raises(ConfigurationError, match="sessions follow their own pace"):
        simulate(cluster("1xh100@1:mixed", "jsq"), (), catalog=CATALOG, prepare=loop.attach)


def test_agents_reuse_most_of_their_prompts():
    spec = msgspec.structs.replace(
        cluster("4xh100@1:mixed", "local-prefix"), kv_cache=CacheSpec(dram="100000000 tokens"), max_num_seqs=64
    )
    requests = list(workload("agent", rate=2.0, num_requests=400, seed=1))
    result, _ = run(spec, requests)
    assert result.completed == len(requests)
    assert result.reuse.reused_tokens > 0.85 * result.reuse.prompt_tokens


def test_a_router_that_follows_sessions_finds_more_of_their_prompts():
    requests = list(workload("agent", rate=2.0, num_requests=400, seed=1))
    found = {}
    for router in ("session", "round-robin"):
        spec = msgspec.structs.replace(
            cluster("4xh100@1:mixed", router), kv_cache=CacheSpec(dram="100000000 tokens"), max_num_seqs=64
        )
        found[router] = run(spec, requests)[0].reuse
    assert found["session"].reused_tokens > 0.85 * found["session"].prompt_tokens
    assert found["session"].reused_tokens > 1.2 * found["round-robin"].reused_tokens
