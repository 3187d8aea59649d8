"""Constrained outputs of vLLM workers: valid, and the same split and colocated."""

import asyncio

import pytest

from serving.test_structured_output import check
from support.api_client import all_blocks_free
from support.structured import FIELDS


@pytest.mark.parametrize("kind", FIELDS)
def test_constrained_outputs_do_not_depend_on_the_split(kind, vllm_service):
    urls = [vllm_service("llama", *flags) for flags in (("--prefill", "1", "--decode", "1"), ("--colocated", "1"))]
    check(urls, kind)
    assert asyncio.run(all_blocks_free(urls[0]))
