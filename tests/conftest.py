"""For all tests: properties are drawn the same way each time and are not timed, so that a busy machine fails none of them.

A property that fails is made small, but not explained: that takes minutes. PEERD_EXAMPLES says how many examples each property is tried
with where it does not say so itself.
"""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import structlog
from hypothesis import HealthCheck, Phase, settings

from peerd.config import laptop
from peerd.models.kernels import keep_kernels_in_cache

keep_kernels_in_cache()  # tests count operations, too

NUM_EXAMPLES = int(os.environ.get("PEERD_EXAMPLES", "25"))
PHASES = (Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink)
settings.register_profile(
    "peerd",
    deadline=None,
    derandomize=True,
    max_examples=NUM_EXAMPLES,
    phases=PHASES,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("peerd")


def pytest_collection_finish() -> None:
    """Thousands of collected tests and their modules stay: no collection of garbage looks at them again."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Add what has failed to the file that PEERD_FAILED names: scripts/test runs pytest several times, and tells of all at its end."""
    if "PEERD_FAILED" in os.environ and "PYTEST_XDIST_WORKER" not in os.environ:
        failed = [report.nodeid for outcome in ("failed", "error") for report in terminalreporter.getreports(outcome)]
        with Path(os.environ["PEERD_FAILED"]).open("a", encoding="utf-8") as file:
            file.writelines(f"{node}\n" for node in failed)


@pytest.fixture(autouse=True)
def _no_battery(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests say the same on a laptop as on other machines."""
    monkeypatch.setattr(laptop, "has_battery", lambda: False)


@pytest.fixture(autouse=True)
def _logging_as_it_is_by_default() -> None:
    """A test that configures logging leaves its captured, and by then closed, standard error behind."""
    structlog.reset_defaults()
