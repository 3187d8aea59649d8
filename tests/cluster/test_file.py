"""Cluster files: parsing, validation and writing."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.clusters import dump_cluster
from twofold.cluster.file import load_cluster, parse_cluster, read_cluster
from twofold.cluster.spec import ClusterSpec, InstanceFailure, PoolSpec
from twofold.errors import ConfigurationError
from twofold.hardware.catalog import load_catalog
from twofold.instance import Role
from twofold.scheduling.batchers import BATCHERS

CATALOG = load_catalog()
YAML = """
model: bloom-176b
pools:
  - {machines: 35, machine: h100, role: prefill}
  - {machines: 5, machine: dgx-a100, role: decode, tensor_parallel: 4}
"""


def pool(machines, machine, role, **more):
    return PoolSpec(machines=machines, machine=machine, role=Role(role), **more)


@pytest.mark.parametrize(
    ("text", "pools"),
    [
        ("35xh100:prefill,5xh100:decode", (pool(35, "dgx-h100", "prefill"), pool(5, "dgx-h100", "decode"))),
        ("40xh100", (pool(40, "dgx-h100", "mixed"),)),
        ("40xh100:mixed", (pool(40, "dgx-h100", "mixed"),)),
        ("4×h100@2×TP4:decode", (pool(4, "dgx-h100", "decode", tensor_parallel=4),)),
        ("4xh100@TP2×PP4:decode", (pool(4, "dgx-h100", "decode", tensor_parallel=2, pipeline_parallel=4),)),
        ("1xdgx-a100:MIXED/chunked-prefill", (pool(1, "dgx-a100", "mixed", batcher="chunked-prefill"),)),
        ("4xdgx-a100@2x4:prefill", (pool(4, "dgx-a100", "prefill", tensor_parallel=2, pipeline_parallel=4),)),
        ("2xh200@1ep8", (pool(2, "dgx-h200", "mixed", tensor_parallel=1, expert_parallel=8),)),
        (
            " 4xh100-pcap@4:prefill , 2xmi300x-8@8 ",
            (pool(4, "dgx-h100-pcap", "prefill", tensor_parallel=4), pool(2, "mi300x-8", "mixed", tensor_parallel=8)),
        ),
    ],
)
def test_parses_a_cluster_line(text, pools):
    """Each pool has the form COUNTxMACHINE@TPxPP:ROLE/BATCHER. Parallelism, role and batcher are optional."""
    assert parse_cluster(text, model="m", catalog=CATALOG) == ClusterSpec(pools=pools, model="m")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the cluster has no pools: write pools as in 35xh100:prefill"),
        ("  ", "the cluster has no pools"),
        ("5xh100,", "invalid pool ''"),
        ("h100", "invalid pool 'h100': write pools as in"),
        ("-5xh100", "invalid pool"),
        ("5 xh100", "invalid pool"),
        (f"{'9' * 5000}xh100", "invalid pool"),
        ("99999999xh100", "machines must be at most 1000000, not 99999999"),
        ("0xh100", "pool '0xh100': machines must be at least 1, not 0"),
        ("5xh10", "pool '5xh10': unknown machine 'h10' (did you mean h100?); choose from dgx-a100"),
        ("5xh100:prefil", "unknown role 'prefil' (did you mean prefill?); choose from decode, mixed, prefill"),
        ("5xh100:", "unknown role ''"),
        ("5xh100@9:decode", "dgx-h100 has 8 accelerators, so tensor parallelism is 1 to 8, not 9"),
        ("5xh100@0", "not 0"),
        ("5xh100@x", "invalid pool"),
        ("5xh100@2ep7", "multiple of tensor parallelism 2 that divides the 8 accelerators of a dgx-h100, not 7"),
        ("5xh100@2x2ep8", "not spread over the instances of a pipeline"),
        ("5xh100:mixed/chunked", "unknown batcher 'chunked' (did you mean chunked-prefill?)"),
        ("5xh100:mixed/", "unknown batcher ''"),
    ],
)
def test_rejects_invalid_pools(text, message):
    with pytest.raises(ConfigurationError) as error:
        parse_cluster(text, model="m", catalog=CATALOG)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_yaml_and_toml_files_are_equivalent(tmp_path):
    toml = 'model = "bloom-176b"\nlink_bytes_per_s = 200e9\n' + "".join(
        f'[[pools]]\nmachines = {machines}\nmachine = "{machine}"\nrole = "{role}"\n{more}\n'
        for machines, machine, role, more in ((35, "h100", "prefill", ""), (5, "a100", "decode", "tensor_parallel = 4"))
    )
    (tmp_path / "a.toml").write_text(toml)
    (tmp_path / "a.yml").write_text(YAML + "link_bytes_per_s: 200e9\n")
    expected = ClusterSpec(
        model="bloom-176b",
        pools=(pool(35, "dgx-h100", "prefill"), pool(5, "dgx-a100", "decode", tensor_parallel=4)),
        link_bytes_per_s=200e9,
    )
    assert load_cluster(tmp_path / "a.toml") == load_cluster(tmp_path / "a.yml") == expected


def test_accepts_machines_of_a_user_catalog(tmp_path):
    own = tmp_path / "own.toml"
    own.write_text(
        '[machines.mine]\naccelerator = "l40s"\ncount = 1\nnetwork_bytes_per_s = 1e9\nprice_per_h = 1\n'
        'tdp_w = 900\nidle_w = 90\nsource = "own"\ndate = "2025"\n'
    )
    catalog = load_catalog([own])
    assert parse_cluster("2xmine", model="m", catalog=catalog).pools[0].machine == "mine"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty: give at least a model and pools"),
        ("# nothing\n", "is empty"),
        ("just text", "expected table, got str"),
        ("model: m", "missing required field pools"),
        ("model: m\npools: []", "it has no pools"),
        (YAML + "ruter: jsq\n", "unknown field ruter (did you mean router?)"),
        (YAML.replace("machines: 35", "machins: 35"), "pools[0]: unknown field machins (did you mean machines?)"),
        (YAML.replace("35", "many"), "pools[0].machines: expected int, got str"),
        (YAML.replace("35", "0"), "pools[0]: machines must be at least 1, not 0"),
        (YAML.replace("decode", "token"), "pools[1].role: 'token' is not one of prefill, decode, mixed"),
        (YAML.replace("h100", "h10"), "pools[0]: unknown machine 'h10'"),
        (YAML.replace(": 4", ": 9"), "pools[1]: dgx-a100 has 8 accelerators"),
        (YAML + "max_num_batched_tokens: 0\n", "max_num_batched_tokens must be more than 0, not 0"),
        (YAML + "max_num_batched_tokens: much\n", "max_num_batched_tokens: 'much' is not a number or auto"),
        (YAML + "link_bytes_per_s: .inf\n", "link_bytes_per_s must be more than 0, not inf"),
        (YAML + "link_latency_s: -1\n", "link_latency_s must be seconds from 0"),
        (YAML + "memory_utilization: 95\n", "memory_utilization must be more than 0 and at most 1, not 95.0"),
        (YAML + "failures: [{instance: a, at_s: -1}]\n", "failures[0]: at_s must be seconds from 0"),
        (YAML + "failures: [{instance: a, at_s: 5, back_s: 5}]\n", "failures[0]: back_s must be after at_s"),
        (YAML + "failures: [{instance: a, at: 5}]\n", "failures[0]: unknown field at (did you mean at_s?)"),
        (YAML + YAML, "repeats the key model"),
        ("pools: [", "is not YAML: did not find expected node content (line 2, column 1)"),
        ("a: b: c", "is not YAML: mapping values are not allowed in this context (line 1, column 5)"),
        ("a: 2024-99-99", "is not YAML: month must be in 1..12"),
        ("a: !!python/object:os.system 1", "is not YAML: could not determine a constructor"),
        ("a: &a [*a]", "unknown field a"),
    ],
)
def test_rejects_invalid_files(text, message):
    with pytest.raises(ConfigurationError) as error:
        read_cluster(text, "c.yaml", catalog=CATALOG)
    assert message in str(error.value)
    assert str(error.value).startswith("cluster c.yaml")
    assert "\n" not in str(error.value)


def test_rejects_unreadable_files(tmp_path):
    (tmp_path / "dir.yaml").mkdir()
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe")
    (tmp_path / "bad.toml").write_text("a = \n")
    (tmp_path / "some.ini").write_text("a = 1\n")
    for name, message in (
        ("no.yaml", "cannot be read: No such file or directory"),
        ("dir.yaml", "cannot be read: Is a directory"),
        ("binary.yaml", "is not a text file in UTF-8"),
        ("bad.toml", "is not TOML: Invalid value"),
        ("some.ini", "has an unknown suffix: use one of .yaml, .yml, .json, .toml"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            load_cluster(tmp_path / name)


pools = st.builds(
    PoolSpec,
    machines=st.integers(1, 10_000),
    machine=st.sampled_from(sorted(CATALOG.machines)),
    role=st.sampled_from(Role),
    tensor_parallel=st.none() | st.integers(1, 4),
    batcher=st.none() | st.sampled_from(sorted(BATCHERS)),
)
seconds = st.floats(0, 9e8)
failures = st.builds(
    lambda instance, at_s, away_s: InstanceFailure(
        instance=instance, at_s=at_s, back_s=None if away_s is None else at_s + away_s
    ),
    st.text(min_size=1),
    seconds,
    st.none() | st.floats(1, 1e6),
)
speeds = st.floats(1, allow_infinity=False)
specs = st.builds(
    ClusterSpec,
    pools=st.lists(pools, min_size=1, max_size=4).map(tuple),
    model=st.text(),
    performance=st.text(),
    router=st.text(),
    handoff=st.text(),
    max_num_batched_tokens=st.integers(1, 10**9) | st.just("auto"),
    pipeline_chunk=st.none() | st.integers(1, 10**9),
    max_num_seqs=st.integers(1, 10**9),
    block_size=st.integers(1, 10**9),
    memory_utilization=st.floats(0, 1, exclude_min=True),
    contention=st.booleans(),
    link_bytes_per_s=st.none() | speeds,
    link_latency_s=st.none() | seconds,
    kv_bytes_per_token=st.none() | st.integers(1, 10**9),
    rules=st.text(),
    failures=st.lists(failures, max_size=3).map(tuple),
)


@given(specs)
def test_clusters_round_trip_through_files(spec):
    assert read_cluster(dump_cluster(spec), "c.yaml", catalog=CATALOG) == spec


@given(st.text())
def test_any_line_gives_pools_or_a_configuration_error(text):
    with suppress(ConfigurationError):
        assert parse_cluster(text, model="m", catalog=CATALOG).pools


@given(st.text() | st.text("[]{}:-,&*!? \n\t'\"#a1|>%@`"))
def test_invalid_text_gives_a_configuration_error(text):
    with pytest.raises(ConfigurationError):
        read_cluster(text, "c.yaml", catalog=CATALOG)


def test_omits_unset_fields_and_writes_pools_first():
    text = dump_cluster(parse_cluster("2xh100@4:prefill,1xa100:decode", model="bloom-176b", catalog=CATALOG))
    assert text.startswith("pools:\n- machines: 2\n  machine: dgx-h100\n  role: prefill\n  tensor_parallel: 4\n")
    assert "null" not in text
    assert "failures" not in text


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("link_latency_s: 1.0e+300", "link_latency_s"),
        ("link_bytes_per_s: 1.0e-300", "must be at least 1"),
        ("failures: [{instance: mixed-0, at_s: 1.0e+300}]", "at_s"),
        ("failures: [{instance: mixed-0, at_s: 1, back_s: 1.0e+300}]", "back_s"),
    ],
)
def test_rejects_numbers_beyond_the_clock_range(line, words):
    """Times that exceed the range of the simulated clock are rejected when the cluster file is parsed."""
    text = f"model: bloom-176b\npools: [{{machines: 1, machine: h100, role: mixed}}]\n{line}\n"
    with pytest.raises(ConfigurationError, match=words):
        read_cluster(text, "c.yaml")


def test_reads_the_cluster_of_a_deployment_file():
    text = (
        "deployment: 2\ncluster:\n  model: bloom-176b\n  pools: [{machines: 1, machine: h100, role: mixed}]\n"
        "expected: {rate: 3.0}\n"
    )
    assert read_cluster(text, "w.yaml").pools[0].machine == "dgx-h100"
