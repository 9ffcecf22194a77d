"""The verbs pause, resume and limits, for the owner of the machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import click

from peerd.cli.devices import ask_each, first_of
from peerd.cli.options import chosen_home, daemon_command, is_printed
from peerd.errors import NoDaemonError, UsageError

if TYPE_CHECKING:
    from peerd.config.paths import Home

PAUSE_SILENCE_S = 120.0
SILENCE_S = 10.0
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_RUN_OR_PAUSE = click.Choice(["run", "pause"])


@click.command()
@click.option(
    "--for", "for_text", metavar="TIME", default="", help="Go on by itself after so long, like 90m or 2h.  [default: until `peerd resume`]"
)
@daemon_command
def pause(context: click.Context, for_text: str, as_json: bool) -> None:
    """Let this home's daemon, or those of all its devices, pause: each hands on what it holds, leaves its stage and gives the memory back.

    The daemon goes on running and answers `peerd status`; no work is lost. A pause outlives a restart of the daemon.

    \b
    Examples:
      peerd pause
      peerd pause --for 2h
    """
    reply = _tell(chosen_home(context), "pause", PAUSE_SILENCE_S, for_s=_seconds(for_text))
    if not is_printed(reply, as_json):
        click.echo(f"paused; it goes on {reply['until']}" if reply["resting"] else "the next daemon of this home starts paused")


@click.command()
@daemon_command
def resume(context: click.Context, as_json: bool) -> None:
    """Take `peerd pause` back. Limits that speak against working go on to count."""
    reply = _tell(chosen_home(context), "resume", SILENCE_S)
    if not is_printed(reply, as_json):
        click.echo(f"still paused: {reply['paused']}; it goes on {reply['until']}" if reply["paused"] else "it goes on")


@click.command()
@click.option("--upload", metavar="RATE", help="Most to send, like 20Mbit or 2.5MB/s.")
@click.option("--download", metavar="RATE", help="Most to receive.")
@click.option("--daily", metavar="SIZE", help="Data quota per day, both ways, like 20GB; the peer pauses when it is used up.")
@click.option("--monthly", metavar="SIZE", help="Data quota per month.")
@click.option("--memory", metavar="SIZE", help="Most memory for a stage, on the device that computes; counts from the next join or resume.")
@click.option(
    "--disk", metavar="SIZE", help="Most disk for a run's checkpoints and averages: the oldest go first, the newest checkpoint stays."
)
@click.option("--duty", metavar="SHARE", help="Share of the time to compute, like 50%.")
@click.option("--inference", metavar="SHARE", help="Share of the time training waits for those who ask the model, like 2%; 0%: never.")
@click.option("--power", metavar="WATTS", help="Most that the GPU may draw on average, like 200W: it rests as much as that takes.")
@click.option("--hours", metavar="FROM-TO", help="Work only within these hours of the day, like 22:00-07:00.")
@click.option("--max-temperature", metavar="DEGREES", help="Pause while the hottest sensor is above, in degrees Celsius.")
@click.option("--while-used", type=_RUN_OR_PAUSE, help="While somebody works at this machine, or other programs keep it or its GPU busy.")
@click.option("--on-battery", type=_RUN_OR_PAUSE, help="Without mains power.")
@click.option("--metered", "on_metered", type=_RUN_OR_PAUSE, help="On a network connection that is paid by use.")
@daemon_command
def limits(context: click.Context, /, as_json: bool, **given: str | None) -> None:
    """Show or set what this machine gives, at any time; kept across restarts.

    Without flags it shows the limits, the data used, and whether the peer pauses now. `none` takes a limit away. A peer that has to pause
    hands on what it holds first, so nothing is lost, and goes on by itself.

    On a machine with a battery --while-used and --on-battery are `pause`, unless you set them to `run`.

    \b
    Examples:
      peerd limits --upload 20Mbit --download 50Mbit --memory 6GB
      peerd limits --hours 22:00-07:00 --while-used pause
      peerd limits --upload none
    """
    from peerd.config.device_homes import homes_of, owner_home_of

    home = chosen_home(context)
    change = _change(given, len(homes_of(owner_home_of(home)).homes))
    reply = _tell(home, "limits", SILENCE_S, change=change)
    if not is_printed(reply, as_json):
        from peerd.cli.render import print_limits

        print_limits(reply)


def _tell(home: Home, verb: str, silence_s: float, **arguments: Any) -> Mapping[str, Any]:
    """The answer of the daemons of all devices. If none runs, the change is saved in the home for the next ones."""
    from peerd.config.device_homes import owner_home_of
    from peerd.config.laptop import usual_limits
    from peerd.config.limits import load_wishes, owner_info, save_wishes
    from peerd.control.protocol import SCHEMA

    home = owner_home_of(home)
    try:
        answers = ask_each(home, verb, silence_s=silence_s, **arguments)
    except NoDaemonError:
        wishes = load_wishes(home, usual_limits())
        wanted = wishes.after(verb, arguments)
        if wanted != wishes:
            save_wishes(home, wanted)
        return {"schema": SCHEMA, **owner_info(wanted.limits, wanted.pause)}
    return {**first_of(answers), "resting": all(answer.reply["resting"] for answer in answers if answer.reply is not None)}


def _change(given: Mapping[str, str | None], num_devices: int) -> dict[str, Any]:
    """The limits named on the command line, as plain values."""
    from peerd.config.limits import hours_text, parse_hours, parse_power, parse_rate, parse_share, parse_size

    readers: dict[str, Callable[[str], Any]] = {
        **dict.fromkeys(("upload", "download"), parse_rate),
        **dict.fromkeys(("daily", "monthly", "memory", "disk"), parse_size),
        **dict.fromkeys(("duty", "inference"), parse_share),
        "power": lambda text: parse_power(text, num_devices),
        "hours": lambda text: hours_text(parse_hours(text)),
        "max_temperature": _degrees,
        **dict.fromkeys(("while_used", "on_battery", "on_metered"), lambda text: text == "run"),
    }
    change: dict[str, Any] = {}
    for name, text in given.items():
        if text is not None:
            try:
                change[name] = readers[name](text)
            except ValueError as error:
                raise UsageError(f"--{name.replace('_', '-')}: {error}") from None
    return change


def _degrees(text: str) -> float:
    try:
        degrees = 0.0 if text.lower() == "none" else float(text)
    except ValueError:
        degrees = -1.0
    if degrees and not 30 <= degrees <= 150:
        raise ValueError(f"{text}: not a temperature between 30 and 150 degrees")
    return degrees


def _seconds(text: str) -> float:
    if not text:
        return 0.0
    try:
        seconds = float(text[:-1]) * _SECONDS[text[-1]]
    except (ValueError, KeyError):
        seconds = -1.0
    if not 1 <= seconds <= 365 * 86400:
        raise UsageError(f"--for {text}: not a time like 90m or 2h")
    return seconds
