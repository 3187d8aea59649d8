"""The cluster key and its file: nobody else reads it, and nothing repeats it."""

import os
import stat

import pytest

from twofold.errors import ConfigurationError
from twofold.security.key import ClusterKey, read_key, write_key


def test_what_is_written_is_read(tmp_path):
    """And only its owner may."""
    file = tmp_path / "key"
    write_key(file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    one, other = read_key(file), read_key(file)
    assert (one.server_secret, one.client_secret) == (other.server_secret, other.client_secret)
    assert one.server_secret != one.client_secret


def test_no_two_are_the_same(tmp_path):
    """They are drawn, not derived from anything."""
    write_key(tmp_path / "a")
    write_key(tmp_path / "b")
    assert read_key(tmp_path / "a").server_secret != read_key(tmp_path / "b").server_secret


def test_a_key_is_never_written_over(tmp_path):
    """Hosts that have it would be shut out."""
    file = tmp_path / "key"
    write_key(file)
    before = file.read_text()
    with pytest.raises(ConfigurationError, match="already exists"):
        write_key(file)
    assert file.read_text() == before


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o660, 0o601])
def test_a_file_that_is_open_to_others_is_refused(tmp_path, mode):
    """In one sentence that says what to do."""
    file = tmp_path / "key"
    write_key(file)
    file.chmod(mode)
    with pytest.raises(ConfigurationError, match=f"chmod 600 {file}"):
        read_key(file)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_file_of_somebody_else_is_refused(tmp_path):
    """Its owner may change it at any time."""
    file = tmp_path / "key"
    write_key(file)
    os.chown(file, 12345, 12345)
    with pytest.raises(ConfigurationError, match="belongs to another user"):
        read_key(file)


@pytest.mark.parametrize(
    "content", ["", "# only a comment\n", "deadbeef\n", "z" * 64, "00" * 33, "\xff" * 64]
)
def test_what_is_no_key_is_refused_and_not_quoted(tmp_path, content):
    """It may be a key with a mistake in it."""
    file = tmp_path / "key"
    file.write_bytes(content.encode("latin-1"))
    file.chmod(0o600)
    with pytest.raises(ConfigurationError, match="twofold keygen") as caught:
        read_key(file)
    error, secret = caught.value, content.strip()
    assert not secret or secret not in f"{error} {error.__cause__}"


def test_a_file_that_is_not_there_is_one_sentence(tmp_path):
    """As every mistake in a flag."""
    with pytest.raises(ConfigurationError, match=r"cannot read .*: No such file"):
        read_key(tmp_path / "none")
    with pytest.raises(ConfigurationError, match="cannot write"):
        write_key(tmp_path / "none" / "key")


def test_no_representation_shows_it():
    """Values end up in logs and tracebacks."""
    key = ClusterKey(b"\x01" * 32)
    assert key.server_secret.hex() not in repr(key)
    assert "01" not in repr(key)
