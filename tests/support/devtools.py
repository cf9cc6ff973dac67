"""Chromium's own protocol over a pipe: pages at any width, light, dark and as printed."""

import base64
import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.browser import HERE, flags

MEASURE = (HERE / "measure.js").read_text()
DRAWN = """new Promise((done) => {
  const wanted = document.querySelectorAll("script[data-for]").length;
  const look = () => document.querySelectorAll(".picture[data-drawn]").length >= wanted ? done()
    : setTimeout(look, 5);
  look();
})"""
FIRST = """new MutationObserver((_, all) => {
  if (!document.querySelector(".picture .main-svg .trace, .picture .main-svg .points")) return;
  all.disconnect();
  requestAnimationFrame(() => setTimeout(() => { window.firstPicture = performance.now(); }));
}).observe(document, { childList: true, subtree: true });"""
PAPER = 688, 1016  # A4 with margins of 14 mm [CSS pixels]


class Browser:
    """One Chromium for many pages."""

    def __init__(self, send: int, receive: int) -> None:
        self._project_output, self._in = os.fdopen(send, "wb"), os.fdopen(receive, "rb")
        self._number, self._rest = 0, b""
        self._events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", {"url": "about:blank"})["targetId"]
        attached = self.call("Target.attachToTarget", {"targetId": target, "flatten": True})
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.page(f"{domain}.enable")

    def close(self) -> None:
        """Let go of the pipe."""
        for end in (self._in, self._project_output):
            end.close()

    def call(self, method: str, parameters: Any = None, session: str = "") -> Any:
        """A command's result; events that come in between are kept."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters or {}}
        if session:
            message["sessionId"] = session
        self._project_output.write(json.dumps(message).encode() + b"\0")
        self._project_output.flush()
        while True:
            found = self._read()
            if found.get("id") == self._number:
                assert "error" not in found, (method, found["error"])
                return found["result"]
            self._events.append(found)

    def page(self, method: str, **parameters: Any) -> Any:
        return self.call(method, parameters, self._session)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            more = os.read(self._in.fileno(), 1 << 20)
            assert more, "Chromium is gone"
            self._rest += more
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)  # type: ignore[no-any-return]

    def open(self, place: Path, width: int, scheme: str = "light", media: str = "screen") -> None:
        """Load a page at a width, in a colour scheme, for a screen or as printed."""
        self._events.clear()
        self.page("Emulation.setEmulatedMedia", media=media,
                  features=[{"name": "prefers-color-scheme", "value": scheme}])  # fmt: skip
        self.page("Emulation.setDeviceMetricsOverride", width=width, height=900,
                  deviceScaleFactor=1, mobile=False)  # fmt: skip
        self.page("Page.navigate", url=place.as_uri())
        self.run(
            "new Promise((done) => document.readyState === 'complete' ? done() : "
            "addEventListener('load', done))"
        )
        self.run(DRAWN)
        self.run("new Promise((done) => requestAnimationFrame(() => setTimeout(done, 150)))")

    def timed(self, place: Path, width: int) -> dict[str, float]:
        """Until the first picture is there and until all are: on the wall, on the processor. [s]

        As for a reader whose developer tools are shut: with them open V8 keeps where every error
        was made that a script catches, for which it reads all of plotly.js three times more.
        """
        self.page("Runtime.disable")
        self.page("Performance.enable", timeDomain="threadTicks")
        script = self.page("Page.addScriptToEvaluateOnNewDocument", source=FIRST)["identifier"]
        self.page("Page.navigate", url=place.as_uri())
        wall = self.run(
            "new Promise((done) => { const look = () => window.firstPicture ? "
            "done(window.firstPicture) : setTimeout(look, 1); look(); })"
        )
        first = self._spent()
        self.run(DRAWN)
        every = self._spent()
        self.page("Page.removeScriptToEvaluateOnNewDocument", identifier=script)
        self.page("Performance.disable")
        self.page("Runtime.enable")
        return {"first_wall_s": wall / 1e3, "first_cpu_s": first, "all_cpu_s": every}

    def _spent(self) -> float:
        """CPU time of the page's main thread since it was opened. [s]"""
        found = {m["name"]: m["value"] for m in self.page("Performance.getMetrics")["metrics"]}
        return float(found["TaskDuration"])

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        found = self.page(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def look(self) -> Any:
        """Overflow, overlaps, headings, cells, lanes and bars of the page that is open."""
        found = self.run(f"({MEASURE})()")
        found["said"] = [e["params"] for e in self._events if e.get("method") in SAID]
        found["requests"] = [
            e["params"]["request"]["url"]
            for e in self._events
            if e.get("method") == "Network.requestWillBeSent"
            and not e["params"]["request"]["url"].startswith(("file:", "data:", "blob:"))
        ]
        return found

    def shot(self, out: Path) -> None:
        """A picture of the whole page."""
        size = self.page("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        data = self.page("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)["data"]
        out.write_bytes(base64.b64decode(data))

    def paged(self, place: Path) -> None:
        """Load a page as printed on A4, its sheets side by side."""
        width, height = PAPER
        self.open(place, width, media="print")
        self.run(
            f"dispatchEvent(new Event('beforeprint')), document.head.insertAdjacentHTML("
            f"'beforeend', '<style>body{{columns:{width}px;column-gap:32px;height:{height}px;"
            f"column-fill:auto;width:{width}px}} main,footer{{max-width:none;padding:0}}"
            f"</style>')"
        )
        self.run("new Promise((done) => setTimeout(done, 300))")


SAID = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """A Chromium that is ended afterwards."""
    to_read, send = os.pipe()
    receive, to_write = os.pipe()

    def moved() -> None:  # the protocol's places are 3 and 4
        low, high = os.dup(to_read), os.dup(to_write)
        os.dup2(low, 3)
        os.dup2(high, 4)

    process = subprocess.Popen(
        [*flags(folder / "profile"), "--remote-debugging-pipe", "--no-first-run"],
        pass_fds=(3, 4), preexec_fn=moved, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(to_read)
    os.close(to_write)
    found = None
    try:
        found = Browser(send, receive)
        yield found
    finally:
        process.terminate()
        if found is not None:
            found.close()
        process.wait(timeout=20)
