"""The commands in README and documentation: all have flags that exist, and those of the guides run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.documented import command_blocks
from twofold.cli.main import load

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
POLICY = ROOT / "docs/how-to/add-a-policy.md"  # which tests/cli/test_added_policies.py follows
GUIDES = sorted({*(ROOT / "docs/get-started").glob("*.md"), *(ROOT / "docs/how-to").glob("*.md")} - {POLICY})
# Of a service, another host or a package index; the tests of the services run these commands.
ELSEWHERE = ("serve", "route", "chat", "bench", "characterize", "verify", "pools", "join", "model", "torture")


def parsed():
    for page in PAGES:
        for block in command_blocks(page):
            for words in block.commands():
                yield pytest.param(words, id=f"{page.relative_to(ROOT)}: {' '.join(words)[:60]}")


def runnable():
    for page in GUIDES:
        blocks = [block for block in command_blocks(page) if _runs_here(block)]
        if blocks:
            yield pytest.param(blocks, id=str(page.relative_to(ROOT)))


def _runs_here(block):
    commands = list(block.commands())
    return bool(commands or block.text.startswith("for ")) and not any(words[1] in ELSEWHERE for words in commands)


@pytest.mark.parametrize("words", list(parsed()))
def test_every_command_has_flags_that_exist(words):
    ours = words[2 : words.index("--")] if "--" in words else words[2:]  # the rest are flags of the engine
    given = [each for each in ours if each not in {"…", "..."}]
    command = load(words[1])
    while given and given[0] in getattr(command, "commands", {}):
        command = command.commands[given.pop(0)]
    known = {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
    flags = {each.partition("=")[0] for each in given if each.startswith("-") and not each.lstrip("-").isdigit()}
    assert flags <= known


@pytest.mark.parametrize("blocks", list(runnable()))
def test_the_commands_of_a_guide_run(blocks, tmp_path):
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for block in blocks:
        ended = subprocess.run(
            ["bash", "-ec", block.shortened()],
            cwd=tmp_path,
            env=os.environ | {"PATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == 0, f"{block.text}\n{ended.stderr}"
