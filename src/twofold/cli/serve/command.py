"""`twofold serve`: serve a model behind the OpenAI API, with prefill and decode disaggregated or colocated."""

from twofold.cli.serve.settings import ServeSettings
from twofold.cli.settings import command


@command
def serve(settings: ServeSettings) -> None:
    """Serve MODEL behind the OpenAI API.

    Prefill and decode run in separate workers, and the KV cache is transferred layer by layer while it is computed.
    `--colocated N` serves without disaggregation. `--engine emulated --cluster FILE` runs no model: each batch takes
    the time that the performance model predicts for the machines in FILE.
    """
    from twofold.cli.serve.run import run  # noqa: PLC0415  (slow to import)

    run(settings)
