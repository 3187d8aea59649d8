"""The gateway's web application: its HTTP routes and the dashboard."""

import base64
import hashlib
import re
import time
from collections.abc import Awaitable, Callable
from functools import partial
from importlib import resources

import msgspec
from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp

import twofold
from twofold.engine.grammar import GrammarMatchers
from twofold.errors import TwofoldError, UnsupportedError
from twofold.instance import Role
from twofold.serving.controller.service import ServedModel, Service
from twofold.serving.gateway.endpoints.chat import chat
from twofold.serving.gateway.endpoints.completions import complete
from twofold.serving.gateway.endpoints.messages import count_tokens, create_message
from twofold.serving.gateway.endpoints.responses import create_response, delete_response, get_input, get_response
from twofold.serving.gateway.endpoints.tokens import detokenize, tokenize
from twofold.serving.gateway.gateway import BodyReader, Forwarder, Gateway, RequestLimits, RequestRunner, read_struct
from twofold.serving.gateway.keys import KeyRing
from twofold.serving.gateway.middleware import PostEndpoint, RequestMiddleware
from twofold.serving.gateway.openapi import openapi
from twofold.serving.gateway.response_store import ResponseStore
from twofold.serving.gateway.responses import (
    Health,
    ModelCard,
    ModelList,
    Version,
    answer_error,
    answer_http_error,
    json_response,
)
from twofold.serving.gateway.tokenizer import TextTokenizer
from twofold.serving.gateway.tools.families import BY_CHECKPOINT, AnswerParsers

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# Minimum seconds between two snapshots, for any number of viewers.
PERIOD_S = 1.0
# Endpoints of vLLM that run the model, and that this gateway has not.
FORWARDED: tuple[str, ...] = ("/pooling", "/classify", "/score", "/rerank", "/v2/rerank", "/v2/embed")
FORWARDED += ("/v1/embeddings", "/v1/score", "/v1/rerank", "/v1/audio/transcriptions", "/v1/audio/translations")

Endpoint = Callable[[Gateway, Request], Awaitable[Response]]


class Dashboard:
    """Serves the dashboard page and its data."""

    def __init__(self, service: Service, clock: Callable[[], float] = time.monotonic) -> None:
        self._service, self._clock = service, clock
        self._page = resources.files(__package__).joinpath("dashboard.html").read_text("utf-8")
        self._headers = {
            "Cache-Control": "no-cache",
            "Content-Security-Policy": _policy(self._page),
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }
        self._data = b""
        self._taken_s = float("-inf")

    def page(self) -> Response:
        return Response(self._page, media_type="text/html; charset=utf-8", headers=self._headers)

    def data(self) -> Response:
        now = self._clock()
        if now - self._taken_s >= PERIOD_S:
            self._data = msgspec.json.encode(self._service.snapshot())
            self._taken_s = now
        return Response(self._data, media_type="application/json", headers={"Cache-Control": "no-store"})

    async def history(self, _request: Request) -> Response:
        return json_response(self._service.history())


def _policy(page: str) -> str:
    """Return a content security policy that allows only the scripts and styles inside `page`."""
    hashes: dict[str, str] = {}
    for tag in ("script", "style"):
        parts = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digests = (base64.b64encode(hashlib.sha256(part.encode()).digest()).decode() for part in parts)
        hashes[tag] = " ".join(f"'sha256-{digest}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {hashes['script']}; style-src {hashes['style']}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


class GatewaySettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a gateway. With `keys`, /v1, /pools and the dashboard's data require an API key.

    `parsers` names the formats of tool calls and reasoning in answers. `constrains` tells whether the service can
    constrain outputs, and `checks_constraints` whether constraints are checked here.
    """

    keys: KeyRing | None = None
    limits: RequestLimits = RequestLimits()
    parsers: AnswerParsers = BY_CHECKPOINT
    constrains: bool = True
    checks_constraints: bool = True


def create_app(
    service: Service, tokenizer: TextTokenizer | None, settings: GatewaySettings, forwarder: Forwarder | None = None
) -> ASGIApp:
    """Create the gateway application. Without a tokenizer, prompts are ids. `forwarder` gets what it cannot run."""
    gateway = _gateway(service, tokenizer, settings, forwarder)
    app = FastAPI(openapi_url=None, redirect_slashes=False)
    app.add_exception_handler(Exception, answer_error)
    app.add_exception_handler(TwofoldError, answer_error)
    app.add_exception_handler(HTTPException, answer_http_error)
    posted: dict[str, PostEndpoint] = {**_stateless(gateway), "/v1/responses": partial(create_response, gateway)}
    for path, endpoint in posted.items():
        app.add_route(path, endpoint, methods=["POST"])
    _add_api(app, gateway)
    _add_operations(app, service, gateway.bodies, keys=settings.keys is not None)
    return RequestMiddleware(app, settings.keys, posted)


def create_front(
    service: RequestRunner,
    tokenizer: TextTokenizer | None,
    settings: GatewaySettings,
    app: ASGIApp,
    forwarder: Forwarder | None,
) -> ASGIApp:
    """Create a gateway that answers requests without state itself; `app` answers all others."""
    return RequestMiddleware(app, settings.keys, _stateless(_gateway(service, tokenizer, settings, forwarder)))


def _gateway(
    service: RequestRunner, tokenizer: TextTokenizer | None, settings: GatewaySettings, forwarder: Forwarder | None
) -> Gateway:
    grammars, limits = None, settings.limits
    if settings.checks_constraints and tokenizer is not None:
        grammars = GrammarMatchers(tokenizer.backend.to_str, service.model.vocab_size, ())
    return Gateway(
        service=service,
        tokenizer=tokenizer,
        limits=limits,
        parsers=settings.parsers,
        responses=ResponseStore(limits.stored_response_bytes, limits.stored_response_s),
        bodies=BodyReader(limits, keeps=forwarder is not None or service.takes_text),
        constrains=settings.constrains and (tokenizer is not None or not settings.checks_constraints),
        grammars=grammars,
        forwarder=forwarder,
    )


def _stateless(gateway: Gateway) -> dict[str, PostEndpoint]:
    return {
        "/v1/completions": _or_forwarded(complete, gateway),
        "/v1/chat/completions": _or_forwarded(chat, gateway),
        "/v1/messages": _or_forwarded(create_message, gateway),
    }


def _add_api(app: FastAPI, gateway: Gateway) -> None:
    app.add_route("/v1/responses/{id}", partial(get_response, gateway), methods=["GET"])
    app.add_route("/v1/responses/{id}", partial(delete_response, gateway), methods=["DELETE"])
    app.add_route("/v1/responses/{id}/input_items", partial(get_input, gateway), methods=["GET"])
    app.add_route("/v1/messages/count_tokens", partial(count_tokens, gateway), methods=["POST"])
    app.add_route("/tokenize", partial(tokenize, gateway), methods=["POST"])
    app.add_route("/detokenize", partial(detokenize, gateway), methods=["POST"])
    if gateway.forwarder is not None:
        for path in FORWARDED:
            app.add_route(path, partial(_forward, gateway, gateway.forwarder), methods=["POST"])

    @app.get("/v1/models")
    async def models() -> Response:
        model = gateway.service.model
        return json_response(ModelList(data=[_card(model, name) for name in (model.name, *model.adapters)]))

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        gateway.check_model(name)
        return json_response(_card(gateway.service.model, name))


async def _forward(gateway: Gateway, forwarder: Forwarder, request: Request) -> Response:
    return forwarder.answer(request, await gateway.bodies.read(request))


def _or_forwarded(endpoint: Endpoint, gateway: Gateway) -> Callable[[Request], Awaitable[Response]]:
    """Return an endpoint whose requests go to a server as they are if the gateway does not support them."""
    forwarder = gateway.forwarder
    if forwarder is None:
        return partial(endpoint, gateway)

    async def answer(request: Request) -> Response:
        try:
            return await endpoint(gateway, request)
        except UnsupportedError:
            return forwarder.answer(request, request.state.body)

    return answer


class RoleChange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /pools`: an instance and its new role."""

    instance: str
    role: Role


def _add_operations(app: FastAPI, service: Service, bodies: BodyReader, *, keys: bool) -> None:

    @app.get("/health")
    @app.api_route("/ping", methods=["GET", "POST"])
    async def health() -> Response:
        ready = service.ready()
        return json_response(Health(status="ready" if ready else "not ready"), 200 if ready else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics(), media_type=METRICS_TYPE)

    @app.get("/pools")
    async def pools() -> Response:
        return json_response({"pools": service.pools(), "replans": service.replans()})

    @app.post("/pools")
    async def set_role(request: Request) -> Response:
        change = await read_struct(request, RoleChange, bodies)
        service.set_role(change.instance, change.role)
        return json_response({"pools": service.pools(), "replans": service.replans()})

    @app.get("/version")
    async def version() -> Response:
        return json_response(Version(version=twofold.__version__))

    described = msgspec.json.encode(openapi(service.model.name, keys=keys))

    @app.get("/openapi.json")
    async def description() -> Response:
        return Response(described, media_type="application/json")

    @app.get("/docs")
    async def docs() -> Response:
        return get_swagger_ui_html(openapi_url="/openapi.json", title=f"Twofold: {service.model.name}")

    dashboard = Dashboard(service)

    @app.get("/dashboard")
    async def page() -> Response:
        return dashboard.page()

    @app.get("/dashboard/data")
    async def data() -> Response:
        return dashboard.data()

    app.add_route("/dashboard/history", dashboard.history)


def _card(model: ServedModel, name: str) -> ModelCard:
    return ModelCard(
        id=name,
        created=model.created,
        root=model.adapters.get(name, model.path),
        parent=model.name if name in model.adapters else None,
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
    )
