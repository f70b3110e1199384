"""A headless Chromium, driven through its own protocol over two pipes: no driver, no package, no port.

Protocol: https://chromedevtools.github.io/devtools-protocol; `--remote-debugging-pipe` reads commands from file
descriptor 3 and writes answers and events to 4, each a JSON text that a zero byte ends.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless", "--remote-debugging-pipe", "--no-first-run", "--no-default-browser-check", "--disable-gpu",
    "--disable-extensions", "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--hide-scrollbars", "--force-color-profile=srgb",
)  # fmt: skip
LONGEST_S = 60.0
"""That an answer may take, on a machine that does much else."""
LOOKING = Path(__file__).with_name("looking.js")
KEYS = {"ArrowRight": 39, "ArrowLeft": 37, "Home": 36, "End": 35, " ": 32, "Tab": 9, "Enter": 13}


def executable() -> str | None:
    """A Chromium on the PATH."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """One browser with one page. Use as a context manager.

    Args:
        program: to run. profile: an empty folder for it.
    Attributes:
        requests: addresses that pages asked for, in order. problems: what consoles and scripts complained of.
    """

    def __init__(self, program: str, profile: Path) -> None:
        ours_in, theirs_out = os.pipe()
        theirs_in, ours_out = os.pipe()
        self._in, self._out = ours_in, ours_out
        root = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium refuses to run as root with its sandbox

        def place() -> None:  # as 3 and 4, wherever they were
            high_in, high_out = os.dup2(theirs_in, 60), os.dup2(theirs_out, 61)
            os.dup2(high_in, 3)
            os.dup2(high_out, 4)

        self._process = subprocess.Popen(
            [program, *FLAGS, *root, f"--user-data-dir={profile}", "about:blank"],
            close_fds=False, preexec_fn=place, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(theirs_in)
        os.close(theirs_out)
        self._held, self._number, self._session = b"", 0, ""
        self._events: list[dict[str, Any]] = []
        self.requests: list[str] = []
        self.problems: list[str] = []
        page = self._open_page()
        self._session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log", "DOM", "Accessibility"):
            self.call(f"{domain}.enable")
        self.call("Page.addScriptToEvaluateOnNewDocument", source=f"{{{LOOKING.read_text(encoding='utf-8')}}}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)
        os.close(self._out)

    def open(self, page: Path, *, width: int = 1280, height: int = 900, **media: str) -> None:
        """Show a page anew, wait until it is loaded, and forget what earlier ones asked for.

        Args:
            media: values of media features, with _ for -: ``prefers_color_scheme="dark"``.
        """
        self.requests.clear()
        self.problems.clear()
        self._events.clear()
        self.resize(width, height)
        features = [{"name": name.replace("_", "-"), "value": value} for name, value in media.items()]
        self.call("Emulation.setEmulatedMedia", features=features)
        self.call("Page.navigate", url=page.as_uri())
        self._until("Page.loadEventFired")

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression; a promise's, once it is kept."""
        told = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in told:
            raise AssertionError(f"{script}: {told['exceptionDetails'].get('exception', {}).get('description')}")
        return told["result"].get("value")

    def press(self, key: str, times: int = 1) -> None:
        """Press and release a key (`KEYS`)."""
        text = {" ": " ", "Enter": "\r"}.get(key)
        for _ in range(times):
            for kind in ("keyDown" if text else "rawKeyDown", "keyUp"):
                more = {"text": text} if text and kind == "keyDown" else {}
                code = "Space" if key == " " else key
                self.call(
                    "Input.dispatchKeyEvent", type=kind, key=key, code=code, windowsVirtualKeyCode=KEYS[key], **more
                )

    def click(self, selector: str) -> None:
        """Press the mouse in the middle of an element."""
        place = (
            f"(e => (e.scrollIntoView({{block: 'center', behavior: 'instant'}}), e.getBoundingClientRect().toJSON()))"
            f"(document.querySelector({json.dumps(selector)}))"
        )
        box = self.run(place)
        at = {"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2}
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **at)

    def names(self) -> list[tuple[str, str]]:
        """Role and name of everything that assistive technology is told of."""
        nodes = self.call("Accessibility.getFullAXTree")["nodes"]
        return [
            (n.get("role", {}).get("value", ""), n.get("name", {}).get("value", "")) for n in nodes if not n["ignored"]
        ]

    def picture(self, file: Path) -> None:
        """Save what the whole page looks like."""
        width, height = self.run("[innerWidth, document.documentElement.scrollHeight]")
        self.resize(width, height)
        told = self.call("Page.captureScreenshot", format="png")
        file.write_bytes(base64.b64decode(told["data"]))

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the protocol, and its answer."""
        self._number += 1
        told: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            told["sessionId"] = self._session
        os.write(self._out, json.dumps(told).encode() + b"\0")
        until = time.monotonic() + LONGEST_S
        while True:
            heard = self._hear(until, method)
            if heard.get("id") == self._number:
                if "error" in heard:
                    raise AssertionError(f"{method}: {heard['error']['message']}")
                result: dict[str, Any] = heard["result"]
                return result

    def resize(self, width: int, height: int) -> None:
        """Give the window another size (CSS pixels); less than 500 wide it is a phone."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def _open_page(self) -> str:
        page: str = self.call("Target.createTarget", url="about:blank")["targetId"]
        return page

    def _until(self, event: str) -> None:
        until = time.monotonic() + LONGEST_S
        while not any(e.get("method") == event for e in self._events):
            self._hear(until, event)

    def _hear(self, until: float, waited_for: str) -> dict[str, Any]:
        """The next answer or event."""
        while b"\0" not in self._held:
            if not select.select([self._in], [], [], max(0.0, until - time.monotonic()))[0]:
                raise AssertionError(f"Chromium must answer in {LONGEST_S:.0f} s; {waited_for} did not come")
            some = os.read(self._in, 1 << 16)
            if not some:
                raise AssertionError("Chromium has ended")
            self._held += some
        text, self._held = self._held.split(b"\0", 1)
        heard: dict[str, Any] = json.loads(text)
        self._note(heard)
        return heard

    def _note(self, heard: dict[str, Any]) -> None:
        method, told = heard.get("method"), heard.get("params", {})
        self._events.append(heard)
        if method == "Network.requestWillBeSent":
            self.requests.append(told["request"]["url"])
        elif method == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning", "assert"):
            self.problems.append(str([a.get("value", a.get("description")) for a in told["args"]]))
        elif method == "Runtime.exceptionThrown":
            self.problems.append(told["exceptionDetails"]["exception"].get("description", ""))
        elif method == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            self.problems.append(told["entry"]["text"])
