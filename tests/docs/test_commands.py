"""Commands of README and documentation: flags and values are parsed, and those that cannot run here are listed."""

import inspect
import json
import re
from pathlib import Path
from typing import get_type_hints

import pytest

from support.documented import PAGES, ROOT, runs
from support.page_commands import ELSEWHERE, elsewhere
from twofold.cli.main import load
from twofold.cli.settings import settings_of

STATEMENTS = [statement for page in PAGES for statement in page.statements]
COMMANDS = [
    pytest.param(words, statement, id=f"{statement.page.relative_to(ROOT)}: {' '.join(words)[:60]}")
    for statement in STATEMENTS
    for words in statement.commands()
    if words[1] != "--version"
]


def found(words):
    """Return the command that the words name, and its arguments."""
    ours = words[1 : words.index("--")] if "--" in words else words[1:]
    if "--" in words:  # the rest are flags of the engine
        ours += ["--engine-args", json.dumps(words[words.index("--") + 1 :])]
    given = [each for each in ours if each not in {"…", "..."}]
    command = load(given.pop(0))
    while given and given[0] in getattr(command, "commands", {}):
        command = command.commands[given.pop(0)]
    return command, given


@pytest.mark.parametrize(("words", "statement"), COMMANDS)
def test_every_command_has_flags_that_exist(words, statement):
    command, given = found(words)
    known = {name for each in command.params for name in (*each.opts, *each.secondary_opts)} | {"--help"}
    flags = {each.partition("=")[0] for each in given if each.startswith("-") and not each.lstrip("-").isdigit()}
    assert flags <= known


@pytest.mark.parametrize(
    ("words", "statement"), [each for each in COMMANDS if runs(each.values[1]) and elsewhere(each.values[1])]
)
def test_a_command_that_cannot_run_here_has_valid_settings(words, statement, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "options.yaml").write_text("max_num_seqs: 256\n")
    command, given = found([{"by-length": "jsq", "$router": "jsq"}.get(word, word) for word in words])
    context = command.make_context(command.name, list(given))
    del context.params["config"]
    kind = next(iter(get_type_hints(inspect.unwrap(command.callback)).values()))
    settings_of(kind, context.params)


@pytest.mark.parametrize("pattern", ELSEWHERE)
def test_every_exception_occurs_in_the_documentation(pattern):
    assert any(re.search(pattern, statement.text) for statement in STATEMENTS)


@pytest.mark.parametrize("text", sorted({it.text for it in STATEMENTS if it.program == "make"}))
def test_every_make_target_exists(text):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert text.split()[1] in targets


def test_every_program_is_run_or_listed():
    known = {"twofold", "make", "for"}
    others = [it for it in STATEMENTS if it.program not in known and not it.python and not it.benchmark]
    assert [it.text for it in others if not elsewhere(it)] == []


def test_pages_are_found():
    assert Path("README.md") in {page.path.relative_to(ROOT) for page in PAGES}
    assert len(STATEMENTS) > 200
