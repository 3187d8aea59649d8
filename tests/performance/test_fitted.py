"""Performance model fitted to measured iteration times, for each model and machine in the profile."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twofold.errors import ConfigurationError
from twofold.performance.coefficients import ENVIRONMENT, packaged, to_toml
from twofold.performance.fitted import fitted
from twofold.performance.fitting.profile import group_batches, read_profile


@pytest.fixture(scope="module")
def all_fitted(models, machines):
    """Return all fitted performance models that are shipped with the package, by model and accelerator."""
    named = {"a100-80gb": "dgx-a100", "h100-80gb": "dgx-h100", "h100-80gb-pcap": "dgx-h100-capped"}
    return {
        entry.pair: fitted(models[entry.model], machines[named[entry.accelerator]], entry.tensor_parallel)
        for entry in packaged()
    }


def test_covers_all_pairs_of_the_profile(all_fitted):
    assert len(all_fitted) == 12
    for pair, model in all_fitted.items():
        assert ("synthetic" in model.error.basis) == ("pcap" in pair)
        assert not model.error.estimated
        assert model.name.startswith("fitted ")


def test_times_match_the_profile_within_the_stated_error(all_fitted, profile_path):
    rows = read_profile(profile_path)
    for entry in packaged():
        model = all_fitted[entry.pair]
        wanted = (entry.model, entry.accelerator, entry.tensor_parallel)
        seen = group_batches(row for row in rows if row.pair == wanted)
        seen = [one for one in seen if one.prefill_tokens <= entry.max_prefill_tokens]
        prefill = [model.prefill_s(one.prefill_tokens, one.squares) * 1e3 / one.prompt_time - 1 for one in seen]
        costs = [model.decode_cost(one.batch_size) for one in seen]
        decode = [
            (cost.base_s + cost.context_s * one.mean_context) * 1e3 / one.token_time - 1
            for cost, one in zip(costs, seen, strict=True)
        ]
        assert sum(map(abs, prefill)) / len(seen) <= model.error.prefill
        assert sum(map(abs, decode)) / len(seen) <= model.error.decode


def test_the_formula_by_hand(all_fitted):
    model = all_fitted["bloom-176b on h100-80gb TP8"]
    prefill, decode = model.calibration.prefill, model.calibration.decode
    short = (prefill.floor_ms**2.5 + (prefill.token_ms * 3072) ** 2.5) ** 0.4
    long = short + prefill.long_token_ms * 3072 / 2 + prefill.square_ms * 3072**2
    assert model.prefill_s(3072, 3072**2) * 1e3 == pytest.approx(long, rel=1e-12)
    base = decode.base_ms + 40 * decode.sequence_ms + 8 * decode.large_batch_ms
    assert model.decode_cost(40).base_s * 1e3 == pytest.approx(base, rel=1e-12)
    mixed = long + base - decode.base_ms + decode.context_ms * 50_000
    assert model.mixed_s(3072, 3072**2, 40, 50_000) * 1e3 == pytest.approx(mixed, rel=1e-12)


def test_decode_at_batch_64_matches_the_profile(all_fitted):
    """At batch size 64, decode of bloom-176b takes 63.8 ms on H100 and 96.6 ms on A100."""
    for pair, expected in (("bloom-176b on h100-80gb TP8", 63.8), ("bloom-176b on a100-80gb TP8", 96.6)):
        cost = all_fitted[pair].decode_cost(64)
        assert (cost.base_s + cost.context_s * 64 * 576) * 1e3 == pytest.approx(expected, rel=0.03)


@given(st.integers(1, 20_000), st.integers(1, 4000), st.integers(0, 200), st.integers(1, 10**7))
def test_times_grow_with_tokens_sequences_and_context(all_fitted, tokens, more, sequences, context):
    for model in all_fitted.values():
        prefill_s = model.prefill_s(tokens, tokens**2)
        assert model.prefill_s(tokens + more, (tokens + more) ** 2) > prefill_s > 0
        assert model.prefill_s(tokens + more, tokens**2 + more**2) > prefill_s
        cost = model.decode_cost(sequences)
        assert model.decode_cost(sequences + 1).base_s >= cost.base_s > 0
        mixed_s = model.mixed_s(tokens, tokens**2, sequences, context)
        assert mixed_s >= max(prefill_s, cost.base_s + cost.context_s * context) * (1 - 1e-12)


@given(st.integers(1, 30_000), st.integers(1, 8000))
def test_times_have_no_jumps(all_fitted, tokens, step):
    """One more prompt token adds less than 2 ms, even at the ends of the measured range."""
    model = all_fitted["bloom-176b on a100-80gb TP8"]
    for at in (tokens, 2048, 4096):
        assert model.prefill_s(at + 1, step) - model.prefill_s(at, step) < 2e-3


def test_uncontended_latency_is_a_prefill_and_single_decodes(all_fitted):
    model = all_fitted["llama2-70b on h100-80gb TP4"]
    ttft_s, tpot_s = model.uncontended(1000, 11)
    cost = model.decode_cost(1)
    steps = [cost.base_s + cost.context_s * (1000 + made) for made in range(1, 11)]
    assert ttft_s == model.prefill_s(1000, 10**6)
    assert tpot_s == pytest.approx(sum(steps) / len(steps), rel=1e-12)
    assert model.uncontended(1000, 1)[1] == pytest.approx(steps[0], rel=1e-12)


def test_rejects_pairs_without_calibration(models, machines):
    with pytest.raises(ConfigurationError, match=r"bloom-176b on h100-80gb TP4, only of .*h100-80gb TP8.*roofline"):
        fitted(models["bloom-176b"], machines["dgx-h100"], 4)
    with pytest.raises(ConfigurationError, match="tensor parallelism is 1 to 8, not 16"):
        fitted(models["bloom-176b"], machines["dgx-h100"], 16)


def test_rejects_unmeasured_power_caps(models, machines):
    named = msgspec.structs.replace(
        machines["dgx-h100-capped"],
        accelerator=msgspec.structs.replace(machines["dgx-h100"].accelerator, name="h100-80gb-pcap"),
    )
    assert fitted(models["bloom-176b"], named, 8).calibration.accelerator == "h100-80gb-pcap"
    other = msgspec.structs.replace(machines["dgx-h100"], power_cap=0.8)
    with pytest.raises(ConfigurationError, match="h100-80gb capped to 80% TP8"):
        fitted(models["bloom-176b"], other, 8)


def test_own_files_take_precedence(models, machines, tmp_path, monkeypatch):
    entry = next(one for one in packaged() if one.pair == "bloom-176b on h100-80gb TP8")

    def file(name, date):
        path = tmp_path / name
        path.write_text(to_toml([msgspec.structs.replace(entry, date=date)], "two\nlines"), encoding="utf-8")
        return path

    monkeypatch.setenv(ENVIRONMENT, str(file("env.toml", "2030")))
    pair = models["bloom-176b"], machines["dgx-h100"], 8
    assert fitted(*pair).calibration == msgspec.structs.replace(entry, date="2030")
    assert fitted(*pair, extra=[file("own.toml", "2031")]).calibration.date == "2031"


def test_rejects_files_without_calibrations(models, machines, tmp_path, monkeypatch):
    for content in (None, b"= 3", b"[[calibration]]\nmodel = 'm'\n", b"\xff"):
        path = tmp_path / "c.toml"
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content)
        monkeypatch.setenv(ENVIRONMENT, str(path))
        with pytest.raises(ConfigurationError, match=r"c\.toml"):
            fitted(models["bloom-176b"], machines["dgx-h100"], 8)


def test_round_trips_strings_and_numbers(tmp_path):
    from twofold.performance.coefficients import read_calibrations

    entry = msgspec.structs.replace(packaged()[0], basis='a "quoted" \\ path', dropped=["x", "ü"])
    path = tmp_path / "c.toml"
    path.write_text(to_toml([entry], "heading"), encoding="utf-8")
    assert read_calibrations(path) == [entry]
