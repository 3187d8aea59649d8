"""Writing of traces in all formats."""

import gzip
import tempfile
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.traces import ask, public_trace, request_lists
from twofold.errors import ConfigurationError
from twofold.kvcache.prefix import prefix_keys
from twofold.workload.trace import FORMATS, open_trace, write_trace

BLOCKS = st.lists(st.integers(0, 2**64), max_size=5)
CSV_IDS = st.text().filter(lambda text: text.isprintable() and text == text.strip())


def round_trip(requests, name):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace"
        written = write_trace(requests, path, FORMATS[name])
        return written, list(open_trace(path, name))


@given(request_lists(ids=st.text(), blocks=BLOCKS))
def test_twofold_format_is_lossless(requests):
    written, back = round_trip(requests, "twofold")
    assert back == requests
    assert written.losses(FORMATS["twofold"]) == []


@given(request_lists(ids=CSV_IDS))
def test_splitwise_keeps_all_but_prefix_blocks(requests):
    """Requests that have no prefix blocks are unchanged after being written and read in the `splitwise` format."""
    assert round_trip(requests, "splitwise")[1] == requests


@given(request_lists())
def test_azure_keeps_lengths_and_times_to_100_ns(requests):
    _, back = round_trip(requests, "azure")
    times = [request.arrival_s for request in back]
    assert times == pytest.approx([request.arrival_s for request in requests], abs=0.6e-7)
    assert [msgspec.structs.replace(request, arrival_s=0.0) for request in back] == [
        msgspec.structs.replace(request, arrival_s=0.0) for request in requests
    ]


@given(request_lists(blocks=BLOCKS))
def test_mooncake_keeps_blocks_and_times_to_a_millisecond(requests):
    _, back = round_trip(requests, "mooncake")
    for before, after in zip(requests, back, strict=True):
        assert after == msgspec.structs.replace(before, arrival_s=round(before.arrival_s * 1000) / 1000)


@pytest.mark.parametrize(
    ("trace", "name"), [("azure-2023-code.csv", "azure"), ("mooncake-conversation.jsonl", "mooncake")]
)
def test_public_traces_round_trip_in_their_own_format(trace, name, tmp_path):
    requests = list(open_trace(public_trace(trace)))
    assert write_trace(requests, tmp_path / "out", FORMATS[name]).losses(FORMATS[name]) == []
    assert list(open_trace(tmp_path / "out")) == requests


def test_losses_are_reported_with_counts(tmp_path):
    requests = [ask("x", 0.0, prefix_blocks=(1,)), ask(1, 0.0005)]
    azure, mooncake = (
        write_trace(requests, tmp_path / name, FORMATS[name]).losses(FORMATS[name]) for name in ("azure", "mooncake")
    )
    assert azure == [
        "the azure format has no prefix blocks: 1 requests lost theirs",
        "the azure format has no request ids: 1 became row numbers",
    ]
    assert mooncake == [
        "the mooncake format has no request ids: 1 became row numbers",
        "the mooncake format has times in steps of 1 ms: 1 were rounded",
    ]


def test_failure_keeps_the_existing_file(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text("before")

    def failing():
        yield ask()
        raise ConfigurationError("halfway")

    with pytest.raises(ConfigurationError, match="halfway"):
        write_trace(failing(), path, FORMATS["twofold"])
    assert [file.name for file in tmp_path.iterdir()] == ["trace.jsonl"]
    assert path.read_text() == "before"


def test_gz_output_is_compressed_and_reproducible(tmp_path):
    """Equal traces give equal compressed files, because the gzip header has no timestamp."""
    one, two = tmp_path / "one.jsonl.gz", tmp_path / "two.jsonl.gz"
    for path in (one, two):
        write_trace([ask()], path, FORMATS["twofold"])
    assert one.read_bytes() == two.read_bytes()
    assert gzip.decompress(one.read_bytes()).startswith(b'{"id":"0"')
    assert list(open_trace(one)) == [ask()]


def test_symlinks_are_followed(tmp_path):
    """Writing to a symlink replaces the target file and keeps the symlink."""
    (tmp_path / "real").write_text("before")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write_trace([ask()], tmp_path / "link", FORMATS["twofold"])
    assert (tmp_path / "link").is_symlink()
    assert list(open_trace(tmp_path / "real")) == [ask()]


def test_devices_are_written_in_place():
    assert write_trace([ask()], "/dev/null", FORMATS["twofold"]).requests == 1
    assert Path("/dev/null").is_char_device()


@pytest.mark.parametrize(
    ("place", "request_", "name"),
    [
        ("no/such/folder", ask(), "twofold"),
        (".", ask(), "twofold"),
        ("x" * 300, ask(), "twofold"),
        ("out", ask("a\nb"), "splitwise"),
        ("out", ask(0, 1e15), "azure"),
    ],
)
def test_rejects_unwritable_paths_and_requests(tmp_path, place, request_, name):
    with pytest.raises(ConfigurationError):
        write_trace([request_], tmp_path / place, FORMATS[name])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["mooncake", "twofold"])
def test_block_hashes_are_written_as_numbers(name):
    keys = tuple(prefix_keys(range(8), 2))
    blocks = [
        request.prefix_blocks
        for request in round_trip([ask(0, prefix_blocks=keys), ask(1, prefix_blocks=keys[:2])], name)[1]
    ]
    assert blocks[1] == blocks[0][:2]
    assert len(set(blocks[0])) == 4
