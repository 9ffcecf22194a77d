"""The verb demo: real daemons on this machine train a small model together, before your eyes."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from peerd.cli.options import OUTPUT_FOLDER, SEED, STAGES, STAND_IN_MS, STEPS, create_folder, is_printed, reply_options
from peerd.errors import PeerdError, TimedOutError

if TYPE_CHECKING:
    from peerd.cli.demo_daemons import DemoSwarm
    from peerd.cli.demo_plan import DemoPlan
    from peerd.cli.demo_view import DemoView

POLL_S = 0.25
STALL_S = 180.0
"""The demo is given up when no daemon made progress for so long, or for as long as a few microbatches take in all stages."""
LAST_LOSSES_WITHIN_S, LAST_LOSSES_PERIODS = 10.0, 3


@click.command()
@click.option("--stages", type=STAGES, metavar="S", help="Parts the model is cut into.  [default: 2]")
@click.option("--peers", type=click.IntRange(1, 64), metavar="P", help="Daemons to start.  [default: 4]")
@click.option("--steps", type=STEPS, metavar="N", help="Steps to train.  [default: 30]")
@click.option("--run", "run_file", type=click.Path(path_type=Path), metavar="FILE", help="Train this run.toml's run instead.")
@click.option("--seed", type=SEED, metavar="N", help="First weights and order of the text.  [default: 0]")
@click.option("--accumulate", type=click.Choice(["float32", "float64"]), help="Precision of gradient sums.  [default: float32]")
@click.option("--slow", multiple=True, metavar="PEER=FACTOR", help="Make a peer so many times slower; repeatable.")
@click.option("--kill", multiple=True, metavar="PEER@STEP", help="SIGKILL a peer when the swarm reaches a step; repeatable.")
@click.option("--chaos", metavar="KIND:every=4s,...", help="Strike peers again and again; see below.")
@click.option("--compute-stand-in", "stand_in_ms", type=STAND_IN_MS, default=0.0, metavar="MS", help="Sleep so long per microbatch.")
@click.option("--out", type=OUTPUT_FOLDER, metavar="DIR", help="Write the trained model, optimizer and history there.")
@reply_options
def demo(out: Path | None, as_json: bool, **flags: Any) -> None:
    """Train a small model on this machine with real daemons.

    Starts P daemons, each with its own identity, lets them train on the Python standard library's sources over
    encrypted connections, shows how the loss falls, and leaves nothing behind but DIR. Peers are numbered 0 to P-1 and
    take the stages in turn. With --compute-stand-in each peer sleeps MS per microbatch, so that many peers can be
    tried on few cores; the speed shown is then not real.

    --chaos strikes a peer every so many seconds, the first one included, until all steps are done and ten faults have
    happened; the seed decides which peer and when. It spares the last peer of a stage that holds its newest step, except
    where the stage comes back from disk. After the KIND come every=4s and, as you like, respawn=yes (a new peer for each
    killed one), for=3s and factor=4:

    \b
      kill             SIGKILL
      stop             SIGSTOP; SIGCONT after `for`
      slow             computes `factor` times slower for `for`
      cut              its p2pd stops for `for`
      corrupt          sends some broken messages for `for`
      p2pd             its p2pd is killed again and again for `for`
      disk-full        its disk is full for `for`
      skewed-clock     its clock is a day off for `for`
      proposal-cancel  proposals to it are cancelled while it joins, for `for`
      stage-wiped      its whole stage is killed; one comes back with its disk
      pause-stale      sleeps while its mates train on and pause, then wakes
      mixed            all of these in turn

    \b
    Examples:
      peerd demo
      peerd demo --stages 3 --peers 6 --kill 4@3
      peerd demo --stages 3 --peers 9 --steps 40 --chaos kill:every=4s,respawn=yes
      peerd demo --peers 3 --slow 1=3 --compute-stand-in 50 --json
    """
    from peerd.cli.demo_daemons import DemoSwarm
    from peerd.cli.demo_figures import summary_of
    from peerd.cli.demo_plan import DemoFlags, plan_of
    from peerd.cli.demo_view import print_summary, view_of

    plan = _writing_to(out, plan_of(DemoFlags(**flags)))
    with _signals_interrupt():
        with view_of(as_json=as_json) as view, DemoSwarm(plan, view.say) as swarm:
            _say_what_comes(plan, view)
            swarm.start()
            swarm.poll()
            if status := swarm.daemons[0].status:
                view.say(f"watch it at {status['dashboard']}")
                view.say(f"ask the model: peerd chat --home {swarm.daemons[0].home.folder}")
            _train(swarm, view)
            seen = swarm.observed()
            if out is not None:
                swarm.export(out)
                view.say(f"wrote {out}")
        summary = summary_of(plan, seen)
        if not is_printed(summary, as_json):
            print_summary(summary)


def _writing_to(out: Path | None, plan: DemoPlan) -> DemoPlan:
    """Make the folders that the demo writes to. Returns the plan with the place for the moves of a run with local steps."""
    if out is None:
        return plan
    create_folder(out)
    if not plan.manifest.train.local_batch:
        return plan
    moves = (out / "moves").absolute()
    create_folder(moves)
    return replace(plan, moves=str(moves))


def _say_what_comes(plan: DemoPlan, view: DemoView) -> None:
    train, model = plan.manifest.train, plan.manifest.model
    view.say(
        f"{plan.num_peers} daemons train a {model.title} of {model.num_layers} layers in {plan.num_stages} stages:"
        f" {train.steps} steps of {train.microbatches_per_step} microbatches"
    )
    if plan.stand_in_ms:
        view.say(f"each peer sleeps {plan.stand_in_ms:g} ms per microbatch: the speed is a stand-in's")


def _train(swarm: DemoSwarm, view: DemoView) -> None:
    """Watch until every living daemon has done all steps. Raises if that has become impossible."""
    from peerd.cli.demo_figures import longest_still_s
    from peerd.cli.demo_strikes import Strikes

    pending = swarm.plan.kills
    strikes = Strikes(swarm, swarm.plan.chaos, swarm.plan.manifest.seed) if swarm.plan.chaos is not None else None
    heard, heard_at = swarm.heard(), time.monotonic()
    while not swarm.finished or (strikes is not None and not strikes.over):
        swarm.poll()
        pending = swarm.kill_due(pending)
        if strikes is not None:
            strikes.tick()
        view.show(swarm)
        swarm.require_every_stage()
        if swarm.heard() != heard:
            heard, heard_at = swarm.heard(), time.monotonic()
        elif time.monotonic() - heard_at > (stall_s := longest_still_s((daemon.status for daemon in swarm.living), STALL_S)):
            raise TimedOutError(f"no daemon made progress for {stall_s:.0f} s in step {swarm.step}", "please report it with this output")
        time.sleep(POLL_S)
    _collect_last_losses(swarm, view)


def _collect_last_losses(swarm: DemoSwarm, view: DemoView) -> None:
    """Wait for the last losses, which may become known shortly after the last step."""
    period_s = swarm.plan.manifest.swarm.announce_period_s
    deadline = time.monotonic() + max(LAST_LOSSES_WITHIN_S, LAST_LOSSES_PERIODS * period_s)
    while swarm.num_steps_told < swarm.plan.steps:
        if time.monotonic() > deadline:
            raise PeerdError(f"the daemons finished, but reported only {swarm.num_steps_told} of {swarm.plan.steps} steps")
        swarm.poll()
        view.show(swarm)
        time.sleep(POLL_S)
    swarm.poll()
    view.show(swarm)


@contextlib.contextmanager
def _signals_interrupt() -> Iterator[None]:
    """Make SIGTERM and SIGHUP end the demo as Ctrl-C does, with its cleanup."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    kinds = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(kind, interrupt) for kind in kinds]
    try:
        yield
    finally:
        for kind, handler in zip(kinds, before, strict=True):
            signal.signal(kind, handler)
