"""Reports in the Chromium of the system, and what a reader would complain about."""

import io
import shutil
from contextlib import contextmanager

import numpy as np
import pytest
from PIL import Image

SIZES = {"desktop": (1280, 900), "phone": (390, 844)}
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]

CUT = """() => {
  const bad = [], wide = document.documentElement.scrollWidth;
  if (wide > innerWidth) bad.push(`the page is ${wide} wide`);
  for (const part of document.querySelectorAll("main *")) {
    const own = [...part.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    const box = part.getBoundingClientRect();
    if (!own || !box.width || part.closest(".scroll, .toggles, details:not([open])")) continue;
    const svg = part.closest("svg");
    if (svg) {
      const out = svg.getBoundingClientRect();
      if (box.left < out.left - 1 || box.right > out.right + 1 || box.top < out.top - 1 || box.bottom > out.bottom + 1)
        bad.push(`${svg.id}: ${part.textContent} leaves its chart`);
    } else if (part.scrollWidth > part.clientWidth + 1 && getComputedStyle(part).display !== "inline")
      bad.push(`${part.tagName}: ${part.textContent} is cut`);
    else if (box.left < -1 || box.right > innerWidth + 1) bad.push(`${part.tagName}: ${part.textContent} leaves the page`);
  }
  for (const svg of document.querySelectorAll("svg.chart, svg.heat")) {
    const boxes = [...svg.querySelectorAll("text")].map((text) => [text.textContent, text.getBoundingClientRect()]);
    boxes.forEach(([one, a], i) => boxes.slice(i + 1).forEach(([other, b]) => {
      if (a.width && a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 2 && b.top < a.bottom - 2)
        bad.push(`${svg.id}: ${one} lies on ${other}`);
    }));
  }
  return bad;
}"""


@contextmanager
def chromium():
    """A browser; the test is skipped where there is none."""
    playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    names = ("chromium", "chromium-browser", "google-chrome")
    found = next((path for name in names if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"no browser is installed: none of {', '.join(names)}")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=found, args=ARGUMENTS)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened(browser, address, size="desktop", **settings):
    """A page, which must not have complained or loaded anything from elsewhere in the end."""
    width, height = SIZES[size]
    context = browser.new_context(viewport={"width": width, "height": height}, **settings)
    page = context.new_page()
    said, asked = [], []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(address)
    try:
        yield page
        assert said == []
        allowed = ("data:", address if address.startswith("http") else "file:")
        assert [url for url in asked if not url.startswith(allowed)] == []
    finally:
        context.close()


def reach(part):
    """Scroll to a part of the page, and wait until that has been noticed."""
    part.scroll_into_view_if_needed()
    part.page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    return part.bounding_box()


def pixels(page):
    """A screenshot of the whole page."""
    return np.asarray(Image.open(io.BytesIO(page.screenshot(full_page=True))).convert("RGB"))


def shown(page, selector):
    """How many elements are to be seen."""
    return page.evaluate("(s) => [...document.querySelectorAll(s)].filter((e) => e.getClientRects().length).length", selector)
