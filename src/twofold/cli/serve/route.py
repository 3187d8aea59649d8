"""`twofold route`: run a gateway in front of servers that already run."""

from twofold.cli.serve.route_settings import RouteSettings
from twofold.cli.settings import command


@command
def route(settings: RouteSettings) -> None:
    """Put the OpenAI API of Twofold in front of running servers of vLLM, SGLang or other engines.

    `--prefill` servers compute prompts and `--decode` servers generate output; the servers move the KV
    cache themselves. `--colocated` servers run both phases. Nothing is installed on the servers.
    The servers' API key, if any, is read from TWOFOLD_SERVER_API_KEY. The routers splitwise and jsq-planned change
    the roles of servers, and need servers with vLLM's kv_role set to kv_both.
    """
    from twofold.cli.serve.route_run import run  # noqa: PLC0415  (slow to import)

    run(settings)
