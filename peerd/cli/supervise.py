"""Daemons of several devices in the foreground: started one after another, told of signals, started again if they fail while others run."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING

import click

from peerd.cli.launch import (
    READY_SILENCE_S,
    ChildFailedError,
    DaemonFailedError,
    Ready,
    describe_exit,
    module_command,
    run_detached,
    signs_of,
    stop_process,
    wait_until_ready,
)
from peerd.errors import FOR_THE_USER_TO_MEND, ExitCode, PeerdError

if TYPE_CHECKING:
    from peerd.config.paths import Home
    from peerd.config.settings import Settings

LOOK_S = 0.5
RETRY_S = 20.0
"""Time until a daemon that failed is started again, as a service manager does."""
ENDED_BY_SIGNAL = (ExitCode.INTERRUPTED, -signal.SIGINT, -signal.SIGTERM)
Begun = Callable[[str, Ready], None]


def joining(settings: Settings, first: Ready | None) -> Settings:
    """The settings of a further daemon: it also asks the first one, for a run that it may not know yet."""
    return settings if first is None else replace(settings, join=f"{settings.join} {first.join}".strip())


def detach_each(each: Sequence[Settings], homes: Sequence[Home], begun: Begun, hear: Callable[[str], None] = lambda _text: None) -> None:
    """Start a daemon for each device in the background. One that fails keeps no other from starting; its error is raised at the end.

    `hear` is told what each does until it can be reached. Raises at once if the first fails, because the others join where it does.
    """
    first, failed = None, None
    for settings, home in zip(each, homes, strict=True):
        try:
            ready = run_detached(joining(settings, first), home, lambda text, device=settings.device: hear(f"{device}: {text}"))  # type: ignore[misc]
        except PeerdError as error:
            if first is None:
                raise
            failed = failed or type(error)(f"{settings.device}: {error.message}", error.remedy)
            continue
        first = first or ready
        begun(settings.device, ready)
    if failed is not None:
        raise failed


class Foreground:
    """The daemons that this process started, and is there for until they have ended. They end if it does."""

    def __init__(self, each: Sequence[Settings], begun: Begun) -> None:
        self._each = [replace(settings, follow_parent=True) for settings in each]
        self._begun = begun
        self._first: Ready | None = None
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._again_s: dict[str, float] = {}
        """Devices whose daemon failed, and when it is started again; this process's clock."""
        self._asked: list[int] = []
        """Signals that this process got, and how many of them each daemon was sent."""
        self._passed_on: dict[str, int] = {}
        self._code = ExitCode.OK + 0

    def run(self, all_begun: Callable[[], None]) -> int:
        """Return the exit code of the first daemon that failed for good, else 0. Raises ChildFailedError if the first cannot start."""
        with self._signals():
            for settings in self._each:
                if not self._is_leaving:
                    self._start(settings)
                if self._first is None:
                    self._end_all()
                    raise ChildFailedError(self._code)
            all_begun()
            while self._running:
                self._look()
        return self._code

    def _start(self, settings: Settings) -> None:
        """Start a daemon and wait until it can be reached. It prints its own errors."""
        command = module_command("peerd.daemon", joining(settings, self._first).to_json())
        process = self._running[settings.device] = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0,  # else Ctrl-C would reach it twice, which means at once
            env={**os.environ, "PEERD_READY": "json"},
        )
        self._passed_on[settings.device] = 0
        self._pass_on(settings.device, process)  # a signal may have come while the process was made
        try:
            ready = wait_until_ready(process, READY_SILENCE_S, signs_of(process, lambda: 0))
        except DaemonFailedError as failed:
            self._ended(settings.device, failed.code)
        except BaseException:
            self._end_all()
            raise
        else:
            self._first = self._first or ready
            self._begun(settings.device, ready)

    @property
    def _is_leaving(self) -> bool:
        return bool(self._asked)

    def _pass_on(self, device: str, process: subprocess.Popen[bytes]) -> None:
        """Send a daemon the signals that it has not been sent yet. One that is not noted here is told when it is."""
        while device in self._passed_on and self._passed_on[device] < len(self._asked):
            self._passed_on[device] += 1
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(self._asked[self._passed_on[device] - 1])

    def _look(self) -> None:
        """Wait a moment, then see who has ended and who is due again."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            next(iter(self._running.values())).wait(LOOK_S)
        for device, process in list(self._running.items()):
            if process.poll() is not None:
                self._ended(device, process.returncode)
        for settings in self._each:
            if self._running and time.monotonic() >= self._again_s.get(settings.device, float("inf")):
                del self._again_s[settings.device]
                self._start(settings)

    def _ended(self, device: str, code: int) -> None:
        process = self._running.pop(device)
        self._passed_on.pop(device, None)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        if not code or (self._is_leaving and code in ENDED_BY_SIGNAL):
            return
        can_pass = code not in FOR_THE_USER_TO_MEND and bool(self._running) and not self._is_leaving
        told = f"; it is started again in {RETRY_S:g} s" if can_pass else ""
        click.echo(f"peerd: the daemon of {device} {describe_exit(code)}{told}", err=True)
        if can_pass:
            self._again_s[device] = time.monotonic() + RETRY_S
        else:
            self._code = self._code or (code if code > 0 else ExitCode.FAILURE + 0)

    def _end_all(self) -> None:
        for process in self._running.values():
            stop_process(process)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Pass signals on: the first lets the daemons hand on what they hold, the second ends them at once."""

        def asked(number: int, _frame: FrameType | None) -> None:
            self._asked.append(number)
            self._again_s.clear()
            for device, process in self._running.items():
                self._pass_on(device, process)

        before = {number: signal.signal(number, asked) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
