"""Constrained outputs of vLLM workers: valid, and the same split and colocated."""

import pytest

from serving.test_structured_output import check
from support.structured import FIELDS


@pytest.mark.covers(engine="vllm", model="llama", feature="structured")
@pytest.mark.parametrize("kind", FIELDS)
def test_constrained_outputs_do_not_depend_on_the_split(kind, vllm_service):
    ways = (("--prefill", "1", "--decode", "1"), ("--colocated", "1"))
    check((vllm_service("llama", *flags) for flags in ways), kind)
