"""`twofold simulate --controllers`, `--reports-every`, `--cells`: what they mean, and what they refuse."""

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from twofold.cli.simulate.command import simulate
from twofold.cli.simulate.spec import ControlFlags
from twofold.cluster.file import dump_cluster, parse_cluster, read_cluster
from twofold.cluster.spec import ControlSpec
from twofold.errors import ConfigurationError
from twofold.scheduling.cluster.shared import OwnLoad

app = typer.Typer()
app.command()(simulate)
CLUSTER = "2xh100:prefill,2xh100:decode"
RUN = (
    "azure-conv",
    "--rate",
    5,
    "--num-requests",
    40,
    "--cluster",
    CLUSTER,
    "--model",
    "llama2-70b",
    "--json",
)


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "160"})


def test_flags_come_to_be_part_of_the_cluster():
    """And nothing of them where none is given."""
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


def test_a_flag_overrides_what_the_file_says_and_leaves_the_rest():
    """A file has the whole of it."""
    made = parse_cluster(CLUSTER, model="llama2-70b")
    assert ControlFlags(None, None, None, None).given_to(made) is made
    spec = ControlFlags(4, None, None, "ignored").given_to(made)
    assert spec.control == ControlSpec(controllers=4, own_load=OwnLoad.IGNORED)
    again = read_cluster(dump_cluster(spec), "cluster.yaml")
    assert again == spec
    assert ControlFlags(None, 1.0, None, None).given_to(again).control == ControlSpec(
        controllers=4, own_load=OwnLoad.IGNORED, reports_every_s=1.0
    )


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--own-load", "guessed"), "--own-load guessed is none of followed, sent, ignored"),
        (("--controllers", 2), "the router splitwise cannot use load reports"),
        (("--router", "jsq", "--cells", 2), "cells need one of the routers cells:jsq, not jsq"),
        (("--router", "jsq", "--report-delay", -1), "report_delay_s must be seconds from 0"),
    ],
)
def test_mistakes_are_one_sentence(flags, reason):
    """Each says what would be right."""
    error = invoke(*RUN, *flags).exception
    assert isinstance(error, ConfigurationError)
    assert reason in str(error)


def test_a_file_that_says_what_nobody_knows_is_refused():
    """With what is known."""
    said = f"{dump_cluster(parse_cluster(CLUSTER, model='llama2-70b'))}control: {{own_load: guessed}}\n"
    with pytest.raises(ConfigurationError, match="guessed' is not one of followed, sent, ignored"):
        read_cluster(said, "cluster.yaml")
    with pytest.raises(ConfigurationError, match="unknown field controler"):
        read_cluster(said.replace("own_load: guessed", "controler: 2"), "cluster.yaml")
