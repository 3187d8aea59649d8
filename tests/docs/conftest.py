"""Fixtures of the tests that run the commands of pages."""

import os
import subprocess
import sys

import pytest

from support.page_commands import SharedServices

TINY = "--hidden-size 64 --layers 4 --heads 4 --kv-heads 2 --vocab-size 2048"


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Return the environment of commands, with the `twofold` of this interpreter first on the path."""
    programs = tmp_path_factory.mktemp("bin")
    program = programs / "twofold"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m twofold.cli.main "$@"\n')
    program.chmod(0o755)
    return os.environ | {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}


@pytest.fixture(scope="module")
def model(environment, tmp_path_factory):
    """Return the directory of a small model, with the name of the model that the guides download."""
    directory = tmp_path_factory.mktemp("models") / "smollm2"
    subprocess.run(["bash", "-ec", f"twofold model create {directory} {TINY}"], env=environment, check=True)
    return directory


@pytest.fixture(scope="module")
def shared():
    """Return the services that pages share; they end after the last page."""
    services = SharedServices()
    yield services
    services.close()
