"""The flags of `twofold simulate` are converted to a cluster spec."""

import pytest

from twofold.cli.simulate.settings import SimulateSettings
from twofold.cli.simulate.spec import cluster_spec, parse_failure
from twofold.cluster.spec import InstanceFailure
from twofold.errors import ConfigurationError
from twofold.hardware.catalog import load_catalog
from twofold.instance import Role

LINE = "35xh100:prefill,5xh100:decode"


def spec(cluster=LINE, **flags):
    given = {"model": "bloom-176b"} | flags
    return cluster_spec(SimulateSettings(workload="azure-conv", cluster=cluster, **given), load_catalog())[0]


def test_reads_a_line_of_pools():
    made = spec()
    assert [(pool.machines, pool.role) for pool in made.pools] == [(35, Role.PREFILL), (5, Role.DECODE)]
    assert (made.model, made.max_num_batched_tokens, made.contention) == ("bloom-176b", 2048, True)


def test_flags_override_the_defaults():
    made = spec(
        max_num_batched_tokens=4096, pipeline_chunk=2048, contention=False, link_gb_per_s=25.0, fail=("decode-0@30",)
    )
    assert (made.max_num_batched_tokens, made.pipeline_chunk, made.contention) == (4096, 2048, False)
    assert made.link_bytes_per_s == 25e9
    assert made.failures == (InstanceFailure(instance="decode-0", at_s=30.0),)


def test_batchers_go_to_the_pools_of_their_roles():
    made = spec(batcher={Role.PREFILL: "prefill-balanced"})
    assert [pool.batcher for pool in made.pools] == ["prefill-balanced", None]


def test_flags_override_a_cluster_file(tmp_path):
    file = tmp_path / "cluster.yaml"
    file.write_text(
        "model: bloom-176b\npools:\n- {machines: 2, machine: dgx-h100, role: mixed}\nmax_num_batched_tokens: 1024\n"
    )
    made = spec(str(file), model=None, max_num_seqs=64)
    assert (made.model, made.max_num_batched_tokens, made.max_num_seqs, made.pools[0].role) == (
        *("bloom-176b", 1024, 64),
        Role.MIXED,
    )
    assert spec(str(file), model="llama2-70b").model == "llama2-70b"


@pytest.mark.parametrize(
    ("text", "at_s", "back_s"),
    [("decode-0@30", 30.0, None), ("decode-0@30+60", 30.0, 90.0), ("a@0.5+1e3", 0.5, 1000.5)],
)
def test_failures(text, at_s, back_s):
    """`--fail NAME@START` is a permanent failure of the instance NAME; `--fail NAME@START+DURATION` is temporary."""
    failure = parse_failure(text)
    assert (failure.at_s, failure.back_s) == (at_s, back_s)


@pytest.mark.parametrize(
    "text", ["", "decode-0", "@3", "decode-0@", "a@-1", "a@nan", "a@1+", "a@1+0", "a@1+inf", "a@b@c"]
)
def test_failures_that_cannot_be(text):
    """The error for an invalid `--fail` contains a valid example."""
    with pytest.raises(ConfigurationError, match="decode-0@30"):
        parse_failure(text)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"cluster": None}, "give --cluster"),
        ({"model": None}, "give --model"),
        ({"link_gb_per_s": 0.0}, "--link-gb-per-s 0 is out of range"),
        ({"link_gb_per_s": float("nan")}, "--link-gb-per-s nan is out of range"),
    ],
)
def test_flags_that_cannot_be(arguments, words):
    """`twofold simulate` rejects a missing cluster or model, and an invalid link bandwidth."""
    with pytest.raises(ConfigurationError, match=words):
        spec(**arguments)


@pytest.mark.parametrize("text", ["decode-0@1e300", "decode-0@1+1e300"])
def test_failures_beyond_all_time(text):
    with pytest.raises(ConfigurationError, match="not understood"):
        parse_failure(text)
