"""Stages of a request: queue, prefill, hand-off, decode."""

import pytest

from support.timelines import SPLIT_MOMENTS, request_timeline
from twofold.request import FinishReason
from twofold.serving.telemetry.snapshot import StageName, stage_of, stages_of


def spans(timeline, ended_s=None):
    return {stage.name.value: (stage.start_s, stage.end_s) for stage in stages_of(timeline, ended_s)}


def test_a_split_request_has_five_stages():
    assert spans(request_timeline([4.0, 6.0, 7.0], **SPLIT_MOMENTS)) == {
        "queue": (1.0, 2.0),
        "prefill": (2.0, 4.0),
        "hand-off": (2.5, 4.5),
        "decode queue": (4.5, 5.0),
        "decode": (5.0, 7.0),
    }


def test_a_colocated_request_has_no_handoff():
    whole = request_timeline([4.0, 6.0], prefill="m", decode="m", prefill_started=2.0, decode_started=5.0)
    assert spans(whole) == {
        "queue": (1.0, 2.0),
        "prefill": (2.0, 4.0),
        "decode queue": (4.0, 5.0),
        "decode": (5.0, 6.0),
    }


def test_a_one_token_request_is_neither_handed_off_nor_decoded():
    assert spans(request_timeline([4.0], prefill_started=2.0)) == {"queue": (1.0, 2.0), "prefill": (2.0, 4.0)}


@pytest.mark.parametrize(
    ("tokens", "moments", "stage"),
    [
        ([], {}, StageName.QUEUE),
        ([], {"prefill_started": 2.0}, StageName.PREFILL),
        ([4.0], {"prefill_started": 2.0}, StageName.HANDOFF),
        ([4.0], {"prefill_started": 2.0, "handoff_started": 3.0, "handoff_ended": 5.0}, StageName.DECODE_QUEUE),
        ([4.0, 6.0], SPLIT_MOMENTS, StageName.DECODE),
    ],
)
def test_the_current_stage_is_open_until_an_abort(tokens, moments, stage):
    alive = request_timeline(tokens, reason=None, **moments)
    assert stage_of(alive) is stage
    assert [each.name for each in stages_of(alive) if each.end_s is None] == [stage]
    alive.finish_reason = FinishReason.ABORT
    assert spans(alive, 9.0)[stage.value][1] == 9.0


def test_no_stage_ends_before_it_starts():
    odd = request_timeline([4.0, 6.0], prefill_started=2.0, handoff_started=3.0, handoff_ended=5.5, decode_started=5.0)
    assert spans(odd)["decode queue"] == (5.5, 5.5)


def test_a_waiting_handoff_starts_with_the_first_token():
    late = request_timeline([4.0, 8.0], prefill_started=2.0, handoff_started=6.0, handoff_ended=7.0, decode_started=7.5)
    assert spans(late)["hand-off"] == (4.0, 7.0)
