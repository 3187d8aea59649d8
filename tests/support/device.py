"""The device of the torch engine in tests: TWOFOLD_TEST_DEVICE if set, otherwise the CPU."""

import os

DEVICE = os.environ.get("TWOFOLD_TEST_DEVICE", "cpu")
