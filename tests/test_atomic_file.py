"""The output file of an observer is either complete or absent."""

import gc

import pytest

from twofold.atomic_file import AtomicFile
from twofold.errors import ConfigurationError


def test_commit_renames_the_file(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"earlier")
    file = AtomicFile(path)
    file.write(b"whole")
    assert path.read_bytes() == b"earlier"
    file.commit()
    assert path.read_bytes() == b"whole"
    assert list(tmp_path.iterdir()) == [path]


def test_uncommitted_files_are_deleted(tmp_path):
    file = AtomicFile(tmp_path / "log")
    file.write(b"half")
    assert len(list(tmp_path.iterdir())) == 1
    del file
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_rejects_unwritable_paths(tmp_path):
    with pytest.raises(ConfigurationError, match="is a directory: name a file in it"):
        AtomicFile(tmp_path)
    with pytest.raises(ConfigurationError, match=r"gone/log cannot be written: No such file or directory"):
        AtomicFile(tmp_path / "gone" / "log")


def test_reports_a_full_disk():
    file = AtomicFile("/dev/full")
    file.write(b"a line")
    with pytest.raises(ConfigurationError, match=r"^/dev/full cannot be written: No space left on device$"):
        file.commit()


def test_a_name_that_is_taken_meanwhile_is_refused(tmp_path):
    """If the target path has become a directory, `commit` fails and leaves no file."""
    file = AtomicFile(tmp_path / "log")
    (tmp_path / "log").mkdir()
    with pytest.raises(ConfigurationError, match="cannot be written"):
        file.commit()
    assert list(tmp_path.iterdir()) == [tmp_path / "log"]
