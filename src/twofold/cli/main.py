"""Entry point of `twofold`. Imports the module of a command when the command is used."""

import json
import sys
from importlib import import_module
from typing import Any, Final, NamedTuple

import typer

from twofold import __version__
from twofold.cli.settings import Command, Group
from twofold.errors import UserError


class Entry(NamedTuple):
    """A `twofold` command: the module, the name of the function or Typer app in the module, and the help text."""

    module: str
    name: str
    help: str


COMMANDS: Final = {
    "serve": Entry("twofold.cli.serve.command", "serve", "Serve a model behind the OpenAI API."),
    "route": Entry("twofold.cli.serve.route", "route", "Put the OpenAI API in front of vLLM servers."),
    "join": Entry("twofold.cli.serve.join", "join", "Run workers on this host for a service on another."),
    "keygen": Entry("twofold.cli.serve.join", "keygen", "Write a cluster key."),
    "bench": Entry("twofold.cli.bench", "bench", "Load an OpenAI-compatible endpoint."),
    "simulate": Entry("twofold.cli.simulate.command", "simulate", "Simulate a workload on a cluster."),
    "plan": Entry("twofold.cli.plan.command", "plan", "Find the best machines for a workload."),
    "characterize": Entry("twofold.cli.characterize.command", "characterize", "Measure an instance and fit a profile."),
    "deploy": Entry("twofold.kubernetes.deploy", "deploy", "Write a plan as Kubernetes objects or Helm values."),
    "torture": Entry("twofold.cli.torture", "torture", "Compare the answers of a service under faults."),
    "verify": Entry("twofold.cli.verify", "verify", "Compare a live service with its simulation."),
    "calibrate": Entry("twofold.cli.calibrate", "app", "Fit performance models to measurements."),
    "catalog": Entry("twofold.cli.catalog", "app", "Show machines, models, links and storage tiers."),
    "trace": Entry("twofold.cli.trace", "app", "Show, convert, rescale and generate traces."),
    "model": Entry("twofold.cli.model", "app", "Create or get models to try things with."),
    "chat": Entry("twofold.cli.chat", "chat", "Talk to an OpenAI-compatible endpoint."),
    "demo": Entry("twofold.demo", "demo", "Compare split and colocated serving on this machine."),
    "doctor": Entry("twofold.cli.serve.doctor", "doctor", "Show what this machine has, and what to run."),
    "pools": Entry("twofold.cli.pools", "app", "Show and set the roles of running workers."),
}


class LazyGroup(Group):
    """Command group that imports each command on first use."""

    def resolve_command(self, ctx: typer.Context, args: list[str]) -> Any:  # type: ignore[override]  # noqa: ANN401
        if args and args[0] in COMMANDS:
            self.commands[args[0]] = load(args[0])
        if args[:1] == ["serve"] and "--" in args:  # the rest are flags of the engine
            end = args.index("--")
            args = [*args[:end], "--engine-args", json.dumps(args[end + 1 :])]
        return super().resolve_command(ctx, args)


def load(name: str) -> Any:  # noqa: ANN401  (Typer's commands have no public type)
    """Import a command or group of commands by name."""
    entry = COMMANDS[name]
    found = getattr(import_module(entry.module), entry.name)
    if not isinstance(found, typer.Typer):
        single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        single.command(name, cls=Command)(found)
        found = single
    loaded = typer.main.get_command(found)
    loaded.name = name
    return loaded


def _not_loaded() -> None:
    """Placeholder for a command that is not imported yet."""


app = typer.Typer(
    name="twofold",
    cls=LazyGroup,
    help="Plan, simulate and serve large language models with prefill and decode on separate pools.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
for _name, _entry in COMMANDS.items():
    app.command(_name, help=_entry.help)(_not_loaded)


def _print_version(wanted: bool) -> None:
    if wanted:
        kernel = str(import_module("twofold.simulation.kernel").__file__)
        typer.echo(f"twofold {__version__} ({'pure Python' if kernel.endswith('.py') else 'compiled'} simulator)")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, metavar="", help="Show the version and exit."
    ),
) -> None:
    """Handle the options of `twofold` itself, such as --version."""


def main() -> None:
    """Run the command line. User errors are printed as one line."""
    try:
        code = app(standalone_mode=False)
    except UserError as error:
        code = _fail(str(error))
    except typer.TyperException as error:
        code = _fail(error.format_message(), error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except BrokenPipeError:  # the reader has closed the pipe
        code = 141
    except OSError as error:
        code = _fail(f"{error.filename or 'cannot write the output'}: {error.strerror or repr(error)}", 1)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int = 2) -> int:
    if message:  # empty if the help is shown instead
        typer.echo(f"twofold: {message}", err=True)
    return code


if __name__ == "__main__":
    main()
