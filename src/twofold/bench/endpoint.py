"""Discovery of an OpenAI-compatible endpoint and its models."""

import aiohttp
import msgspec

from twofold.errors import ConfigurationError

_TIMEOUT_S = 30.0


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Address and model of an OpenAI-compatible server. Facts that the server does not report are None."""

    base_url: str
    model: str
    max_model_len: int | None = None
    vocab_size: int | None = None
    root: str | None = None  # directory or id from which vLLM loaded the model
    owned_by: str | None = None


class _Card(msgspec.Struct, frozen=True):
    id: str
    max_model_len: int | None = None
    vocab_size: int | None = None
    root: str | None = None
    owned_by: str | None = None


class _Cards(msgspec.Struct, frozen=True):
    data: list[_Card]


def root_url(url: str) -> str:
    """Return `url` without a trailing slash or `/v1`. Raises ConfigurationError if `url` is not an HTTP address."""
    root = url.strip().rstrip("/").removesuffix("/v1").rstrip("/")
    if not root.startswith(("http://", "https://")) or root.endswith("/"):
        raise ConfigurationError(f"{url!r} is not an HTTP address such as http://127.0.0.1:8000")
    return root


def authorization(api_key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


async def discover(base_url: str, model: str | None = None, api_key: str | None = None) -> Endpoint:
    """Find a model on an OpenAI-compatible server. Return the server's URL and the model's properties.

    If `model` is None, choose the first model that the server lists. Raise ConfigurationError if the server is
    unreachable, rejects the API key or does not serve the model.
    """
    root = root_url(base_url)
    status, body = await http_get(f"{root}/v1/models", api_key)
    if status in (401, 403):
        raise ConfigurationError(f"{root} refuses the API key: give --api-key or set OPENAI_API_KEY")
    if status != 200:
        return _unlisted(root, model, f"answers HTTP {status} to GET /v1/models")
    try:
        cards = msgspec.json.decode(body, type=_Cards).data
    except msgspec.DecodeError:
        return _unlisted(root, model, "does not list its models as OpenAI's API does")
    for card in cards:
        if model in (None, card.id):
            facts = msgspec.structs.asdict(card)
            return Endpoint(base_url=root, model=facts.pop("id"), **facts)
    served = ", ".join(card.id for card in cards) or "no model"
    raise ConfigurationError(f"{root} serves {served}" + (f", not {model}" if model else ""))


async def http_get(url: str, api_key: str | None) -> tuple[int, bytes]:
    """Return the status and body of a GET request. Raises ConfigurationError if the server does not answer."""
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=authorization(api_key)) as session,
            session.get(url) as response,
        ):
            return response.status, await response.read()
    except aiohttp.InvalidURL as error:
        raise ConfigurationError(f"{url} is not an HTTP address such as http://127.0.0.1:8000") from error
    except TimeoutError as error:
        raise ConfigurationError(f"no answer from {url} in {_TIMEOUT_S:.0f} s") from error
    except aiohttp.ClientError as error:
        raise ConfigurationError(f"no OpenAI endpoint can be reached at {url}: {error}") from error


def _unlisted(root: str, model: str | None, why: str) -> Endpoint:
    if model is None:
        raise ConfigurationError(f"{root} {why}: give --model, or another URL")
    return Endpoint(base_url=root, model=model)
