"""Keeps transformers' progress bars off the terminal; they would also leave a thread behind."""

from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """No progress bars of transformers inside; afterwards they are as they were."""
    shown = is_progress_bar_enabled()
    disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            enable_progress_bar()
