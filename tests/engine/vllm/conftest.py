"""Import vLLM once and suppress its import warnings. If vLLM is not installed, skip the tests that need it."""

import warnings
from importlib.util import find_spec

WITH_VLLM = ["test_cache.py", "test_options.py", "test_prompt_blocks.py", "test_sampling.py"]
collect_ignore = [] if find_spec("vllm") else WITH_VLLM
if find_spec("vllm"):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import twofold.engine.vllm.core  # noqa: F401
