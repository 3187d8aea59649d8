"""The cluster key and its file."""

import os
import stat

import pytest

from twofold.errors import ConfigurationError
from twofold.security.key import ClusterKey, read_key, write_key


def test_a_written_key_can_be_read_by_its_owner_only(tmp_path):
    file = tmp_path / "key"
    write_key(file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    one, other = read_key(file), read_key(file)
    assert (one.server_secret, one.client_secret) == (other.server_secret, other.client_secret)
    assert one.server_secret != one.client_secret


def test_keys_are_random(tmp_path):
    write_key(tmp_path / "a")
    write_key(tmp_path / "b")
    assert read_key(tmp_path / "a").server_secret != read_key(tmp_path / "b").server_secret


def test_does_not_overwrite_a_key(tmp_path):
    file = tmp_path / "key"
    write_key(file)
    before = file.read_text()
    with pytest.raises(ConfigurationError, match="already exists"):
        write_key(file)
    assert file.read_text() == before


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o660, 0o601])
def test_rejects_a_file_with_open_permissions(tmp_path, mode):
    file = tmp_path / "key"
    write_key(file)
    file.chmod(mode)
    with pytest.raises(ConfigurationError, match=f"chmod 600 {file}"):
        read_key(file)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_rejects_a_file_of_another_user(tmp_path):
    file = tmp_path / "key"
    write_key(file)
    os.chown(file, 12345, 12345)
    with pytest.raises(ConfigurationError, match="belongs to another user"):
        read_key(file)


@pytest.mark.parametrize("content", ["", "# only a comment\n", "deadbeef\n", "z" * 64, "00" * 33, "\xff" * 64])
def test_rejects_an_invalid_key_without_quoting_it(tmp_path, content):
    file = tmp_path / "key"
    file.write_bytes(content.encode("latin-1"))
    file.chmod(0o600)
    with pytest.raises(ConfigurationError, match="twofold keygen") as caught:
        read_key(file)
    error, secret = caught.value, content.strip()
    assert not secret or secret not in f"{error} {error.__cause__}"


def test_reports_missing_files(tmp_path):
    with pytest.raises(ConfigurationError, match=r"cannot read .*: No such file"):
        read_key(tmp_path / "none")
    with pytest.raises(ConfigurationError, match="cannot write"):
        write_key(tmp_path / "none" / "key")


def test_repr_hides_the_key():
    key = ClusterKey(b"\x01" * 32)
    assert key.server_secret.hex() not in repr(key)
    assert "01" not in repr(key)
