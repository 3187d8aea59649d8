"""Tests of measurement sweeps, on a simulated instance with known iteration times."""

from statistics import geometric_mean

import msgspec
import pytest

from support.hosts import MODEL, profile
from support.paced import TIMES, PacedStepper, keep_time
from twofold.characterize.analysis import measured_cold_start, measured_link
from twofold.characterize.local import LocalTarget
from twofold.characterize.power import PowerMeter
from twofold.characterize.probes import ProbeKind, probes
from twofold.characterize.rows import measurements
from twofold.characterize.sweep import ProfileFile, measured_slowness, sweep
from twofold.characterize.target import TargetError, TargetLimits
from twofold.errors import ConfigurationError
from twofold.performance.fitting.iterations import fit_iterations
from twofold.performance.fitting.profile import ProfileRow, read_profile

PAIR = ("m", "here", 1)
LIMITS = TargetLimits(max_model_len=4096, max_num_seqs=32, max_num_batched_tokens=1024, kv_capacity_tokens=20000)


def silent(_name, _share):
    """Ignore a progress report."""


def swept(monkeypatch, tmp_path, budget_s, **settings):
    """Profile a simulated instance for `budget_s` simulated seconds."""
    stepper = PacedStepper(**settings)
    keep_time(monkeypatch, stepper)
    file = ProfileFile(tmp_path / "p.csv", PAIR)
    sweep(LocalTarget(stepper), file, PAIR, budget_s, silent, PowerMeter(None))
    return file, stepper


def test_probes_fit_into_the_limits():
    for probe in probes(LIMITS):
        assert len(probe.running) <= LIMITS.max_num_seqs
        assert sum(stream.prompt_tokens + stream.output_tokens for stream in probe.running) <= LIMITS.kv_capacity_tokens
        assert all(stream.prompt_tokens + stream.output_tokens < LIMITS.max_model_len for stream in probe.streams)


def test_requests_that_decode_together_have_different_contexts():
    together = [probe.running for probe in probes(LIMITS) if probe.kind in (ProbeKind.DECODE, ProbeKind.MIXED)]
    for running in (each for each in together if len(each) > 1):
        assert max(stream.prompt_tokens for stream in running) >= 4 * min(stream.prompt_tokens for stream in running)


def test_the_first_probes_are_of_all_kinds():
    """Even a short sweep measures prefill, decode and mixed iterations."""
    first = probes(LIMITS)[:12]
    assert {probe.kind for probe in first} == set(ProbeKind) - {ProbeKind.TRANSFER}


def test_a_disaggregated_service_is_asked_for_its_transfers_only():
    limits = TargetLimits(max_model_len=4096, disaggregated=True)
    assert {probe.kind for probe in probes(limits)} == {ProbeKind.TRANSFER}


def test_delays_of_the_second_token_become_a_link():
    delays = {10: 21.0, 1000: 120.0, 2000: 220.0}  # ms: 20 ms, and 0.1 ms per token
    rows = [
        ProfileRow(
            model="m",
            hardware="h",
            tensor_parallel=1,
            token_size=6,
            prompt_size=size,
            batch_size=1,
            transfer_time=delay,
        )
        for size, delay in delays.items()
    ]
    link = measured_link(rows, MODEL)
    assert link.latency_s == pytest.approx(0.02, rel=0.01)
    assert MODEL.kv_bytes_per_token / link.bytes_per_s == pytest.approx(1e-4, rel=0.01)
    assert not link.layer_wise
    assert measured_link(rows[:1], MODEL) is None


def test_iterations_that_load_kernels_are_not_recorded(monkeypatch, tmp_path):
    """The first iterations of an instance take longer, and are not in the profile."""
    stepper = PacedStepper()
    keep_time(monkeypatch, stepper)
    step, delays_s = stepper.step, [1.0, 1.0, 1.0]

    def slow_at_first():
        reached = list(step())
        stepper.now += delays_s.pop() if delays_s else 0.0
        return reached

    monkeypatch.setattr(stepper, "step", slow_at_first)
    file = ProfileFile(tmp_path / "p.csv", PAIR)
    sweep(LocalTarget(stepper), file, PAIR, 2.0, silent, PowerMeter(None))
    assert not delays_s
    assert max(row.prompt_time for row in file.rows if row.prompt_size == 2) == pytest.approx(4.2, rel=0.01)  # ms


def test_a_tiny_context_still_has_probes():
    found = probes(TargetLimits(max_model_len=128, kv_capacity_tokens=512))
    assert {ProbeKind.PREFILL, ProbeKind.DECODE, ProbeKind.MIXED} <= {probe.kind for probe in found}


def test_the_fit_finds_the_times(monkeypatch, tmp_path):
    """The fit predicts prefill, decode and mixed iteration times."""
    file, stepper = swept(monkeypatch, tmp_path, 120.0)
    fitted = fit_iterations(measurements(file.rows, stepper.limits))
    times = fitted.times
    assert max(times.prefill_error, times.decode_error, times.mixed_error) < 0.03
    for work in ((64, 64**2, 0, 0), (2000, 2000**2, 0, 0), (0, 0, 1, 600), (0, 0, 30, 16000), (500, 500**2, 12, 4000)):
        assert times.seconds(*work) == pytest.approx(TIMES.seconds(*work), rel=0.06)
    assert 512 in times.bends
    assert fitted.request_s == 0.0


@pytest.mark.parametrize("cold_s", [0.05, 0.0])
def test_the_fit_finds_cold_starts(monkeypatch, tmp_path, cold_s):
    """An iteration after an idle time takes longer, the longer the idle time."""
    times = msgspec.structs.replace(TIMES, cold_s=cold_s, cold_half_s=2.0)
    file, stepper = swept(monkeypatch, tmp_path, 120.0, times=times)
    assert measured_cold_start(file.rows) == pytest.approx((cold_s, 2.0 if cold_s else 0.0), rel=0.01)
    warm = fit_iterations(measurements(file.rows, stepper.limits)).times
    assert warm.seconds(64, 64**2, 0, 0) == pytest.approx(TIMES.seconds(64, 64**2, 0, 0), rel=0.06)


def test_chunked_prompts_are_measured_in_chunks(monkeypatch, tmp_path):
    file, stepper = swept(monkeypatch, tmp_path, 60.0, max_num_batched_tokens=256)
    chunked = [row for row in file.rows if row.mixed_time and row.prompt_size > 256]
    assert chunked
    assert all(row.chunks == -(-row.prompt_size // (256 - row.running)) for row in chunked)
    times = fit_iterations(measurements(file.rows, stepper.limits)).times
    work = (200, 200**2, 4, 1200)
    assert times.seconds(*work) == pytest.approx(TIMES.seconds(*work), rel=0.06)


def test_a_sweep_is_resumed(monkeypatch, tmp_path):
    """A resumed sweep keeps the existing rows of the profile file, and continues with an unmeasured configuration."""
    first, _ = swept(monkeypatch, tmp_path, 1.5)
    sizes = [(row.prompt_size, row.batch_size, row.running, bool(row.token_time)) for row in first.rows]
    again, _ = swept(monkeypatch, tmp_path, 60.0)
    assert again.rows[: len(sizes)] == first.rows
    more = [(row.prompt_size, row.batch_size, row.running, bool(row.token_time)) for row in again.rows[len(sizes) :]]
    assert set(more) - set(sizes)
    assert all(row.date for row in again.rows)
    assert read_profile(tmp_path / "p.csv") == again.rows


def test_a_sweep_measures_enough_for_a_fit(monkeypatch, tmp_path):
    file, stepper = swept(monkeypatch, tmp_path, 1e-6)
    times = fit_iterations(measurements(file.rows, stepper.limits)).times
    assert None not in (times.prefill_error, times.decode_error, times.mixed_error)


@pytest.mark.parametrize(("prompts", "decodes"), [(1.0, 1.0), (1.3, 1.3), (1.2, 2.0)])
def test_the_slowdown_of_each_phase_is_measured(monkeypatch, prompts, decodes):
    stepper = PacedStepper(times=TIMES.slower(prompts, decodes))
    keep_time(monkeypatch, stepper)
    known = msgspec.structs.replace(profile(), times=TIMES, request_s=0.0)
    assert measured_slowness(LocalTarget(stepper), known) == pytest.approx((prompts, decodes), rel=0.02)


def test_prompts_of_all_lengths_count_alike_in_the_slowdown(monkeypatch):
    """A profile that is wrong for long prompts only does not make the instance look as slow at every length."""
    stepper = PacedStepper(times=msgspec.structs.replace(TIMES, square_s=TIMES.token_s[-1] / 907))
    keep_time(monkeypatch, stepper)
    known = msgspec.structs.replace(profile(), times=TIMES, request_s=0.0)
    took = [stepper.times.seconds(each, each**2, 0, 0) / TIMES.seconds(each, each**2, 0, 0) for each in (101, 307, 907)]
    prompts, _ = measured_slowness(LocalTarget(stepper), known)
    assert prompts == pytest.approx(geometric_mean(took), rel=0.02)


def test_a_file_of_another_model_is_refused(monkeypatch, tmp_path):
    swept(monkeypatch, tmp_path, 1.0)
    with pytest.raises(ConfigurationError, match="has measurements of m on here TP1: name another file"):
        ProfileFile(tmp_path / "p.csv", ("other", "here", 1))


def test_rows_before_a_failure_are_kept(monkeypatch, tmp_path):
    """If the measured instance fails during a sweep, the profile file keeps the rows measured before."""
    stepper = PacedStepper()
    keep_time(monkeypatch, stepper)
    target, ran = LocalTarget(stepper), []
    run = target.run

    def fails(streams):
        ran.append(streams)
        if len(ran) > 8:  # three of them are the warm-up
            raise TargetError("the server is gone")
        return run(streams)

    target.run = fails
    file = ProfileFile(tmp_path / "p.csv", PAIR)
    with pytest.raises(TargetError, match="the server is gone"):
        sweep(target, file, PAIR, 60.0, silent, PowerMeter(None))
    assert len(read_profile(tmp_path / "p.csv")) >= 4
