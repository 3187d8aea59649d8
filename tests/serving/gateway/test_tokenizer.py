"""Loading tokenizers."""

import subprocess
import sys

import pytest
from tokenizers import Tokenizer

from support.tokenizers_for_tests import byte_fallback_dir, byte_level_dir
from twofold.errors import ModelError, RequestError
from twofold.serving.gateway.tokenizer import load_tokenizer

PROBE = """
import sys
from pathlib import Path
import twofold.serving.gateway.app, twofold.serving.gateway.server
from twofold.serving.gateway.tokenizer import load_tokenizer
message = {"role": "user", "content": "hi"}
text = load_tokenizer(Path(sys.argv[1])).render_chat([message], add_generation_prompt=True, template_kwargs={})
assert text == "<|user|>hi</s><|assistant|>", text
sys.exit("torch" in sys.modules)
"""


def test_gateway_and_tokenizer_do_not_import_torch():
    subprocess.run([sys.executable, "-c", PROBE, byte_level_dir()], check=True)


def test_a_missing_tokenizer_is_no_error(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert load_tokenizer(tmp_path) is None


def test_a_broken_tokenizer_error_names_the_directory(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=str(tmp_path)):
        load_tokenizer(tmp_path)


def test_disables_truncation(tmp_path):
    """A tokenizer that was saved with truncation and padding encodes whole prompts."""
    tokenizer = Tokenizer.from_file(str(byte_level_dir() / "tokenizer.json"))
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert len(load_tokenizer(tmp_path).backend.encode("a b c d").ids) == 6


def test_a_missing_chat_template_points_to_completions():
    tokenizer = load_tokenizer(byte_fallback_dir())
    with pytest.raises(RequestError, match="/v1/completions"):
        tokenizer.render_chat([], add_generation_prompt=True, template_kwargs={})
