"""Trains one run by a swarm of real daemons and by one process, and loads its export in a process that has only transformers."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from peerd.cli.demo_daemons import DemoSwarm
from peerd.cli.demo_plan import DemoFlags, plan_of
from peerd.config import manifest as manifests
from peerd.config.manifest import Manifest
from peerd.errors import ExitCode, PeerdError, UsageError
from peerd.models.published import check_publishable
from peerd.models.stages import build_stage
from scripts.benchmarks._report import progress
from scripts.benchmarks._swarms import looks

COMMAND = [sys.executable, "-P", "-c", "from peerd.cli.main import main; main()"]
COMMAND_TIMEOUT_S = 1800.0
POLL_S = 0.25
SILENCE_S = 180.0
PROMPT = "def "
NUM_NEW_TOKENS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    num_stages: int
    num_peers: int
    steps: int
    num_layers: int
    d_model: int
    vocab_size: int
    num_heads: int = 4
    sequence_length: int = 64
    microbatches_per_step: int = 8
    microbatch_size: int = 2
    learning_rate: float = 0.003

    @property
    def d_ff(self) -> int:
        return 8 * self.d_model // 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    option: str
    swarm: tuple[float, ...]
    """The loss of each step, in nats per token."""
    reference: tuple[float, ...]
    parameters_apart: float
    """The largest difference of a parameter, relative to its tensor's largest value."""
    why_decoder: str
    """The reason why the built-in decoder was trained; empty if it was not."""
    loaded_as: str = ""
    """The class as which transformers loaded the export."""
    not_loaded: str = ""
    """The reason why there is no export for transformers."""
    logits_apart: float | None = None
    """The largest difference between transformers' logits and the stages'."""
    prompt: str = PROMPT
    text: str = ""
    """The generated text."""

    @property
    def steps(self) -> int:
        return len(self.swarm)

    @property
    def losses_apart(self) -> float:
        """The largest difference of a step's losses."""
        return max(abs(ours - theirs) for ours, theirs in zip(self.swarm, self.reference, strict=True))

    @staticmethod
    def read(path: Path) -> Outcome:
        fields = json.loads(path.read_text(encoding="utf-8"))
        return Outcome(**fields | {name: tuple(fields[name]) for name in ("swarm", "reference")})


def run_both(option: str, changes: Mapping[str, Mapping[str, Any]], why_decoder: str, sizes: Sizes, folder: Path) -> Outcome:
    """Train a run both ways. `folder` gets the run, its exports native and (if transformers has the model) hf, and reference."""
    progress(f"{option}: making the run")
    run = changed(new_run(sizes, folder / "run", of_decoder=bool(why_decoder)), changes)
    file = folder / "run" / "run.toml"
    file.write_text(manifests.dump(run), encoding="utf-8")
    why_not = why_unpublishable(run)
    began_s = time.monotonic()
    losses = train_in_swarm(file, sizes, folder, hugging_face=not why_not)
    progress(f"{option}: {len(losses)} steps in the swarm took {time.monotonic() - began_s:.0f} s, its start and export included")
    peerd("reference", folder / "native" / "run.toml", "--steps", sizes.steps, "--out", folder / "reference")
    found, expected = (load_file(folder / name / "model.safetensors") for name in ("native", "reference"))
    if found.keys() != expected.keys() or losses != losses_of(folder / "native"):
        raise PeerdError("the export has other parameters or losses than the run")
    outcome = Outcome(
        option=option,
        swarm=losses,
        reference=losses_of(folder / "reference"),
        parameters_apart=max(apart(found[name], value) for name, value in expected.items()),
        why_decoder=why_decoder,
        not_loaded=why_not,
    )
    return outcome if why_not else loaded_elsewhere(outcome, folder, found)


def new_run(sizes: Sizes, folder: Path, *, of_decoder: bool) -> Manifest:
    """Make a run with `peerd new`. The decoder gets the Llama's sizes."""
    model: tuple[object, ...] = ("--layers", sizes.num_layers, "--d-model", sizes.d_model, "--heads", sizes.num_heads, "--d-ff", sizes.d_ff)
    if not of_decoder:
        model = ("--model", "hf:llama", "--set", f"vocab_size={sizes.vocab_size}", *model)
    peerd(
        *("new", folder, "--force", *model, "--tokenizer", f"bpe:{sizes.vocab_size}"),
        *("--stages", sizes.num_stages, "--steps", sizes.steps, "--learning-rate", sizes.learning_rate, "--accumulate", "float64"),
        *("--microbatches", sizes.microbatches_per_step, "--microbatch-size", sizes.microbatch_size),
        *("--sequence-length", sizes.sequence_length),
    )
    made = manifests.load(folder / "run.toml")
    swarm = dataclasses.replace(made.swarm, announce_period_s=1.0, rebalance_period_s=0)
    return dataclasses.replace(made, swarm=swarm, compute=dataclasses.replace(made.compute, threads=1))


def changed(run: Manifest, changes: Mapping[str, Mapping[str, Any]]) -> Manifest:
    sections = {name: dataclasses.replace(getattr(run, name), **fields) for name, fields in changes.items()}
    return dataclasses.replace(run, **sections)


def why_unpublishable(run: Manifest) -> str:
    try:
        check_publishable(run)
    except UsageError as error:
        return error.message
    return ""


def train_in_swarm(run_file: Path, sizes: Sizes, folder: Path, *, hugging_face: bool) -> tuple[float, ...]:
    """Train in a swarm and write its exports to `folder`. Returns the losses as the daemons reported them."""
    flags = DemoFlags(stages=None, peers=sizes.num_peers, steps=None, run_file=run_file, seed=None, accumulate=None, **_undisturbed())
    with DemoSwarm(plan_of(flags), progress) as swarm:
        swarm.start()
        for _ in looks(swarm, POLL_S, SILENCE_S):
            if swarm.finished and swarm.num_steps_told >= sizes.steps:
                break
        home = swarm.daemons[0].home.folder
        peerd("export", folder / "native", "--home", home)
        if hugging_face:
            peerd("export", folder / "hf", "--format", "hf", "--home", home)
        return tuple(step["loss"] for step in swarm.steps)


def _undisturbed() -> dict[str, Any]:
    return {"slow": (), "kill": (), "chaos": None, "stand_in_ms": 0.0}


def loaded_elsewhere(outcome: Outcome, folder: Path, parameters: Mapping[str, Tensor]) -> Outcome:
    """Load the export in a process of its own, and compare its logits with those of the run's stages on the same tokens."""
    run = manifests.load(folder / "native" / "run.toml")
    shape, chance = (run.train.microbatch_size, run.train.sequence_length), torch.Generator().manual_seed(0)
    tokens = torch.randint(0, run.model.vocab_size, shape, generator=chance)
    given, taken = folder / "tokens.safetensors", folder / "logits.safetensors"
    save_file({"tokens": tokens}, given)
    script = Path(__file__).with_name("_loading.py")
    command = [sys.executable, "-P", str(script), str(folder / "hf"), str(given), str(taken), PROMPT, str(NUM_NEW_TOKENS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)
    if done.returncode:
        raise PeerdError(f"transformers does not load the export: {done.stderr.strip()[-500:]}")
    told = json.loads(done.stdout.splitlines()[-1])
    logits_apart = float((load_file(taken)["logits"] - stages_logits(run, parameters, tokens)).abs().max())
    own = json.loads(peerd("generate", folder / "hf", "--prompt", PROMPT, "--tokens", NUM_NEW_TOKENS, "--json"))["text"]
    if not own.startswith(told["text"]):  # transformers stops at the end of a document
        raise PeerdError(f"peerd generate goes on with {own!r}, transformers with {told['text']!r}")
    return dataclasses.replace(outcome, loaded_as=told["class"], logits_apart=logits_apart, text=own)


@torch.no_grad()
def stages_logits(run: Manifest, parameters: Mapping[str, Tensor], tokens: Tensor) -> Tensor:
    """The logits of the chained stages: [microbatch, sequence, vocabulary]."""
    hidden = tokens
    for stage in range(run.train.num_stages):
        module = build_stage(run, stage, "cpu")
        for name, value in module.named_parameters():
            value.copy_(parameters[name])
        hidden = module(hidden)
    return hidden


def peerd(*arguments: object) -> str:
    """Run one peerd command. Returns its standard output."""
    done = subprocess.run([*COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)
    if done.returncode != ExitCode.OK:
        raise PeerdError(f"peerd {arguments[0]} ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    return done.stdout


def losses_of(folder: Path) -> tuple[float, ...]:
    return tuple(json.loads(line)["loss"] for line in (folder / "history.jsonl").read_text(encoding="utf-8").splitlines())


def apart(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-30))
