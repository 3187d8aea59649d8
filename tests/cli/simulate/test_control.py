"""Tests of simulation flags: number of controllers, delay of load reports, and number of cells (instance groups)."""

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from support.clusters import dump_cluster
from twofold.cli.simulate.command import simulate
from twofold.cli.simulate.settings import SimulateSettings
from twofold.cli.simulate.spec import cluster_spec
from twofold.cluster.file import parse_cluster, read_cluster
from twofold.cluster.spec import ControlSpec
from twofold.errors import ConfigurationError
from twofold.hardware.catalog import load_catalog
from twofold.scheduling.cluster.shared import OwnLoad

app = typer.Typer()
app.command()(simulate)
CLUSTER = "2xh100:prefill,2xh100:decode"
RUN = ("azure-conv", "--rate", 5, "--num-requests", 40, "--cluster", CLUSTER, "--model", "llama2-70b", "--json")


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "160"})


def test_flags_come_to_be_part_of_the_cluster():
    """Flags such as `--cells` and `--controllers` set fields of the cluster spec."""
    flags = ("--router", "cells:jsq", "--cells", 2, "--controllers", 3, "--reports-every", 0.5)
    report = msgspec.json.decode(invoke(*RUN, *flags, "--own-load", "sent", "--report-delay", 0.1).stdout)
    assert report["counts"]["completed"] == 40
    assert report["spec"]["cells"] == 2
    assert report["spec"]["control"] == {
        "controllers": 3,
        "reports_every_s": 0.5,
        "report_delay_s": 0.1,
        "own_load": "sent",
    }
    assert not {"cells", "control"} & msgspec.json.decode(invoke(*RUN).stdout)["spec"].keys()


def test_a_flag_overrides_the_file_and_keeps_the_rest(tmp_path):
    """A flag overrides one field of the cluster file."""

    def spec(cluster=CLUSTER, model="llama2-70b", **flags):
        settings = SimulateSettings(workload="azure-conv", cluster=str(cluster), model=model, **flags)
        return cluster_spec(settings, load_catalog())[0]

    assert spec() == parse_cluster(CLUSTER, model="llama2-70b")
    made = spec(controllers=4, own_load="ignored")
    assert made.control == ControlSpec(controllers=4, own_load=OwnLoad.IGNORED)
    path = tmp_path / "cluster.yaml"
    path.write_text(dump_cluster(made))
    assert spec(path) == made
    assert spec(path, reports_every=1.0).control == ControlSpec(
        controllers=4, own_load=OwnLoad.IGNORED, reports_every_s=1.0
    )


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--own-load", "guessed"), "--own-load 'guessed' is unknown: choose one of followed, sent, ignored"),
        (("--controllers", 2), "the router splitwise cannot use load reports"),
        (("--router", "jsq", "--cells", 2), "cells need one of the routers cells:jsq, not jsq"),
        (("--router", "jsq", "--report-delay", -1), "report_delay_s must be seconds"),
    ],
)
def test_mistakes_are_one_sentence(flags, reason):
    """Invalid flags raise a `UserError` with the reason."""
    error = invoke(*RUN, *flags).exception
    assert isinstance(error, ConfigurationError)
    assert reason in str(error)


def test_invalid_control_sections_are_rejected():
    said = f"{dump_cluster(parse_cluster(CLUSTER, model='llama2-70b'))}control: {{own_load: guessed}}\n"
    with pytest.raises(ConfigurationError, match="guessed' is not one of followed, sent, ignored"):
        read_cluster(said, "cluster.yaml")
    with pytest.raises(ConfigurationError, match="unknown field controler"):
        read_cluster(said.replace("own_load: guessed", "controler: 2"), "cluster.yaml")
