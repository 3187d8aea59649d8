"""Journals of scheduling decisions."""

import msgspec

from twofold.events import PlacedRequest, Route
from twofold.request import Request
from twofold.route import PrefixFetch
from twofold.serving.telemetry.journal import ENCODER, Journal, read_journal


def test_a_full_disk_ends_the_journal_only(tmp_path, caplog):
    (tmp_path / "full.jsonl").symlink_to("/dev/full")
    journal = Journal(str(tmp_path), "full")
    for number in range(3):
        journal.write("arrive", {"number": number})
    assert [record.getMessage() for record in caplog.records] == [
        "the journal of full ends here: No space left on device"
    ]


def test_entries_round_trip(tmp_path):
    journal = Journal(str(tmp_path), "whole")
    journal.write("arrive", {"number": 1}, at=2.0)
    journal.write("ended", {}, result=[3], at=4.0)
    journal._file.close()
    entries = read_journal(tmp_path / "whole.jsonl")
    assert [(entry.at, entry.call, entry.args, entry.result) for entry in entries] == [
        (2.0, "arrive", {"number": 1}, None),
        (4.0, "ended", {}, [3]),
    ]


def test_reuse_and_fetches_of_routes_are_written():
    """In the journal, only routes that reuse or fetch a prefix have fields for prefix reuse and fetch."""
    request = Request(id="r", arrival_s=0.0, prompt_tokens=2048, output_tokens=2)
    plain = PlacedRequest(request, Route("p", "d"))
    assert msgspec.json.decode(ENCODER.encode(plain))["route"] == {"prefill": "p", "decode": "d", "moves": []}
    fetching = PlacedRequest(request, Route("p", "d", (), 1024, PrefixFetch("q", 2), 0.5))
    assert msgspec.json.decode(ENCODER.encode(fetching))["route"] == {
        "prefill": "p",
        "decode": "d",
        "moves": [],
        "reused_tokens": 1024,
        "fetch": {"source": "q", "blocks": 2},
    }
