"""Command lines that documents and deploy files show, checked against the command that they are for. Nothing is run."""

from __future__ import annotations

import click

from peerd.cli.main import cli

DASHBOARD = ("--dashboard-host", "--dashboard-port")
"""Flags of daemons that serve a dashboard; where the verb has them, they are checked like any other."""


def check(arguments: list[str]) -> None:
    """Raises click.UsageError where `peerd ARGUMENTS` names a verb, flag or value that does not exist."""
    context = cli.make_context("peerd", list(arguments))
    group: click.Command = cli
    rest = [*context._protected_args, *context.args]
    while isinstance(group, click.Group) and rest:
        name, found, rest = group.resolve_command(context, rest)
        assert found is not None
        if isinstance(found, click.Group):
            context = found.make_context(name, rest, parent=context)
            rest = [*context._protected_args, *context.args]
            group = found
            continue
        found.make_context(name, _without_unknown_dashboard(found, rest), parent=context).close()
        return


def _without_unknown_dashboard(command: click.Command, arguments: list[str]) -> list[str]:
    known = {name for parameter in command.params for name in parameter.opts}
    kept = list(arguments)
    for name in DASHBOARD:
        if name not in known and name in kept:
            del kept[kept.index(name) : kept.index(name) + 2]
    return kept
