"""Commands generated from settings classes: options, help texts, validation and `--config` files."""

import pytest
import typer
from typer.testing import CliRunner

from twofold.cli.main import COMMANDS, load
from twofold.cli.settings import Command, Settings, command, flag, flags_of, summary
from twofold.errors import ConfigurationError
from twofold.scheduling.batchers import BATCHERS


class ExampleSettings(Settings):
    name: str = flag("Name [of it].", ..., positional=True, metavar="NAME")
    limit: int | None = flag("Limit.", ge=1, unset="16")
    share: float = flag("Share.", 0.5, gt=0, le=1)
    quick: bool = flag("Be quick.", False)
    kind: str = flag("Kind.", "one", choices={"one": "The first.", "two": "The second."})
    tags: tuple[str, ...] = flag("Tag.", ())


def run(*arguments):
    found = []

    @command
    def example(settings: ExampleSettings) -> None:
        found.append(settings)

    app = typer.Typer(add_completion=False)
    app.command(cls=Command)(example)
    result = CliRunner().invoke(app, [str(each) for each in arguments], env={"COLUMNS": "100"})
    if isinstance(result.exception, ConfigurationError):
        raise result.exception
    return found[0] if found else result.output


def test_options_follow_from_fields():
    assert run("a", "--limit", 3, "--quick", "--tags", "x", "--tags", "y") == ExampleSettings(
        name="a", limit=3, quick=True, tags=("x", "y")
    )


def test_help_shows_defaults_choices_and_brackets_but_no_types_of_switches():
    text = run("--help")
    for words in ("Name [of it].", "[default: 16]", "[default: 0.5]", "one: The first.", "--no-quick"):
        assert words in text
    assert "<bool>" not in text


def test_the_command_line_overrides_a_config_file(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("name: a\nlimit: 3\nquick: true\ntags: [x, y]\n")
    assert run("--config", path) == ExampleSettings(name="a", limit=3, quick=True, tags=("x", "y"))
    assert run("b", "--config", path, "--limit", 4, "--no-quick", "--tags", "z") == ExampleSettings(
        name="b", limit=4, tags=("z",)
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("limits: 3", "limits is no flag of .*; did you mean limit?"),
        ("limit: {a: 1}", "limit needs a value"),
        ("- a", "is not a mapping of flags"),
        ("a: [", "is not YAML"),
        ("limit: 0", "--limit 0 is out of range: give at least 1"),
        ("kind: three", "--kind 'three' is unknown: choose one of one, two"),
    ],
)
def test_rejects_an_invalid_config_file(tmp_path, text, reason):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=reason):
        run("a", "--config", path)


def test_rejects_numbers_out_of_range():
    with pytest.raises(ConfigurationError, match="--share nan is out of range: give more than 0 and at most 1"):
        run("a", "--share", "nan")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_loads_and_has_help(name):
    assert load(name).help


def test_every_choice_has_a_help_text_of_its_own():
    settings = [Settings]
    for kind in settings:  # grows while it is walked
        settings += kind.__subclasses__()
    flags = {name: each for kind in settings for name, each in flags_of(kind).items() if each.choices}
    assert {"handoff", "rules", "router", "batcher"} <= flags.keys()
    for name, each in flags.items():
        texts = [summary(entry) for entry in each.choices.values()]
        assert all(texts), f"{name}: a choice without help"
        assert len(set(texts)) == len(texts), f"{name}: two choices with one help"


def test_flags_of_one_name_have_one_help():
    from twofold.cli.plan.settings import PlanSettings
    from twofold.cli.serve.settings import ServeSettings
    from twofold.cli.simulate.settings import SimulateSettings

    all_flags = [flags_of(kind) for kind in (ServeSettings, SimulateSettings, PlanSettings)]
    for name in ("batcher", "max_num_seqs", "max_num_batched_tokens", "handoff", "catalog"):
        assert len({flags[name].help for flags in all_flags}) == 1, name


@pytest.mark.parametrize("batcher", BATCHERS.values())
def test_a_compiled_class_is_described_by_its_source(batcher):
    """The help text of a class compiled with mypyc is read from its source file."""
    compiled = type(batcher.__name__, (), {"__module__": batcher.__module__})
    assert compiled.__doc__ is None
    assert summary(compiled) == summary(batcher) != ""
