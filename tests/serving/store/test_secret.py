"""The secret of a service's keys: drawn once for a directory."""

import stat

import pytest

from twofold.errors import ConfigurationError
from twofold.serving.store.disk import load_or_create_secret


def test_it_is_kept(tmp_path):
    """The next start has the same, another directory another, and nobody else may read it."""
    (tmp_path / "other").mkdir()
    secret = load_or_create_secret(tmp_path)
    assert len(secret) == 32
    assert load_or_create_secret(tmp_path) == secret
    assert load_or_create_secret(tmp_path / "other") != secret
    assert stat.S_IMODE((tmp_path / "secret").stat().st_mode) == 0o600


def test_half_a_secret_is_none(tmp_path):
    """What was cut off is drawn anew."""
    (tmp_path / "secret").write_bytes(b"short")
    assert len(load_or_create_secret(tmp_path)) == 32


def test_a_directory_that_is_none(tmp_path):
    """One sentence says where it should have been."""
    with pytest.raises(ConfigurationError, match=r"cannot read or write .*nowhere/secret"):
        load_or_create_secret(tmp_path / "nowhere")
