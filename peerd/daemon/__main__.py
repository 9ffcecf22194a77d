"""`python -m peerd.daemon SETTINGS-JSON`: what `peerd start` and `peerd join` run."""

from __future__ import annotations

import sys

from peerd.child import exit_code_of


def main(arguments: list[str]) -> int:
    """Run the daemon until it leaves. Returns an ExitCode."""
    return exit_code_of(lambda: _run(arguments))


def _run(arguments: list[str]) -> int:
    from peerd.config.settings import Settings
    from peerd.daemon.open_files import check_limit, raise_limit
    from peerd.errors import ExitCode, UsageError
    from peerd.stage.malloc import limit_arenas

    limit_arenas()
    try:
        settings = Settings.from_json(arguments[0])
    except (IndexError, ValueError, TypeError) as error:
        raise UsageError(f"bad settings: {error}", "use `peerd start` or `peerd join`") from None
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
