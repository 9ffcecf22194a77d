"""`python -m peerd.daemon SETTINGS-JSON`: what `peerd start` and `peerd join` run."""

from __future__ import annotations

import os
import sys
import threading
import time

from peerd.child import exit_code_of

LAST_JOBS_S = 1.0
"""Time that threads have to finish once the daemon has left."""


def main(arguments: list[str]) -> int:
    """Run the daemon until it leaves. Returns an ExitCode.

    A pass that is under way then may take minutes, and nothing but the end of the process can end it. Nobody needs its result.
    """
    others = set(threading.enumerate())
    code = exit_code_of(lambda: _run(arguments))
    until_s = time.monotonic() + LAST_JOBS_S
    threads = [thread for thread in threading.enumerate() if thread not in others and not thread.daemon]
    for thread in threads:
        thread.join(max(0.0, until_s - time.monotonic()))
    if any(thread.is_alive() for thread in threads):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _run(arguments: list[str]) -> int:
    from peerd.config.settings import Settings
    from peerd.daemon.open_files import check_limit, raise_limit
    from peerd.errors import ExitCode, UsageError
    from peerd.owner.priority import give_way
    from peerd.stage.malloc import limit_arenas

    limit_arenas()
    try:
        settings = Settings.from_json(arguments[0])
    except (IndexError, ValueError, TypeError) as error:
        raise UsageError(f"bad settings: {error}", "use `peerd start` or `peerd join`") from None
    give_way(settings.nice)
    raise_limit()
    check_limit(1)
    from peerd.daemon.run import run_daemon

    if settings.join_told:
        settings = settings.told(sys.stdin.readline())
        if not settings.join:
            return ExitCode.INTERRUPTED  # the process that started this daemon has ended
    return run_daemon(settings)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
