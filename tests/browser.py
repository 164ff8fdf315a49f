"""A browser for the tests of HTML pages, for machines on which Chromium is installed."""

import base64
import json
import os
import shutil
import subprocess
import time

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


def soon(condition, timeout=10):
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


class Browser:
    """Headless Chromium, controlled through the pipe of its DevTools protocol
    (chromedevtools.github.io). Calling an instance, browser(method, **params), sends a command and
    returns the result."""

    def __init__(self, folder):
        commands, self.commands = os.pipe()
        self.replies, replies = os.pipe()
        arguments = [CHROMIUM, "--headless=new", "--remote-debugging-pipe", "--no-sandbox",
                     "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
                     f"--user-data-dir={folder}", "about:blank"]
        # It reads commands from 3 and writes to 4.
        shell = f'exec 3<&{commands} 4>&{replies} {commands}<&- {replies}>&-; exec "$@"'
        self.process = subprocess.Popen(
            ["bash", "-c", shell, "chromium", *arguments], pass_fds=(commands, replies),
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(commands), os.close(replies)
        self.reader, self.number = os.fdopen(self.replies, "rb"), 0
        self.session, self.problems = None, []
        page = next(t for t in self("Target.getTargets")["targetInfos"] if t["type"] == "page")
        self.session = self("Target.attachToTarget", targetId=page["targetId"], flatten=True)[
            "sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self(f"{domain}.enable")

    def __call__(self, method, **params):
        self.number += 1
        message = dict(id=self.number, method=method, params=params)
        if self.session:
            message["sessionId"] = self.session
        os.write(self.commands, json.dumps(message).encode() + b"\0")
        while True:
            reply = json.loads(self.read())
            if reply.get("id") == self.number:
                assert "error" not in reply, reply
                return reply["result"]
            if reply.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                if reply["params"].get("entry", {}).get("level") != "info":
                    self.problems.append(reply["params"])

    def read(self):
        out = bytearray()
        while (byte := self.reader.read(1)) != b"\0":
            assert byte, "the browser has ended"
            out += byte
        return out

    def js(self, expression):
        return self("Runtime.evaluate", expression=expression)["result"].get("value")

    def click(self, selector):
        x, y = json.loads(self.js(f"(r => JSON.stringify([r.x + r.width / 2, r.y + r.height / 2]))"
                                  f"(document.querySelector('{selector}').getBoundingClientRect())"))
        for kind in ("mousePressed", "mouseReleased"):
            self("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def look(self, width, height, dark, path=None):
        """Show the page on a screen of width x height pixels, with the dark or the light color
        scheme. Return (the width of the page's content in pixels, a screenshot as PNG bytes, which
        is also written to `path`, if given)."""
        self("Emulation.setDeviceMetricsOverride", width=width, height=height, mobile=width < 600,
             deviceScaleFactor=2 if width < 600 else 1)
        self("Emulation.setEmulatedMedia", features=[
            dict(name="prefers-color-scheme", value="dark" if dark else "light")])
        picture = base64.b64decode(self("Page.captureScreenshot", format="png")["data"])
        if path:
            path.write_bytes(picture)
        return self.js("document.documentElement.scrollWidth"), picture

    def close(self):
        self.process.kill()
        self.process.wait()
        self.reader.close()
        os.close(self.commands)
