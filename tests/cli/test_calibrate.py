"""Tests of `twofold calibrate fit`."""

import pytest
from typer.testing import CliRunner

from twofold.cli.calibrate import app
from twofold.errors import ConfigurationError
from twofold.performance.coefficients import read_calibrations

HEADER = "model,hardware,tensor_parallel,prompt_size,batch_size,token_size,prompt_time,token_time\n"
SHAPES = [(2**power, 1) for power in range(7, 14)] + [(512, 2**power) for power in range(1, 7)]


@pytest.fixture
def profile(tmp_path):
    """Write a profile with linear prefill and decode times and one outlier."""
    lines = [
        f"mine,rtx,2,{prompt},{batch},128,{40 + 0.1 * prompt * batch},{20 + 0.5 * batch}\n" for prompt, batch in SHAPES
    ]
    path = tmp_path / "profile.csv"
    path.write_text(HEADER + "".join(lines) + "mine,rtx,2,512,128,128,90,80\n", encoding="utf-8")
    return path


def invoke(*arguments):
    return CliRunner().invoke(app, ["fit", *map(str, arguments)], env={"COLUMNS": "120"})


def test_fit_writes_and_shows(profile, tmp_path):
    out = tmp_path / "c.toml"
    result = invoke(
        profile, "-o", out, "--source", "my rack", "--date", "2025-06-01", "--note", "rtx=fans at full speed"
    )
    assert result.exit_code == 0, result.exception
    (fit,) = read_calibrations(out)
    assert (fit.pair, fit.rows, fit.source, fit.date) == ("mine on rtx TP2", 13, "my rack", "2025-06-01")
    assert "fans at full speed" in fit.basis
    assert fit.decode.sequence_ms == pytest.approx(0.5, rel=0.01)
    assert "mine on rtx TP2" in result.stdout
    assert f"{fit.prefill_error:.1%}" in result.stdout
    assert "dropped: mine on rtx TP2: 1 rows: prompt_size 512, batch_size 128" in result.stderr
    assert f"wrote 1 calibrations to {out}" in result.stderr


def test_source_and_date_default_to_the_file(profile, tmp_path):
    """The default source of a calibration is the profile's file name, and the default date is the file's date."""
    out = tmp_path / "c.toml"
    assert invoke(profile, "-o", out).exit_code == 0
    (fit,) = read_calibrations(out)
    assert fit.source == "profile.csv"
    assert len(fit.date) == len("2025-06-01")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--date", "June"], "not a date"),
        (["--note", "fans"], "HARDWARE=TEXT"),
        (["--note", "gtx=fans"], "no hardware gtx"),
    ],
)
def test_wrong_flags_are_one_sentence(profile, tmp_path, flags, says):
    out = tmp_path / "c.toml"
    result = invoke(profile, "-o", out, *flags)
    assert isinstance(result.exception, ConfigurationError)
    assert says in str(result.exception)
    assert not out.exists()


def test_a_profile_or_folder_that_is_not_there_is_one_sentence(profile, tmp_path):
    assert "cannot read profile" in str(invoke(tmp_path / "no.csv", "-o", tmp_path / "c.toml").exception)
    assert "cannot be written" in str(invoke(profile, "-o", tmp_path / "no" / "c.toml").exception)


def test_the_profile_is_not_written_over(profile):
    """If `--output` is the path of the profile, the command fails and the profile stays unchanged."""
    before = profile.read_text()
    error = invoke(profile, "--output", profile).exception
    assert isinstance(error, ConfigurationError)
    assert "is an input file" in str(error)
    assert profile.read_text() == before
