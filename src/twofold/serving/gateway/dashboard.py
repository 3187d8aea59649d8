"""The dashboard: one page without outside assets, and the JSON that it is drawn from."""

import base64
import hashlib
import re
import time
from collections.abc import Callable
from importlib import resources

import msgspec
from fastapi.responses import Response

from twofold.serving.service import Service

# However many look, the service is looked at this often at most.
PERIOD_S = 1.0


class Dashboard:
    """Serves the page and its data; all viewers share one snapshot a second."""

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


def _policy(page: str) -> str:
    """Nothing runs, and nothing is loaded, but what is in the page."""
    hashes = {
        tag: " ".join(
            f"'sha256-{_hash(text)}'" for text in re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        )
        for tag in ("script", "style")
    }
    return (
        f"default-src 'none'; script-src {hashes['script']}; style-src {hashes['style']}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
