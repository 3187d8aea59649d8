"""`twofold`: one command per file; a user's mistake ends in one sentence on stderr and a non-zero exit."""

import sys

import typer

from twofold import __version__
from twofold.cli import (
    bench,
    calibrate,
    catalog,
    deploy,
    join,
    keygen,
    model,
    plan,
    pools,
    route,
    serve,
    simulate,
    trace,
    verify,
)
from twofold.errors import UserError

app = typer.Typer(
    name="twofold",
    help="Plan, simulate and serve large language models in two phases: prefill and decode on separate pools.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("serve")(serve.serve)
app.command("route")(route.route)
app.command("join")(join.join)
app.command("keygen")(keygen.keygen)
app.command("bench")(bench.bench)
app.command("simulate")(simulate.simulate)
app.command("plan")(plan.plan)
app.command("deploy")(deploy.deploy)
app.command("verify")(verify.verify)
app.add_typer(calibrate.app, name="calibrate")
app.add_typer(catalog.app, name="catalog")
app.add_typer(trace.app, name="trace")
app.add_typer(model.app, name="model")
app.add_typer(pools.app, name="pools")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"twofold {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Show the version and exit."
    ),
) -> None:
    """The options that every command shares."""


def main() -> None:
    """Entry point: run a command and turn mistakes into one sentence."""
    try:
        code = app(standalone_mode=False)
    except UserError as error:
        code = _complain(str(error))
    except typer.TyperException as error:
        code = _complain(error.format_message(), error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except BrokenPipeError:  # the reader has seen enough
        code = 141
    except OSError as error:
        code = _complain(f"cannot write the output: {error.strerror or error}", 1)
    sys.exit(code if isinstance(code, int) else 0)


def _complain(sentence: str, code: int = 2) -> int:
    if sentence:  # empty where the help was shown instead
        typer.echo(f"twofold: {sentence}", err=True)
    return code


if __name__ == "__main__":
    main()
