"""Import vLLM without its warnings, and skip the tests that need it if it is not installed."""

from importlib.util import find_spec

import engine.vllm.conftest  # noqa: F401  (imports vLLM)

collect_ignore = [] if find_spec("vllm") else ["test_split.py"]
