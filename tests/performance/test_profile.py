"""Host profiles: files, use in a hardware catalog, and errors for invalid or missing files."""

import pytest

from support.hosts import profile
from twofold.errors import ConfigurationError
from twofold.hardware.catalog import load_catalog
from twofold.performance.instance import kv_capacity_tokens
from twofold.performance.profile import HOST, dump_profile, load_profile


def test_round_trips_a_profile(tmp_path):
    path = tmp_path / "host.yaml"
    path.write_text(dump_profile(profile(sync_s=0.1 + 0.2)))
    assert load_profile(path) == profile(sync_s=0.1 + 0.2)


def test_extends_a_catalog_by_host_and_model():
    one = profile()
    catalog = one.extend(load_catalog())
    machine, model = catalog.machine(HOST), catalog.model("small")
    assert kv_capacity_tokens(model, machine, 1, 1.0) == 64_000
    assert (machine.count, machine.price_per_h, machine.tdp_w) == (1, 0.0, 0.0)
    assert "dgx-h100" in catalog.machines


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("engine: twofold\n", "missing required field"),
        ("a: [", "is not a profile"),
        ("cores: two\n", "is not a profile"),
    ],
)
def test_rejects_other_files_by_name(tmp_path, text, reason):
    path = tmp_path / "host.yaml"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=reason) as refused:
        load_profile(path)
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_rejects_a_missing_file(tmp_path):
    with pytest.raises(ConfigurationError, match=r"cannot read profile .*: No such file"):
        load_profile(tmp_path / "none.yaml")
