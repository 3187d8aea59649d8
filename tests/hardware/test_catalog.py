"""The hardware catalog, and files that add or override its entries."""

import os

import pytest

from twofold.errors import ConfigurationError
from twofold.hardware.catalog import load_catalog

ACCELERATORS = ("a100-80gb", "h100-80gb", "h100-80gb-pcap", "h200", "b200", "mi300x", "l40s")


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch):
    monkeypatch.delenv("TWOFOLD_CATALOG", raising=False)


@pytest.fixture
def catalog():
    return load_catalog()


@pytest.fixture
def write(tmp_path):
    """Return a function that writes a catalog file and returns its path."""

    def path(text, name="mine.toml"):
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return path


def every(catalog):
    kinds = (catalog.accelerators, catalog.machines, catalog.links, catalog.tiers, catalog.models)
    return [item for kind in kinds for item in kind.values()]


def test_every_entry_has_source_date_and_name(catalog):
    for item in every(catalog):
        assert len(item.source) > 10
        assert len(item.date) in {7, 10}
        assert item.date[:4].isdigit()
    for kind in (catalog.accelerators, catalog.machines, catalog.links, catalog.tiers, catalog.models):
        assert all(name == item.name for name, item in kind.items())


@pytest.mark.parametrize(
    ("name", "price", "tdp", "idle", "network", "bandwidth", "units"),
    [
        ("dgx-a100", 17.6, 6500, 1500, 200e9, 2.039e12, 24.8),
        ("dgx-h100", 38.0, 10200, 2800, 400e9, 3.352e12, 44.0),
        ("dgx-h100-pcap", 38.0, 7140, 2800, 400e9, 3.352e12, 0.7 * 44),
    ],
)
def test_splitwise_machines_match_the_paper(catalog, name, price, tdp, idle, network, bandwidth, units):
    """Machine prices, power, bandwidths and memory sizes match Splitwise's table I and SplitwiseSim's configuration."""
    machine = catalog.machine(name)
    assert (machine.price_per_h, machine.tdp_w, machine.idle_w) == (price, tdp, idle)
    assert machine.network_bytes_per_s == network
    assert machine.power_units == pytest.approx(units)
    assert machine.accelerator.memory_bytes_per_s == bandwidth
    assert machine.memory_bytes == 8 * 85_899_345_920


def test_power_cap_is_half_of_an_h100(catalog):
    capped = catalog.machine("h100-pcap")
    assert capped.power_cap * capped.accelerator.tdp_w == 350
    assert catalog.machine("h100").power_cap == 1.0


def test_iso_power_and_iso_cost_of_splitwise(catalog):
    """As in Splitwise, 40 H100 machines draw the power of 70 A100 machines and cost as much as 86 A100 machines."""
    a100, h100 = catalog.machine("a100"), catalog.machine("h100")
    assert 70 * a100.price_per_h / (40 * h100.price_per_h) == pytest.approx(0.8105, abs=1e-3)
    assert 70 * a100.power_units == pytest.approx(40 * h100.power_units, rel=0.02)
    assert 86 * a100.price_per_h == pytest.approx(40 * h100.price_per_h, rel=0.01)


def test_network_bandwidth_sums_all_nics(catalog):
    """A DGX H100 transfers the KV of 512 bloom-176b tokens over its network in 5 ms, as in the Splitwise paper."""
    size = 512 * catalog.model("bloom-176b").kv_bytes_per_token
    assert size / 1e9 == pytest.approx(2.06, abs=0.01)
    assert size / catalog.machine("dgx-h100").network_bytes_per_s == pytest.approx(5e-3, rel=0.05)


@pytest.mark.parametrize(
    ("name", "kv_bytes"),
    [
        ("llama2-70b", 327_680),
        ("bloom-176b", 4_014_080),
        ("opt-13b", 819_200),
        ("opt-66b", 2_359_296),
        ("opt-175b", 4_718_592),
        ("llama-3.1-8b", 131_072),
        ("llama-3.1-70b", 327_680),
        ("llama-3.1-405b", 516_096),
        ("qwen3-235b-a22b", 192_512),
        ("deepseek-v3", 61 * 576 * 2),
    ],
)
def test_kv_bytes_follow_from_the_architecture(catalog, name, kv_bytes):
    """KV bytes per token account for grouped-query attention and latent attention."""
    assert catalog.model(name).kv_bytes_per_token == kv_bytes


def test_bloom_weight_matches_splitwise_sim(catalog):
    assert catalog.model("bloom-176b").weight_bytes == 329_000_000_000
    for model in catalog.models.values():
        if model.name not in {"bloom-176b", "deepseek-v3"}:
            assert model.weight_bytes == 2 * model.parameters


def test_active_parameters_match_published_figures(catalog):
    billions = {"qwen3-30b-a3b": 3.35, "qwen3-235b-a22b": 22.2, "deepseek-v3": 37.55}
    for model in catalog.models.values():
        expected = billions.get(model.name, model.parameters / 1e9)
        assert model.active_parameters / 1e9 == pytest.approx(expected, rel=0.01)


def test_contains_the_documented_names(catalog):
    assert set(ACCELERATORS) <= set(catalog.accelerators)
    assert all(catalog.accelerator(name).name == name for name in ACCELERATORS)
    assert {"mi300x", "l40s"} <= {machine.accelerator.name for machine in catalog.machines.values()}
    assert catalog.link("infiniband-hdr").bytes_per_s * 8 == 200e9
    assert catalog.link("infiniband-ndr").bytes_per_s * 8 == 400e9
    assert {"ethernet-100g", "nvlink", "pcie4", "pcie5"} <= set(catalog.links)


def test_tier_prices_match_ec2_differences(catalog):
    # The price difference of two EC2 instances, divided by their difference in DRAM or NVMe size.
    assert catalog.tier("dram").price_per_gb_h == pytest.approx(0.24 / (64 * 2**30 / 1e9), rel=1e-3)
    assert catalog.tier("nvme").price_per_gb_h == pytest.approx(0.365 / 3750, rel=1e-3)
    assert catalog.tier("dram").bytes_per_s > catalog.tier("nvme").bytes_per_s


def test_short_names(catalog):
    for name in ("a100", "h100", "h100-pcap", "h200", "b200"):
        assert catalog.machine(name) is catalog.machine(f"dgx-{name}")


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        ("machine", "H10", "unknown machine 'H10' (did you mean h100?); choose from dgx-a100, "),
        ("machine", "dgx-h1000", "did you mean dgx-h100?"),
        ("machine", "", "unknown machine ''; choose from"),
        ("accelerator", "h20", "did you mean h200?"),
        ("link", "infiniband", "choose from ethernet-100g, "),
        ("tier", "ram", "choose from dram, nvme"),
        ("model", "bloom", "did you mean bloom-176b?"),
        ("model", "zzz", "unknown model 'zzz'; choose from bloom-176b, "),
        ("model", "", "unknown model ''; choose from"),
        ("model", "meta-llama/Llama-3.1-8B", "nor a name of the catalog (did you mean llama-3.1-8b?)"),
    ],
)
def test_unknown_names_get_a_suggestion_and_the_list(catalog, kind, name, message):
    with pytest.raises(ConfigurationError) as error:
        getattr(catalog, kind)(name)
    assert message in str(error.value)


def test_a_file_overrides_single_fields(write):
    machine = load_catalog([write("[machines.dgx-h100]\nprice_per_h = 20\n")]).machine("h100")
    assert (machine.price_per_h, machine.tdp_w) == (20.0, 10200)
    assert "mine.toml: machines.dgx-h100; the rest: Splitwise" in machine.source


def test_a_file_adds_entries(write):
    mine = write(
        """
        [accelerators.x1]
        memory_bytes = 80e9
        memory_bytes_per_s = 1e12
        flops_per_s = 1e15
        interconnect_bytes_per_s = 1e11
        tdp_w = 500
        source = "measured"
        date = 2025-02-03
        [machines.dgx-x1]
        accelerator = "x1"
        count = 4
        network_bytes_per_s = 1e11
        price_per_h = 0
        tdp_w = 3000
        idle_w = 500
        source = "measured"
        date = "2025"
        """
    )
    machine = load_catalog([mine]).machine("x1")
    assert machine.memory_bytes == 320_000_000_000
    assert machine.accelerator.date == "2025-02-03"
    assert machine.power_units is None


def test_changed_accelerators_change_their_machines(write):
    mine = write("[accelerators.h100-80gb]\nmemory_bytes_per_s = 1e12\n")
    assert load_catalog([mine]).machine("h100").accelerator.memory_bytes_per_s == 1e12


def test_later_files_win(write, monkeypatch):
    """Files in TWOFOLD_CATALOG override the packaged catalog. Files passed to `load_catalog` override both."""
    paths = [write(f"[links.pcie4]\nlatency_s = {n}\n", f"{n}.toml") for n in (1, 2, 3)]
    monkeypatch.setenv("TWOFOLD_CATALOG", os.pathsep.join([str(paths[0]), "", str(paths[1])]))
    assert load_catalog().link("pcie4").latency_s == 2.0
    assert load_catalog([paths[2]]).link("pcie4").latency_s == 3.0
    monkeypatch.delenv("TWOFOLD_CATALOG")
    assert load_catalog().link("pcie4").latency_s == 10e-6


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[machine.x]\n", "unknown section 'machine' (did you mean machines?)"),
        ("machines = 3\n", "machines must hold a table for each name"),
        ("[machines]\nx = 3\n", "machines.x must be a table of fields"),
        ("[machines.dgx-h100]\nprice = 3\n", "machines.dgx-h100: field price: unknown field"),
        ("[machines.dgx-h100]\nprice_per_hour = 3\n", "did you mean price_per_h?"),
        ('[machines.dgx-h100]\nname = "x"\n', "field name: unknown field"),
        ('[machines.dgx-h100]\nprice_per_h = "3"\n', "field price_per_h: expected float, got str"),
        ("[machines.dgx-h100]\nprice_per_h = -3\n", "field price_per_h: expected float >= 0"),
        ("[machines.dgx-h100]\nprice_per_h = inf\n", "field price_per_h: must be finite, not inf"),
        ("[machines.dgx-h100]\ncount = 1.5\n", "field count: expected int, got float"),
        ("[machines.dgx-h100]\npower_cap = 50\n", "field power_cap: expected float <= 1"),
        ('[machines.dgx-h100]\naccelerator = "h10"\n', "field accelerator: unknown accelerator 'h10'"),
        ("[machines.dgx-h100]\naccelerator = 3\n", "field accelerator: it must be the name"),
        ("[machines.mine]\ncount = 8\n", "machines.mine: missing required field accelerator"),
        ('[links.mine]\nbytes_per_s = 1\nlatency_s = 0\ndate = "2025"\n', "missing required field source"),
        ("[models.llama2-70b]\nkv_heads = 7\n", "field kv_heads: 64 heads cannot share 7 KV heads"),
        ("[models.llama2-70b]\nactive_parameters = 70e9\n", "field active_parameters: must be at most"),
        ("[machines.x\n", "is not TOML"),
        ("a = 1\na = 2\n", "is not TOML"),
    ],
)
def test_errors_name_file_entry_and_field(write, text, message):
    path = write(text)
    with pytest.raises(ConfigurationError) as error:
        load_catalog([path])
    assert message in str(error.value)
    assert f"catalog {path}" in str(error.value)
    assert "\n" not in str(error.value)


def test_rejects_unreadable_files(tmp_path):
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    for path, message in (
        (tmp_path / "no.toml", "No such file or directory"),
        (tmp_path, "Is a directory"),
        (binary, "is not a text file in UTF-8"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            load_catalog([path])
