"""The dashboard in a browser, with real daemons behind it: it appears, goes on by itself, and shows who is suspect and who is gone."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from peerd.table.view import TTL_PERIODS
from tests.swarm.daemons import Daemon, Swarm
from tests.swarm.machine import slowdown
from tests.swarm.runs import PERIOD_S, swarm_manifest

pytestmark = [pytest.mark.slow, pytest.mark.swarm, pytest.mark.timeout(400)]
sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install peerd[browser]")

PACE_MS = 40
APPEARS_MS = 60_000
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture
def page() -> Iterator[Any]:
    """A tab that fails the test when a script does."""
    executable = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if executable is None:
        pytest.skip("needs a Chromium on the PATH")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        tab = browser.new_page()
        problems: list[str] = []
        tab.on("pageerror", lambda error: problems.append(str(error)))
        tab.set_default_timeout(APPEARS_MS)
        yield tab
        browser.close()
    assert problems == []


def open_dashboard(page: Any, daemon: Daemon) -> None:
    page.goto(daemon.request("dashboard")["address"])
    page.wait_for_selector("#connection[data-state=live]")


def step_shown(page: Any) -> int:
    return int(page.inner_text("#step").replace(",", ""))


def mark_of(daemon: Daemon) -> str:
    return f"[data-peer='{daemon.ready.peer}']"


def seconds_until(page: Any, selector: str, state: str = "attached") -> float:
    began_s = time.monotonic()
    page.wait_for_selector(selector, state=state)
    return time.monotonic() - began_s


def test_it_shows_a_killed_peer_as_suspect_at_once_and_then_as_gone(page: Any) -> None:
    with Swarm(swarm_manifest(num_stages=2)) as swarm:
        first = swarm.start(stage=0, dashboard=True, compute_stand_in_ms=PACE_MS)
        second, victim = (swarm.join(1, compute_stand_in_ms=PACE_MS) for _ in range(2))
        for daemon in swarm.daemons:
            daemon.wait_until_serving()
        open_dashboard(page, first)
        for daemon in (first, second, victim):
            page.wait_for_selector(mark_of(daemon))
        shown = step_shown(page)
        page.wait_for_function(f"Number(document.getElementById('step').textContent.replace(',', '')) > {shown + 1}")

        victim.kill()
        suspect_s = seconds_until(page, f"{mark_of(victim)}[data-phase=suspect]")
        gone_s = suspect_s + seconds_until(page, mark_of(victim), "detached")

        slow = slowdown()
        assert suspect_s < 2 * slow
        assert gone_s < (TTL_PERIODS * PERIOD_S + 2) * slow
        page.wait_for_selector(f"#events >> text=Peer {victim.ready.peer[-6:]} is gone")


def test_a_page_that_is_open_goes_on_with_the_next_daemon_and_shows_the_past(page: Any) -> None:
    with Swarm(swarm_manifest(num_stages=1)) as swarm:
        first = swarm.start(dashboard=True, ephemeral=False, compute_stand_in_ms=PACE_MS)
        first.wait_for_step(5)
        open_dashboard(page, first)
        page.wait_for_selector("#leave:visible")
        first.wait_for_step(first.status["peer"]["step"] + 2)
        first.kill()
        page.wait_for_selector("#connection[data-state=lost]")

        again = swarm.spawn_with(replace(first.settings, run_file=str(swarm.run_file)))
        again.wait_for_step(1)
        page.wait_for_selector("#connection[data-state=live]")
        history = again.request("history", events=True)
        assert [entry["kind"] for entry in history["events"]].count("started") == 2
        assert len(history["steps"]) >= 5
        page.wait_for_function("document.querySelectorAll('#events li').length >= 2")
        again.request("leave")
        again.exit_code()
        shutil.rmtree(first.settings.home)


def test_a_click_on_leave_lets_the_daemon_leave(page: Any) -> None:
    with Swarm(swarm_manifest(num_stages=1)) as swarm:
        daemon = swarm.start(dashboard=True, compute_stand_in_ms=PACE_MS)
        daemon.wait_for_step(1)
        open_dashboard(page, daemon)
        page.click("#leave")
        page.click("#sure button[value=stay]")
        assert daemon.process.poll() is None
        page.click("#leave")
        page.click("#sure button[value=leave]")
        assert daemon.exit_code() == 0


def test_a_keyboard_reaches_every_peer_and_what_is_chosen_is_told(page: Any) -> None:
    with Swarm(swarm_manifest(num_stages=2)) as swarm:
        first = swarm.start(stage=0, dashboard=True, compute_stand_in_ms=PACE_MS)
        second = swarm.join(1, compute_stand_in_ms=PACE_MS)
        second.wait_until_serving()
        open_dashboard(page, first)
        page.wait_for_selector(mark_of(second))
        page.focus("#map")
        page.keyboard.press("ArrowRight")
        page.wait_for_selector(f"{mark_of(second)}[data-chosen]")
        assert second.ready.peer[-6:] in page.inner_text("#chosen")


@pytest.fixture
def axe() -> Path:
    """axe-core, from npm: a tool of this test, no part of the product."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("needs npm")
    folder = Path("/tmp/peerd-axe")
    if not (folder / "node_modules" / "axe-core" / "axe.min.js").exists():
        folder.mkdir(exist_ok=True)
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run([npm, "install", "--silent", "--prefix", folder, "axe-core@4"], check=False, timeout=90, capture_output=True)
    script = folder / "node_modules" / "axe-core" / "axe.min.js"
    if not script.exists():
        pytest.skip("axe-core could not be had from npm")
    return script


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1440, 390])
def test_axe_finds_no_barrier(page: Any, axe: Path, scheme: str, width: int) -> None:
    with Swarm(swarm_manifest(num_stages=2)) as swarm:
        first = swarm.start(stage=0, dashboard=True, compute_stand_in_ms=PACE_MS)
        first.wait_until_serving()
        page.emulate_media(color_scheme=scheme)
        page.set_viewport_size({"width": width, "height": 900})
        open_dashboard(page, first)
        page.wait_for_selector("#events li")
        page.evaluate(axe.read_text())
        found = page.evaluate("axe.run()")
        told = [f"{each['id']}: {node['html'][:120]}" for each in found["violations"] for node in each["nodes"]]
        assert told == []
