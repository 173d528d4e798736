"""The page at /, in a headless Chromium that types."""
import base64
import json
import os
import re
import shutil
import subprocess
import time

import pytest

from tests.serve.conftest import AFTER, BEFORE, SOURCE

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not CHROMIUM, reason="there is no chromium")]


class Browser:
    """A Chromium that takes the commands of its DevTools protocol through two pipes."""

    def __init__(self, folder):
        (from_us, self._out), (self._in, to_us) = os.pipe(), os.pipe()
        self.process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{from_us} 4>&{to_us}', "bash", CHROMIUM, "--headless=new", "--no-sandbox",
             "--disable-gpu", "--remote-debugging-pipe", f"--user-data-dir={folder}", "--window-size=900,560",
             "about:blank"],
            pass_fds=(from_us, to_us), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(from_us)
        os.close(to_us)
        self._buffer, self._number, self._session = b"", 0, {}
        page = next(target for target in self.call("Target.getTargets")["targetInfos"] if target["type"] == "page")
        session = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)["sessionId"]
        self._session = {"sessionId": session}

    def call(self, method, **parameters):
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters, **self._session}
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._buffer:
                received = os.read(self._in, 1 << 16)
                assert received, "chromium has ended"
                self._buffer += received
            reply, _, self._buffer = self._buffer.partition(b"\0")
            reply = json.loads(reply)
            if reply.get("id") == self._number:
                assert "error" not in reply, reply
                return reply["result"]

    def value(self, expression):
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def wait_for(self, expression):
        deadline = time.monotonic() + 60
        while not self.value(expression):
            assert time.monotonic() < deadline, (expression, self.value("document.body.innerText"))
            time.sleep(0.05)

    def press(self, key, code, **options):
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **options)

    def type(self, text):
        for character in text:
            self.call("Input.insertText", text=character)

    def close(self):
        os.close(self._out)
        os.close(self._in)
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@pytest.fixture
def browser(client, tmp_path):
    """Shows the page."""
    browser = Browser(tmp_path / "profile")
    browser.call("Page.navigate", url=str(client.base_url))
    browser.wait_for("document.readyState === 'complete' && typeof text !== 'undefined'")
    yield browser
    browser.close()


def edit(browser, before, after):
    """Puts this text into the editor, with the cursor between the two."""
    browser.value(f"text.value = {json.dumps(before + after)}; text.setSelectionRange({len(before)}, {len(before)})")


GHOST = "document.getElementById('ghost').textContent"


def test_the_page_shows_what_may_follow_and_tab_accepts_it(browser, tmp_path):
    edit(browser, BEFORE, AFTER)
    browser.type("    ret")
    browser.wait_for(f"{GHOST} === 'urn a + b;'")
    browser.wait_for("/\\d+ tokens in .* read anew/.test(document.getElementById('status').textContent)")
    status = browser.value("document.getElementById('status').textContent")
    tokens, seconds, rate = map(float, re.match(r"(\d+) tokens in ([\d.]+) s, (\d+) a second", status).groups())
    assert tokens / (seconds + 0.006) - 1 < rate < tokens / max(seconds - 0.006, 0.001) + 1  # both are rounded
    shown = browser.call("Page.captureScreenshot")["data"]
    (tmp_path / "page.png").write_bytes(base64.b64decode(shown))
    browser.type("ur")
    browser.wait_for(f"{GHOST} === 'n a + b;'")
    browser.press("Tab", 9)
    browser.wait_for(f"text.value === {json.dumps(SOURCE)} && {GHOST} === ''")
    browser.press("z", 90, modifiers=2, commands=["undo"])
    browser.wait_for(f"text.value === {json.dumps(BEFORE + '    retur' + AFTER)}")


def test_escape_and_moving_the_cursor_take_the_completion_away(browser):
    edit(browser, BEFORE, AFTER)
    for leave in (lambda: browser.press("Escape", 27), lambda: browser.press("ArrowLeft", 37)):
        browser.type(" ")
        browser.wait_for(f"{GHOST} !== ''")
        leave()
        browser.wait_for(f"{GHOST} === ''")
    edit(browser, "<b>&amp;", "")
    browser.value("show()")
    assert browser.value("document.getElementById('before').innerHTML") == "&lt;b&gt;&amp;amp;"
