"""The Parquet table of requests."""

import gc

import pytest

from support.observed import completed, refused, report_run
from twofold.errors import ConfigurationError
from twofold.simulation.observers.files import ROWS_PER_GROUP, ParquetTable

parquet = pytest.importorskip("pyarrow.parquet")


def test_rows_equal_the_timelines(tmp_path):
    path = tmp_path / "requests.parquet"
    report_run(ParquetTable(path))
    nothing = dict.fromkeys(["ttft_s", "tpot_s", "e2e_s", "queue_prefill_s", "prefill_s", "transfer_s"])
    nothing |= dict.fromkeys(["visible_transfer_s", "queue_decode_s", "prefill_instance", "decode_instance"])
    first, second = parquet.read_table(path).to_pylist()
    assert first == nothing | {
        "id": "chat-2",
        "arrival_s": 0.5,
        "prompt_tokens": 9,
        "output_tokens": 0,
        "finish_reason": "error",
        "preemptions": 0,
    }
    assert second == {
        "id": "chat-1",
        "arrival_s": 0.25,
        "prompt_tokens": 1_204,
        "output_tokens": 5,
        "finish_reason": "length",
        "ttft_s": 0.5,
        "tpot_s": 0.125,
        "e2e_s": 1.0,
        "queue_prefill_s": 0.125,
        "prefill_s": 0.375,
        "transfer_s": 0.3125,
        "visible_transfer_s": 0.0625,
        "queue_decode_s": 0.0625,
        "prefill_instance": "prefill-0",
        "decode_instance": "decode-0",
        "preemptions": 2,
    }


def test_rows_are_written_in_groups(tmp_path):
    """Rows are written in order of completion, in row groups of 10,000."""
    path, rows = tmp_path / "requests.parquet", 2 * ROWS_PER_GROUP + 1
    table = ParquetTable(path)
    for i in range(rows):
        table.ended(refused(str(i)), 0.0)
    assert len(table._rows) == 1
    table.close(0)
    file = parquet.ParquetFile(path)
    assert [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)] == [10_000, 10_000, 1]
    assert file.read(["id"])["id"].to_pylist() == [str(i) for i in range(rows)]


def test_a_run_without_requests_gives_a_table_without_rows(tmp_path):
    ParquetTable(tmp_path / "none.parquet").close(0)
    assert parquet.read_table(tmp_path / "none.parquet").num_rows == 0
    assert len(parquet.read_schema(tmp_path / "none.parquet").names) == 16


def test_a_broken_run_leaves_no_file(tmp_path):
    table = ParquetTable(tmp_path / "requests.parquet")
    for _ in range(ROWS_PER_GROUP):
        table.ended(completed(), 0.0)
    del table
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_rejects_unwritable_paths(tmp_path):
    with pytest.raises(ConfigurationError, match=r"gone/t.parquet cannot be written: No such file or directory"):
        ParquetTable(tmp_path / "gone" / "t.parquet")
