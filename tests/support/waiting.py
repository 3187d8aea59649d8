"""Wait for a condition."""

import time


def until(true, tries=6000, pause_s=0.1):
    """Call a function until its result is true, and return the result."""
    for _ in range(tries):
        found = true()
        if found:
            return found
        time.sleep(pause_s)
    raise AssertionError(f"timeout waiting for {true}")
