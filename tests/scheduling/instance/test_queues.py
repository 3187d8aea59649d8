"""The set of decoding sequences of an instance."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twofold.request import Phase, Request
from twofold.scheduling.instance.queues import DecodeSet
from twofold.scheduling.instance.sequence import ScheduledSequence


def ready(name, prompt=10, output=4, generated=1):
    """Return a sequence after its prefill, with `generated` output tokens."""
    request = Request(id=name, arrival_s=0.0, prompt_tokens=prompt, output_tokens=output)
    computed = prompt + generated - 1
    return ScheduledSequence(request, True, computed, generated)


def progress(sequence):
    return sequence.id, sequence.computed, sequence.generated


@dataclass
class Counted:
    name: str
    computed: int
    generated: int
    output: int

    def step(self):
        self.computed += 1
        self.generated += 1

    @property
    def done(self):
        return self.generated >= self.output


class NaiveDecodeSet:
    """Simple reference implementation of the set of decoding sequences."""

    def __init__(self):
        self.members: list[Counted] = []

    def advance(self, iterations):
        ended = []
        for _ in range(iterations):
            for member in self.members:
                member.step()
            ended += [member for member in self.members if member.done]
            self.members = [member for member in self.members if not member.done]
        return ended

    def iterations_to_end(self):
        return min((member.output - member.generated for member in self.members), default=0)


def check(fast, naive):
    assert fast.size == len(naive.members)
    assert [sequence.id for sequence in fast] == [member.name for member in naive.members]
    assert fast.context_tokens == sum(member.computed for member in naive.members)
    assert fast.iterations_to_end() == naive.iterations_to_end()
    items = [(item.request_id, item.context_tokens) for item in fast.items()]
    assert items == [(member.name, member.computed) for member in naive.members]
    assert all((item.phase, item.num_tokens, item.samples) == (Phase.DECODE, 1, True) for item in fast.items())
    assert [fast.generated(sequence) for sequence in fast] == [m.generated for m in naive.members]


# Join a new sequence (prompt, output, generated so far), remove one, rejoin a removed one, advance.
steps = st.lists(
    st.tuples(
        st.sampled_from(["join", "join", "leave", "return", "advance", "advance"]),
        st.integers(0, 40),
        st.integers(1, 30),
        st.integers(0, 100),
    ),
    max_size=120,
)


@settings(max_examples=800)
@given(steps)
def test_matches_token_by_token_model(steps):
    fast, naive, left = DecodeSet(), NaiveDecodeSet(), {}
    for number, (action, first, second, third) in enumerate(steps):
        members = list(fast)
        if action == "join":
            generated = 1 + third % second
            sequence = ready(str(number), 1 + first, second + generated, generated)
            fast.join(sequence)
            naive.members.append(Counted(sequence.id, first + generated, generated, second + generated))
        elif action == "leave" and members:
            sequence = members[third % len(members)]
            model = naive.members.pop(third % len(members))
            fast.remove(sequence)
            assert progress(sequence) == (model.name, model.computed, model.generated)
            left[sequence.id] = sequence, model
        elif action == "return" and left:
            sequence, model = left.pop(list(left)[third % len(left)])
            fast.join(sequence)
            naive.members.append(model)
        elif action == "advance" and members:
            count = 1 + third % naive.iterations_to_end()
            ended = [progress(sequence) for sequence in fast.advance(count)]
            assert ended == [(m.name, m.computed, m.generated) for m in naive.advance(count)]
        check(fast, naive)


@given(st.lists(st.integers(2, 20), min_size=1, max_size=12), st.integers(1, 19))
def test_advancing_many_equals_advancing_one_by_one(outputs, count):
    sets = DecodeSet(), DecodeSet()
    for made in sets:
        for number, output in enumerate(outputs):
            made.join(ready(str(number), output=output))
    together, single = sets
    count = min(count, together.iterations_to_end())
    ended = [progress(sequence) for _ in range(count) for sequence in single.advance(1)]
    assert [progress(sequence) for sequence in together.advance(count)] == ended
    assert together.items() == single.items()


def test_latest_lists_the_last_to_join_first():
    """A sequence that leaves and returns counts as the last to join."""
    decoding = DecodeSet()
    members = [ready(name) for name in "abc"]
    for member in members:
        decoding.join(member)
    decoding.remove(members[0])
    decoding.join(members[0])
    assert [member.id for member in decoding.latest(2)] == ["a", "c"]
    assert decoding.latest(0) == []


def test_removed_members_leave_no_trace():
    decoding, member = DecodeSet(), ready("a", output=10_000)
    for _ in range(1000):
        decoding.join(member)
        decoding.remove(member)
    assert decoding.iterations_to_end() == 0
    assert len(decoding._ends) == 0


def test_simultaneous_ends_keep_the_order_of_joining():
    decoding = DecodeSet()
    for name, output in (("c", 4), ("a", 6), ("b", 4)):
        decoding.join(ready(name, output=output))
    assert [sequence.id for sequence in decoding.advance(3)] == ["c", "b"]


def test_rejects_removal_of_a_nonmember():
    with pytest.raises(ValueError, match="is not in this queue"):
        DecodeSet().remove(ready("a"))
