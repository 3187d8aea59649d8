"""Parts that the comparison scripts share: model, progress messages and exit status."""

import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, TypeVar

from compared import TWOFOLD

from twofold.errors import UserError

T = TypeVar("T")


def say(what: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {what}", flush=True)


def model_directory(model: Path | None, folder: Path, *flags: str) -> Path:
    """Return the directory `model`; if it is None, that of a small model in `folder`, which is created if missing."""
    if model is not None:
        return model
    model = folder / "model"
    if not model.exists():
        subprocess.run([*TWOFOLD, "model", "create", str(model), *flags], check=True)
    return model


def run_and_exit(
    name: str, run: Callable[[Path], tuple[T, list[str]]], show: Callable[[T], None], keep: Path | None = None
) -> NoReturn:
    """Call `run` in a folder, print its result and its failed checks, and end the process.

    The folder is `keep`, or a temporary one if `keep` is None.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwind the stack to stop the processes
    with tempfile.TemporaryDirectory(prefix=f"twofold-{name}-") as folder:
        chosen = keep or Path(folder)
        chosen.mkdir(parents=True, exist_ok=True)
        try:
            report, wrong = run(chosen)
        except UserError as error:
            sys.exit(f"{error}")
    show(report)
    for each in wrong:
        print(f"✗ {each}")
    sys.exit(1 if wrong else 0)
