"""The verbs of `peerd`, in groups by what people want, each with a line that `peerd --help` shows."""

from __future__ import annotations

import click

from peerd.cli import (
    access,
    ask,
    audit,
    demo,
    doctor,
    generate,
    guide,
    history,
    logs,
    new,
    organise,
    owner,
    plan,
    receipts,
    runs,
    serve_api,
    service,
    simulate,
    trace,
    volunteer,
    watch,
)

SECTIONS: dict[str, dict[click.Command, str]] = {
    "See it work": {
        demo.demo: "Train a small model here, with real daemons.",
    },
    "Lend your machine": {
        doctor.doctor: "Check what can keep this machine out of a run.",
        runs.runs: "Runs that look for volunteers, from a list.",
        volunteer.join: "Join a run at an address that you were given.",
        owner.pause: "Stop working for a while; nothing is lost.",
        owner.resume: "Go on after a pause.",
        owner.limits: "Show or set what this machine gives.",
        volunteer.leave: "Finish what is held, and stop for good.",
        service.service: "Start the daemon with the machine.",
        logs.logs: "Show the daemon's log.",
    },
    "See what happens": {
        watch.status: "What this machine does now.",
        watch.peers: "The whole swarm: stages, peers, queues, steps.",
        watch.top: "The swarm live, on the whole terminal.",
        watch.dashboard: "The swarm live, in the browser.",
        history.history: "Finished steps, their losses, and events.",
        history.contributions: "Who computed what, and a receipt of it.",
        receipts.verify_receipt: "Check a receipt of somebody's work.",
        trace.trace: "What the peers did in the next steps.",
        audit.audit: "Which work was computed again, and what came of it.",
        watch.wait: "Wait until the daemon serves, or reaches a step.",
    },
    "Organise a run": {
        new.new: "Write a run's description and the organiser's key.",
        organise.data: "Turn a run's text into tokens.",
        plan.plan: "Plan which machine serves which part.",
        simulate.simulate: "Try decisions on simulated swarms.",
        organise.start: "Start a run, and print the line to join it.",
        access.invite: "Invite peers.",
        access.ban: "Shut peers out.",
    },
    "Use and check the model": {
        organise.export: "Write the whole model into a folder.",
        ask.chat: "Talk to the model while it trains.",
        generate.generate: "Let the model go on from a text.",
        serve_api.serve_api: "Let programs on this machine ask the model.",
        organise.reference: "Train the same run in one process, to compare.",
    },
    "Read": {
        guide.show_help: "Pages about peerd.",
    },
}


class Verbs(click.Group):
    """The group `peerd`, whose help lists the verbs by section."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write each section with its verbs' lines, in one column."""
        width = max(len(command.name or "") for verbs in SECTIONS.values() for command in verbs)
        for title, verbs in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([((command.name or "").ljust(width), line) for command, line in verbs.items()])
