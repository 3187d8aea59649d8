"""The stages of a request."""

import pytest

from support.lives import SPLIT_LIFE, life
from twofold.request import FinishReason
from twofold.serving.telemetry.snapshot import StageName, stage_of, stages_of


def spans(timeline, ended_s=None):
    return {stage.name.value: (stage.start_s, stage.end_s) for stage in stages_of(timeline, ended_s)}


def test_a_split_request():
    """All five, as the timeline draws them."""
    assert spans(life([4.0, 6.0, 7.0], **SPLIT_LIFE)) == {
        "queue": (1.0, 2.0),
        "prefill": (2.0, 4.0),
        "hand-off": (2.5, 4.5),
        "decode queue": (4.5, 5.0),
        "decode": (5.0, 7.0),
    }


def test_an_unsplit_request():
    """No hand-off."""
    whole = life([4.0, 6.0], prefill="m", decode="m", prefill_started=2.0, decode_started=5.0)
    assert spans(whole) == {
        "queue": (1.0, 2.0),
        "prefill": (2.0, 4.0),
        "decode queue": (4.0, 5.0),
        "decode": (5.0, 6.0),
    }


def test_one_token():
    """Nothing is handed off or decoded."""
    assert spans(life([4.0], prefill_started=2.0)) == {"queue": (1.0, 2.0), "prefill": (2.0, 4.0)}


@pytest.mark.parametrize(
    ("tokens", "moments", "stage"),
    [
        ([], {}, StageName.QUEUE),
        ([], {"prefill_started": 2.0}, StageName.PREFILL),
        ([4.0], {"prefill_started": 2.0}, StageName.HANDOFF),
        (
            [4.0],
            {"prefill_started": 2.0, "handoff_started": 3.0, "handoff_ended": 5.0},
            StageName.DECODE_QUEUE,
        ),
        ([4.0, 6.0], SPLIT_LIFE, StageName.DECODE),
    ],
)
def test_a_request_that_is_alive(tokens, moments, stage):
    """The stage that it is in goes on; an abort cuts it."""
    alive = life(tokens, reason=None, **moments)
    assert stage_of(alive) is stage
    assert [each.name for each in stages_of(alive) if each.end_s is None] == [stage]
    alive.finish_reason = FinishReason.ABORT
    assert spans(alive, 9.0)[stage.value][1] == 9.0


def test_no_stage_ends_before_it_starts():
    """Two processes may see two moments in another order."""
    odd = life([4.0, 6.0], prefill_started=2.0, handoff_started=3.0, handoff_ended=5.5, decode_started=5.0)
    assert spans(odd)["decode queue"] == (5.5, 5.5)


def test_a_hand_off_that_waits_for_room():
    """From the first token on there is nothing else to wait for."""
    late = life([4.0, 8.0], prefill_started=2.0, handoff_started=6.0, handoff_ended=7.0, decode_started=7.5)
    assert spans(late)["hand-off"] == (4.0, 7.0)
