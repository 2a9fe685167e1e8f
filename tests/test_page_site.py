"""The documentation as a site: it builds without a warning (links, navigation), it is complete, and it fits on a telephone."""

import functools
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import noisewise
from tests.report.browser import chromium, opened

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))
LAID_OUT = [page for page in PAGES if "/" not in page or page.startswith("api/")] + ["methods/adaptive.md", "weightings/vlb.md"]
"""Cards are all alike: two stand for them."""
pytestmark = pytest.mark.slow


class Page(HTMLParser):
    """What a page loads, and which of its places can be linked to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.ids: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attributes}
        self.ids |= {found[name] for name in ("id", "name") if name in found}
        if tag in ("img", "script") and "src" in found:
            self.loaded.append(found["src"])
        if tag == "link" and found.get("rel") in ("stylesheet", "icon"):
            self.loaded.append(found["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for name in ("mkdocs", "material", "mkdocstrings_handlers.python"):
        pytest.importorskip(name, reason="the site is built with pip install '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    built = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr[-5000:]
    assert "WARNING" not in built.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in site.rglob("*.html") if path.name != "404.html"}


def test_every_public_name_is_in_the_reference(pages: dict[Path, Page], site: Path) -> None:
    found = {place for path, page in pages.items() if path.parent == site / "api" for place in page.ids}
    for name in noisewise.__all__:
        defined_in = getattr(getattr(noisewise, name), "__module__", "noisewise")
        assert {f"noisewise.{name}", f"{defined_in}.{name}"} & found, f"docs/api has no entry for {name}"


def test_everything_loaded_is_there_and_nothing_comes_from_elsewhere(pages: dict[Path, Page]) -> None:
    for path, page in pages.items():
        for address in page.loaded:
            parts = urlsplit(address)
            assert not parts.scheme + parts.netloc, f"{path.name} loads {address}"
            assert (path.parent / unquote(parts.path)).is_file(), f"{path.name} loads {address}, which is not there"


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *words: object) -> None:
        pass


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def test_no_page_is_wider_than_a_telephone(address: str) -> None:
    with chromium() as browser, opened(browser, address, "phone") as page:
        wide = {}
        for name in LAID_OUT:
            page.goto(f"{address}{name[:-3]}.html", wait_until="load")
            wide[name] = page.evaluate("document.documentElement.scrollWidth")
        assert {name: width for name, width in wide.items() if width > 390} == {}


def test_the_search_finds_a_sampler(address: str) -> None:
    late = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed").TimeoutError
    with chromium() as browser, opened(browser, address) as page:
        for _ in range(60):  # the theme may not listen yet when the first letters come
            page.fill("input.md-search__input", "")
            page.type("input.md-search__input", "logit_normal")
            with suppress(late):
                page.wait_for_selector(".md-search-result__item", timeout=5000)
                break
        assert "logit_normal" in page.inner_text(".md-search-result__list")
