"""Where the torch engine computes in these tests: the CPU, or what TWOFOLD_TEST_DEVICE says (`make test-gpu`)."""

import os

DEVICE = os.environ.get("TWOFOLD_TEST_DEVICE", "cpu")
