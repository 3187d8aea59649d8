"""Profiles of hosts: written, read back, part of a catalog, and refused where they are something else."""

import pytest

from support.hosts import profile
from twofold.errors import ConfigurationError
from twofold.hardware.catalog import load_catalog
from twofold.performance.host_profile import HOST, dump_host_profile, read_host_profile
from twofold.performance.instance import kv_capacity_tokens


def test_a_profile_is_read_back_as_it_was_written(tmp_path):
    """To the last digit."""
    path = tmp_path / "host.yaml"
    path.write_text(dump_host_profile(profile(sync_s=0.1 + 0.2)))
    assert read_host_profile(path) == profile(sync_s=0.1 + 0.2)


def test_a_catalog_gets_the_host_and_its_model():
    """The host has room for just the KV cache that the service gave its workers, and costs nothing that is known."""
    one = profile()
    catalog = one.extend(load_catalog())
    machine, model = catalog.machine(HOST), catalog.model("small")
    assert kv_capacity_tokens(model, machine, 1, 1.0) == 64_000
    assert (machine.count, machine.price_per_h, machine.tdp_w) == (1, 0.0, 0.0)
    assert "dgx-h100" in catalog.machines


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("cores: 2\n", "missing required field"),
        ("a: [", "is not a host profile"),
        ("cores: two\n", "is not a host profile"),
    ],
)
def test_what_is_no_profile_is_refused_with_its_name(tmp_path, text, reason):
    """One sentence, with the file in it."""
    path = tmp_path / "host.yaml"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=reason) as refused:
        read_host_profile(path)
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_profile_that_is_not_there_is_refused(tmp_path):
    """With what the system says."""
    with pytest.raises(ConfigurationError, match=r"cannot read profile .*: No such file"):
        read_host_profile(tmp_path / "none.yaml")
