"""Profiles of measured prefill and decode times: parsing, and removal of contradictory rows."""

import os

import pytest

from twofold.errors import ConfigurationError
from twofold.performance.fitting.profile import (
    ProfileRow,
    consistent_batches,
    date_of,
    decode_power,
    group_batches,
    read_profile,
)

HEADER = "model,hardware,tensor_parallel,prompt_size,batch_size,token_size,prompt_time,token_time"


def row(prompt=512, batch=1, prompt_time=100.0, token_time=40.0, **more):
    return ProfileRow(
        model="m",
        hardware="h",
        tensor_parallel=1,
        prompt_size=prompt,
        batch_size=batch,
        token_size=more.pop("token_size", 128),
        prompt_time=prompt_time,
        token_time=token_time,
        **more,
    )


def test_reads_rows_with_and_without_optional_columns(tmp_path):
    path = tmp_path / "p.csv"
    path.write_text(f"{HEADER},average_power,other\nm,h,8,512,2,128,100.5,40.25,,x\n", encoding="utf-8")
    (read,) = read_profile(path)
    assert (read.pair, read.prompt_time, read.average_power) == (("m", "h", 8), 100.5, None)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("model,hardware\nm,h\n", "lacks the columns tensor_parallel, prompt_size"),
        ("", "lacks the columns model"),
        (f"{HEADER}\nm,h,8,512,2,128,fast,40\n", r"p\.csv:2: .*prompt_time"),
        (f"{HEADER}\nm,h,8,512,2,128,1.5,40\nm,h,8,51.5,2,128,1,40\n", r"p\.csv:3: .*prompt_size"),
        (f"{HEADER}\nm,h,8,512\n", r"p\.csv:2: .*batch_size"),
    ],
)
def test_errors_name_file_line_and_column(tmp_path, text, says):
    path = tmp_path / "p.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigurationError, match=says):
        read_profile(path)


def test_rejects_missing_and_binary_files(tmp_path):
    with pytest.raises(ConfigurationError, match="cannot read profile"):
        read_profile(tmp_path / "none.csv")
    (tmp_path / "b.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigurationError, match="not a csv"):
        read_profile(tmp_path / "b.csv")


def test_early_ends_shorten_the_mean_context():
    assert row(token_size=128).mean_context == 512 + 64
    # An E2E time too short for all output tokens means that generation ended early.
    assert row(token_size=128, e2e_time=1100.0).mean_context == 512 + 13
    assert row(token_size=128, e2e_time=1e6, batch=2).mean_context == 2 * (512 + 64)


def test_takes_medians_of_repeated_runs():
    (one,) = group_batches([row(prompt_time=time) for time in (100.0, 101.0, 900.0)])
    assert one.prompt_time == 101.0


def test_drops_batches_that_contradict_most_others():
    rows = [
        row(128, 1, 50.0),
        row(256, 1, 45.0),
        row(512, 1, 100.0),
        row(512, 8, 800.0),
        row(512, 16, 1600.0),
        row(512, 64, 90.0),
        row(512, 64, 90.0),
    ]
    kept, dropped = consistent_batches(rows)
    assert [one.prefill_tokens for one in kept] == [128, 256, 512, 4096, 8192]
    assert [each.startswith("2 rows: prompt_size 512, batch_size 64") for each in dropped] == [True]


def test_the_date_is_that_of_the_latest_row(tmp_path):
    """If no row has a date, the profile has the date of its file."""
    path = tmp_path / "p.csv"
    path.touch()
    os.utime(path, (86_400, 86_400))
    assert date_of(path, [row(date="2026-01-02"), row(date="2026-03-04"), row()]) == "2026-03-04"
    assert date_of(path, [row()]) == "1970-01-02"


def test_drops_rows_without_times():
    rows = [row(), row(prompt_time=0.0), row(prompt_time=0.0, token_time=0.0), row(token_time=float("nan"))]
    kept, dropped = consistent_batches(rows)
    assert len(kept[0].rows) == 2
    assert dropped == ["2 rows: sizes or times that are not above 0"]


def test_decode_power_uses_single_sequences_with_short_prompts():
    rows = [row(average_power=0.6), row(average_power=0.0), row(8192, average_power=0.2)]
    assert decode_power(group_batches([*rows, row(batch=4, average_power=0.9)])) == 0.6
    assert decode_power(group_batches([row()])) is None


def test_drops_the_invalid_rows_of_the_splitwise_profile(profile_path):
    rows = read_profile(profile_path)
    dropped = {
        pair: consistent_batches([one for one in rows if one.pair == pair])[1] for pair in {one.pair for one in rows}
    }
    assert {pair for pair, reasons in dropped.items() if reasons} == {
        ("llama2-70b", hardware, 2) for hardware in ("a100-80gb", "h100-80gb", "h100-80gb-pcap")
    }
    assert all(reason.startswith("5 rows") for reasons in dropped.values() for reason in reasons)


def test_ignores_infinite_power():
    (kept,), _ = consistent_batches([row(average_power=float("inf"))])
    assert decode_power([kept]) is None
