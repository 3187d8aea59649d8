"""Fingerprints of model directories."""

import json

import pytest

from twofold.serving.launch.model_source import model_fingerprint

WEIGHTS = bytes(range(256)) * 8192  # 2 MiB


def write(folder, weights=WEIGHTS, **config):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"layers": 2} | config))
    (folder / "model.safetensors").write_bytes(weights)
    return folder


def test_the_fingerprint_does_not_depend_on_the_directory(tmp_path):
    one, other = write(tmp_path / "a"), write(tmp_path / "b")
    (other / "README.md").write_text("words")
    assert model_fingerprint(one) == model_fingerprint(other)


@pytest.mark.parametrize(
    "changes",
    [
        {"layers": 3},
        {"weights": WEIGHTS + b"\0"},
        {"weights": b"\1" + WEIGHTS[1:]},
        {"weights": bytes(byte ^ 1 for byte in WEIGHTS)},
    ],
)
def test_different_weights_or_shapes_have_different_fingerprints(tmp_path, changes):
    assert model_fingerprint(write(tmp_path / "a")) != model_fingerprint(write(tmp_path / "b", **changes))
