"""`python -m peerd.daemon SETTINGS-JSON`: what `peerd start` and `peerd join` run."""

from __future__ import annotations

import os
import sys

# gRPC and hivemind read these when they are imported; peerd never forks after that.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
os.environ.setdefault("HIVEMIND_LOGLEVEL", "CRITICAL")


def main(arguments: list[str]) -> int:
    """Run the daemon until it leaves. Returns an ExitCode."""
    from peerd.config.settings import Settings
    from peerd.errors import ExitCode, PeerdError, system_error
    from peerd.stage.malloc import limit_arenas

    limit_arenas()
    try:
        settings = Settings.from_json(arguments[0])
    except (IndexError, ValueError, TypeError) as error:
        print(f"peerd: error: bad settings: {error}; use `peerd start` or `peerd join`", file=sys.stderr)
        return ExitCode.USAGE
    try:
        from peerd.daemon.open_files import check_limit, raise_limit

        raise_limit()
        check_limit(1)
        from peerd.daemon.run import run_daemon

        if settings.join_told:
            settings = settings.told(sys.stdin.readline())
            if not settings.join:
                return ExitCode.INTERRUPTED  # the process that started this daemon has ended
        return run_daemon(settings)
    except PeerdError as error:
        print(f"peerd: error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        told = system_error(error)
        if told is None:
            raise
        print(f"peerd: error: {told}", file=sys.stderr)
        return told.exit_code
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
