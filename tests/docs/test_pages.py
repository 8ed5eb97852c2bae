"""The built pages: links lead somewhere, and a browser shows them well on a phone, light and dark.

`make test-docs` builds them first.
"""

from __future__ import annotations

import functools
import json
import re
import runpy
import shutil
import subprocess
import threading
from collections.abc import Iterator
from html import unescape
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.support.checkout import ROOT

SITE = ROOT / "build" / "docs"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
PHONE = 390, 844  # pixels of CSS
SVG = runpy.run_path(str(ROOT / "docs" / "svg.py")) if (ROOT / "docs").exists() else {}
WIDTH, LETTERS = SVG.get("WIDTH"), [*map(float, re.findall(r"([\d.]+)px", SVG.get("STYLE", "")))]
SHOWN = ("index.html", "guides/masks.html", "how/tiles.html", "reference/attention.html")
# A window of Chromium is at least 500 wide: the page is in a frame as wide as a phone.
FRAME = """<!doctype html><body style="margin:0"><iframe src="/{page}"
style="border:0;width:{width}px;height:{height}px" onload="measure(this)"></iframe>
<pre></pre><script>
function measure(frame) {{
  const page = frame.contentDocument, view = frame.contentWindow;
  const drawings = [...page.querySelectorAll("article img")].filter(x => x.src.endsWith(".svg"));
  const found = {{
    width: page.documentElement.scrollWidth,
    height: page.documentElement.scrollHeight,
    background: view.getComputedStyle(page.body).backgroundColor,
    text: view.getComputedStyle(page.querySelector("article p")).color,
    unloaded: [...page.images].filter(x => x.loading != "lazy" && !x.naturalWidth).length,
    smallest: Math.min(99, ...drawings.map(x => x.clientWidth / {drawn} * {letters})),
    drawings: drawings.length,
    pictures: page.querySelectorAll("article img").length - drawings.length,
    hidden: Math.max(0, ...[...page.querySelectorAll(".table-wrapper")].map(
      x => x.scrollWidth - x.clientWidth)),
  }};
  document.querySelector("pre").textContent = JSON.stringify(found);
}}
</script>"""


def current() -> bool:
    """Whether the pages were built after the last change of what they are made from."""
    index = SITE / "index.html"
    sources = [
        x for x in (ROOT / "docs").rglob("*") if x.is_file() and "__pycache__" not in x.parts
    ]
    made = index.stat().st_mtime if index.exists() else 0.0
    return bool(sources) and made >= max(x.stat().st_mtime for x in sources)


pytestmark = pytest.mark.skipif(
    not current(), reason="the pages are not built, or were changed since (make test-docs)"
)


class Targets(HTMLParser):
    """The addresses that a page refers to, and the anchors that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: set[str] = set()
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.addresses |= {x for x in (values.get("href"), values.get("src")) if x}
        self.anchors |= {x for x in (values.get("id"),) if x}


@functools.cache
def targets(page: Path) -> Targets:
    found = Targets()
    found.feed(page.read_text("utf-8"))
    return found


def test_every_link_leads_somewhere():
    broken = []
    for page in SITE.rglob("*.html"):
        for address in targets(page).addresses:
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                continue
            path = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            exists = path.exists()
            if exists and parts.fragment and path.suffix == ".html":
                exists = unquote(parts.fragment) in targets(path).anchors
            if not exists:
                broken.append(f"{page.relative_to(SITE)}: {address}")
    assert not broken


class Handler(SimpleHTTPRequestHandler):
    """The site, and for `/frame/WIDTH/PAGE` a page that holds it in a frame of that width."""

    def do_GET(self) -> None:
        if not self.path.startswith("/frame/"):
            return super().do_GET()
        width, page = self.path.removeprefix("/frame/").split("/", 1)
        sizes = dict(width=width, height=PHONE[1], drawn=WIDTH, letters=min(LETTERS))
        text = FRAME.format(page=page, **sizes).encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    handler = functools.partial(Handler, directory=str(SITE))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def measure(address: str, dark: bool) -> dict:
    """What FRAME finds. In Chromium's settings 0 is dark, and 1 is light."""
    command = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += [f"--blink-settings=preferredColorScheme={int(not dark)}", "--dump-dom"]
    command += [f"--window-size=500,{PHONE[1]}", "--virtual-time-budget=4000", address]
    done = subprocess.run([str(x) for x in command], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = re.search(r"<pre>(.+?)</pre>", done.stdout)
    assert found, done.stdout
    return json.loads(unescape(found[1]))


def brightness(colour: str) -> float:
    """That of `rgb(r, g, b)`, from 0 to 255."""
    return sum(map(int, re.findall(r"\d+", colour)[:3])) / 3


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no chromium here")
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("page", SHOWN)
def test_a_page_on_a_phone(page, dark, address):
    measured = measure(f"{address}/frame/{PHONE[0]}/{page}", dark)
    assert measured["width"] <= PHONE[0], "the page is wider than the screen"
    assert measured["unloaded"] == 0
    assert measured["smallest"] >= 9, "text in a drawing is too small to read"
    assert measured["hidden"] == 0, "a table is wider than the screen"
    assert (measured["drawings"] > 0) == page.startswith(("guides/", "how/"))
    assert (measured["pictures"] > 0) == (page == "index.html")
    ground, text = brightness(measured["background"]), brightness(measured["text"])
    assert (ground < 60 and text > 150) if dark else (ground > 230 and text < 90)
