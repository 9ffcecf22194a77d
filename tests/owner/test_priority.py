"""A daemon gives way to the machine's other programs."""

from __future__ import annotations

import subprocess
import sys

import pytest

from peerd.config.settings import Settings
from peerd.owner.priority import AUTOGROUP, niceness

SCRIPT = (
    "import sys; from peerd.owner.priority import give_way, niceness; [give_way(int(each)) for each in sys.argv[1:]]; print(niceness())"
)


def test_the_niceness_rises_and_never_falls() -> None:
    """In a process of its own: a niceness that has risen does not come down."""
    at_least = min(19, niceness() + 3)
    found = subprocess.run([sys.executable, "-c", SCRIPT, str(at_least), "0"], check=True, capture_output=True, text=True, timeout=60)
    assert int(found.stdout) == at_least


@pytest.mark.parametrize("nice", [-1, 20])
def test_settings_refuse_a_niceness_that_there_is_not(nice: int) -> None:
    with pytest.raises(ValueError, match="between 0 and 19"):
        Settings(home="home", nice=nice)


@pytest.mark.skipif(not AUTOGROUP.exists(), reason="this kernel has no autogroups")
@pytest.mark.parametrize("own_session", [True, False])
def test_the_session_gives_way_where_it_is_the_processes_own(own_session: bool) -> None:
    """The kernel shares cores between sessions whatever the niceness of their processes: a daemon competed as an equal."""
    script = f"{SCRIPT}; print(open('/proc/self/autogroup').read())"
    command = [sys.executable, "-c", script, "7", "3"]
    if not own_session:  # a process of this test's session cannot have its own niceness changed alone: a shell leads that session
        command = ["sh", "-c", '"$@"; exit $?', "sh", *command]
    found = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60, start_new_session=True)
    assert found.stdout.strip().endswith("nice 7" if own_session else "nice 0")
