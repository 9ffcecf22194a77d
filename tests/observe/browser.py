"""The system's Chromium, for tests of the dashboard. Without one they are skipped with the reason."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import AsyncIterator
from typing import Any

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
APPEARS_MS = 90_000


@contextlib.asynccontextmanager
async def opened(**options: Any) -> AsyncIterator[Any]:
    """A tab. The test fails if a script of the page fails, or if the page's content policy blocks a part of it."""
    api = pytest.importorskip("playwright.async_api", reason="needs playwright: pip install 'peerd[browser]'")
    executable = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if executable is None:
        pytest.skip("needs a Chromium on the PATH")
    problems: list[str] = []
    async with api.async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"], timeout=APPEARS_MS)
        tab = await browser.new_page(**options)
        tab.on("pageerror", lambda error: problems.append(str(error)))
        tab.on("console", lambda message: problems.append(message.text) if "Content Security Policy" in message.text else None)
        tab.set_default_timeout(APPEARS_MS)
        yield tab
        await browser.close()
    assert problems == []


async def wait_until_live(page: Any) -> None:
    await page.wait_for_selector("#connection[data-state=live]")
