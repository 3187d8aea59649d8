"""Headless Chromium, driven over the DevTools protocol."""

import asyncio
import base64
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

START_S = 60.0


def chromium() -> str | None:
    """Return the path of the Chromium executable, or None if there is none."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return next((path for name in names if (path := shutil.which(name))), None)


class Page:
    """A browser page, which records JavaScript errors."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.errors: list[str] = []
        self._socket = socket
        self._numbers = itertools.count()
        self._loaded = asyncio.Event()
        self._answers: dict[int, asyncio.Future[dict]] = {}

    async def listen(self) -> None:
        async for message in self._socket:
            said = json.loads(message.data)
            if "id" in said:
                self._answers.pop(said["id"]).set_result(said)
            elif said["method"] == "Page.loadEventFired":
                self._loaded.set()
            elif said["method"] == "Runtime.exceptionThrown":
                self.errors.append(said["params"]["exceptionDetails"]["exception"]["description"])
            elif said["method"] == "Log.entryAdded" and said["params"]["entry"]["level"] == "error":
                self.errors.append(said["params"]["entry"]["text"])

    async def call(self, method: str, **parameters: object) -> dict:
        number = next(self._numbers)
        self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        answer = await self._answers[number]
        assert "error" not in answer, answer["error"]
        return answer["result"]

    async def open(self, url: str, *, width: int = 1280, height: int = 900, scheme: str = "light") -> None:
        for domain in ("Page", "Runtime", "Log"):
            await self.call(f"{domain}.enable")
        await self.size(width, height)
        await self.scheme(scheme)
        self._loaded.clear()
        await self.call("Page.navigate", url=url)
        await self._loaded.wait()

    async def size(self, width: int, height: int) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )

    async def scheme(self, name: str) -> None:
        """Set the preferred colour scheme, `light` or `dark`."""
        feature = {"name": "prefers-color-scheme", "value": name}
        await self.call("Emulation.setEmulatedMedia", features=[feature])

    async def evaluate(self, expression: str) -> object:
        """Return the value of a JavaScript expression; if it is a promise, wait for its result."""
        answer = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def until(self, expression: str, *, tries: int = 6000, pause_s: float = 0.1) -> None:
        """Poll until the JavaScript `expression` is true."""
        for _ in range(tries):
            if await self.evaluate(f"Boolean({expression})"):
                return
            await asyncio.sleep(pause_s)
        raise AssertionError(f"timeout waiting for {expression}; errors: {self.errors}")

    async def text(self, selector: str) -> str:
        return str(await self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText"))

    async def screenshot(self, path: Path) -> None:
        """Write an image of the whole page to a PNG file."""
        shot = await self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))  # noqa: ASYNC240 (nothing else runs here)


@asynccontextmanager
async def browsing(executable: str) -> AsyncIterator[Page]:
    """Start a browser with an empty page; stop it and delete its profile afterwards."""
    flags = ["--headless", "--remote-debugging-port=0", "--no-first-run", "--disable-gpu", "--disable-dev-shm-usage"]
    if os.geteuid() == 0:
        flags.append("--no-sandbox")  # the sandbox does not run as root
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        process = await asyncio.create_subprocess_exec(
            executable,
            *flags,
            f"--user-data-dir={home}",
            "about:blank",
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            port = await _port(Path(home), process)
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json/list") as response:
                    (target, *_) = [each for each in await response.json() if each["type"] == "page"]
                async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                    page = Page(socket)
                    listening = asyncio.create_task(page.listen())
                    try:
                        yield page
                    finally:
                        listening.cancel()
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()


async def _port(home: Path, process: asyncio.subprocess.Process) -> int:
    file = home / "DevToolsActivePort"
    async with asyncio.timeout(START_S):
        while not (file.exists() and file.read_text().count("\n")):
            assert process.returncode is None, "the browser ended while starting"
            await asyncio.sleep(0.05)
    return int(file.read_text().splitlines()[0])
