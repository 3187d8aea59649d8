"""The secret salt of block keys, stored in a file."""

import stat

import pytest

from twofold.errors import ConfigurationError
from twofold.serving.store.disk import load_or_create_secret


def test_keeps_a_private_secret_by_directory(tmp_path):
    (tmp_path / "other").mkdir()
    secret = load_or_create_secret(tmp_path)
    assert len(secret) == 32
    assert load_or_create_secret(tmp_path) == secret
    assert load_or_create_secret(tmp_path / "other") != secret
    assert stat.S_IMODE((tmp_path / "secret").stat().st_mode) == 0o600


def test_replaces_a_truncated_secret(tmp_path):
    (tmp_path / "secret").write_bytes(b"short")
    assert len(load_or_create_secret(tmp_path)) == 32


def test_reports_a_missing_directory(tmp_path):
    with pytest.raises(ConfigurationError, match=r"cannot read or write .*nowhere/secret"):
        load_or_create_secret(tmp_path / "nowhere")
