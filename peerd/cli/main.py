"""The command `peerd`: its group of verbs, and the one place that turns errors into exit codes.

Importing this module must stay cheap: click and the standard library only. Each verb imports what it needs in its function.
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn

import click

from peerd import __version__
from peerd.cli.calling import pasteable
from peerd.cli.options import home_option
from peerd.cli.verbs import SECTIONS, Verbs
from peerd.errors import ERROR_PREFIX, ExitCode, PeerdError, system_error

_EPILOG = """\b
Files of a daemon: --home DIR, before or after the verb, or PEERD_HOME.
Exit codes: 0 done; 1 a bug or unforeseen failure; 2 wrong usage;
3 bad manifest; 4 wrong signature; 5 bad address; 6 unreachable;
7 port taken; 8 identity in use; 9 clock off; 10 disk; 11 no daemon;
12 timed out; 13 stage unknown or too large; 14 limit of the system;
15 the run diverged; 16 shut out by the organiser; 130 interrupted.
`peerd help errors` says what to do about each.
"""


@click.group(
    cls=Verbs,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=_EPILOG,
    subcommand_metavar="VERB [ARGS]...",
)
@click.version_option(__version__, prog_name="peerd")
@home_option
def cli() -> None:
    """Train one large model together with other volunteers.

    `peerd VERB --help` says how a verb is used.
    """


for _verbs in SECTIONS.values():
    for _verb in _verbs:
        cli.add_command(_verb)


def main() -> NoReturn:
    """Run the command and exit with its code."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal shows '?' for a character that it cannot display
    code = run(sys.argv[1:])
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """Run one command line and return its exit code. An error is printed as one line on stderr."""
    try:
        outcome = cli.main(args=arguments, prog_name="peerd", standalone_mode=False)
        sys.stdout.flush()
    except PeerdError as error:
        return _tell(error)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return ExitCode.USAGE
    except click.UsageError as error:
        where = error.ctx.command_path if error.ctx else "peerd"
        return _fail(f"{error.format_message()} See `{where} --help`.", ExitCode.USAGE)
    except click.ClickException as error:
        return _fail(error.format_message(), ExitCode.USAGE)
    except (KeyboardInterrupt, click.Abort):
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        _give_up_output()
        return ExitCode.FAILURE
    except OSError as error:
        told = system_error(error)
        if told is None:
            return _tell_bug(error)
        _give_up_output()
        return _tell(told)
    except Exception as error:  # the outermost frame: every bug is reported here as one line
        return _tell_bug(error)
    return outcome if isinstance(outcome, int) else ExitCode.OK


def _give_up_output() -> None:
    """Redirect standard output to the null device, so that the interpreter does not fail to flush its buffer at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _tell(error: PeerdError) -> int:
    from peerd.cli.launch import ChildFailedError

    if isinstance(error, ChildFailedError):
        return error.code
    return _fail(str(error), error.exit_code)


def _tell_bug(error: Exception) -> int:
    if os.environ.get("PEERD_DEBUG"):
        import traceback

        traceback.print_exception(error)
    detail = f"{type(error).__name__}: {error}".replace("\n", " ")
    return _fail(f"{detail}; this is a bug in peerd: PEERD_DEBUG=1 shows the traceback to report with it", ExitCode.FAILURE)


def _fail(text: str, code: ExitCode) -> int:
    click.echo(ERROR_PREFIX + pasteable(text.replace("\n", " ")), err=True)
    return code
