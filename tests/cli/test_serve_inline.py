"""`twofold serve --inline-tbt`: what it takes, and what it refuses in one sentence."""

from pathlib import Path

import pytest

from support.hosts import TIMES
from twofold.cli.serve.config import service_of
from twofold.cli.serve_flags import Flags
from twofold.errors import ConfigurationError


def flags(model, host, **changed):
    given = {"model": str(model), "colocated": 1, "inline_tbt": 0.1, "profile": host}
    return Flags(**(given | changed))


def test_workers_go_by_the_times_of_the_profile(model, host):
    """Of a host on which nothing else computes; by those of a busy one where there are more workers."""
    config = service_of(flags(model, host))
    assert {worker.batcher for worker in config.workers} == {"inlined"}
    assert config.inline.times == TIMES
    assert config.inline.tbt_s == 0.1
    assert service_of(flags(model, host, colocated=2)).inline.times == TIMES.slower(1.0, 1.0)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"colocated": None}, "give --colocated N"),
        ({"profile": None}, "--inline-tbt needs to know how fast workers are"),
        ({"tp": 2}, "leave out --tp and --pp"),
        ({"swap_space": 1 << 20}, "--swap-space excludes --inline-tbt"),
        ({"journal": Path("journal")}, "--journal excludes --inline-tbt"),
        ({"enable_chunked_prefill": True}, "--enable-chunked-prefill excludes --inline-tbt"),
    ],
)
def test_what_cannot_be_is_refused(model, host, tmp_path, monkeypatch, changed, reason):
    """In a sentence that says what would be right."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match=reason):
        service_of(flags(model, host, **changed))
