"""The verb new: writes a run.toml, for a run from random weights or one that continues an earlier run."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from peerd import SCHEMA
from peerd.cli.calling import pasteable
from peerd.cli.new_data import data_of, known_tokenizer, mask_token_of, vocab_size_of
from peerd.cli.new_estimate import estimates, fitted_to, loads_of
from peerd.cli.new_link import CHOSEN_FLAGS, ChosenWay, Rate, RoundTrip, choice_fields, choice_lines, chosen_for
from peerd.cli.options import (
    MEMORY,
    SEED,
    STAGES,
    FiniteRange,
    create_folder,
    daemon_command,
    is_printed,
)
from peerd.errors import UsageError

if TYPE_CHECKING:
    from peerd.config.manifest import Manifest, ModelConfig
    from peerd.planner.workload import StageEstimate

START_FILE = "start.safetensors"
MASKED_SHARE = 0.15
MOST_SHOWN_PEERS = 4
"""More peers on one machine are not suggested."""

_TRAIN_FIELDS = (
    *("num_stages", "microbatches_per_step", "microbatch_size", "sequence_length", "steps", "learning_rate", "accumulate"),
    *("optimizer", "optimizer_bits"),
    *("evaluate_every_steps", "evaluation_microbatches"),
)
_MODEL_FLAGS = {"num_layers": "--layers", "d_model": "--d-model", "num_heads": "--heads", "d_ff": "--d-ff"}
_GENERAL_NAMES = {
    "num_layers": "num_hidden_layers",
    "d_model": "hidden_size",
    "num_heads": "num_attention_heads",
    "d_ff": "intermediate_size",
}
"""Names of the model's sizes in transformers, where every architecture accepts them."""
_POSITIVE = click.IntRange(1, 1_000_000)
_BOUNDARIES = ("none", "bottleneck", "maxout", "subspace", "token-residual")
_ABOUT_FIELDS = ("purpose", "licence", "contact")
_BOUNDARY_FLAGS = {"boundary": "--boundary", "boundary_rank": "--boundary-rank"}


@click.command()
@click.argument("folder", metavar="DIR")
@click.option("--name", help="Name of the run; part of its id.  [default: the folder's name]")
@click.option("--model", default="decoder", show_default=True, metavar="MODEL", help="What is trained; see below.")
@click.option("--config", "config_file", metavar="FILE", help="config.json of an hf: model.")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="A field of that config to be otherwise.")
@click.option("--stages", "num_stages", type=STAGES, default=2, show_default=True, help="Parts the model is cut into.")
@click.option("--layers", "num_layers", type=_POSITIVE, help="Layers of the model.  [default: 4, or one per stage]")
@click.option("--d-model", type=_POSITIVE, default=128, show_default=True, help="Width of the model.")
@click.option("--heads", "num_heads", type=_POSITIVE, default=4, show_default=True, help="Attention heads.")
@click.option("--d-ff", type=_POSITIVE, help="Width of the hidden layer.  [default: 4 x d-model]")
@click.option("--tie-word-embeddings", is_flag=True, help="Input and output embeddings are one weight.")
@click.option("--boundary", type=click.Choice(_BOUNDARIES), default="none", show_default=True, help="What narrows it between stages.")
@click.option("--boundary-rank", type=_POSITIVE, help="Numbers a token that cross with subspace or token-residual.")
@click.option("--sequence-length", type=click.IntRange(2, 1 << 20), default=128, show_default=True, help="Tokens per sequence.")
@click.option("--microbatch-size", type=click.IntRange(1, 65536), default=4, show_default=True, help="Sequences per microbatch.")
@click.option("--microbatches", "microbatches_per_step", type=click.IntRange(1, 8192), default=16, show_default=True, help="Per step.")
@click.option("--data", "source", default="stdlib", show_default=True, metavar="SOURCE", help="Text to train on; see below.")
@click.option("--field", metavar="NAME", help="Where jsonl and parquet files have the text.  [default: text]")
@click.option("--tokenizer", default="bytes", show_default=True, metavar="NAME", help="bytes, bpe:SIZE, a tokenizer.json or its folder.")
@click.option("--evaluation-fraction", type=FiniteRange(0, 0.5), default=0.0, show_default=True, help="Share of the text kept for it.")
@click.option(
    "--evaluate-every", "evaluate_every_steps", type=click.IntRange(0, 10**9), default=0, show_default=True, help="Steps; 0: never."
)
@click.option("--evaluation-microbatches", type=click.IntRange(1, 8192), default=16, show_default=True, help="Per evaluation.")
@click.option("--steps", type=click.IntRange(0, 10**9), default=0, show_default=True, help="End after so many steps; 0: never.")
@click.option("--learning-rate", type=FiniteRange(0, 100), default=3e-3, show_default=True, help="Its height, after the warm-up.")
@click.option("--seed", type=SEED, default=0, show_default=True, help="First weights and order of the text.")
@click.option("--accumulate", type=click.Choice(["float32", "float64"]), default="float32", show_default=True, help="Gradient sums.")
@click.option("--optimizer", type=click.Choice(["adamw", "muon", "lamb", "sgd"]), default="adamw", show_default=True, help="The update.")
@click.option(
    "--optimizer-bits", type=click.Choice([32, 8]), default=32, show_default=True, help="Of each moment; 8: a quarter of the memory."
)
@click.option(
    "--trust", type=click.Choice(["on", "audits", "off"]), default="on", show_default=True, help="What peers check; off: a closed group."
)
@click.option("--purpose", metavar="TEXT", default="", help="What is trained, and what for: shown to those who may join.")
@click.option("--licence", metavar="NAME", default="", help="Licence of the trained model.")
@click.option("--contact", metavar="TEXT", default="", help="An e-mail address or page at which you are reached.")
@click.option("--from", "sources", multiple=True, metavar="FOLDER", help="Go on from an earlier run's state; see below.")
@click.option("--before", type=click.IntRange(0), metavar="STEP", help="With --from: only what was reached before this step.")
@click.option("--device-memory", type=MEMORY, metavar="SIZE", help="Cut so that each stage fits a device with so much, e.g. 8GB.")
@click.option("--link", type=Rate(), metavar="RATE", help="Choose what crosses the network for such lines, e.g. 20Mbit; see below.")
@click.option("--rtt", type=RoundTrip(), default="50ms", show_default=True, metavar="TIME", help="With --link: round trips.")
@click.option("--tflops", type=FiniteRange(1e-3, 1e4), default=20, show_default=True, help="With --link: a device's speed.")
@click.option("--force", is_flag=True, help="Overwrite an existing run.toml (never the key).")
@daemon_command
def new(
    context: click.Context, /, folder: str, sources: tuple[str, ...], device_memory: int | None, force: bool, as_json: bool, **fields: Any
) -> None:
    """Write DIR/run.toml and the organiser's key.

    run.toml says what is trained, on what and how; edit it as you like before the run starts. organiser.key signs the
    run: keep it, and keep it to yourself. An existing key is used again.

    SOURCE is a file or folder of text, jsonl or parquet files, an http(s) address, hub:OWNER/NAME on a model hub, or stdlib.
    It is turned into tokens when the run starts. bpe:SIZE trains a tokenizer on the text itself.

    With --from the run goes on where an earlier one has come to, with its optimizer's state and all its fields but those
    that flags name; the number of stages may be another. FOLDER is what `peerd export` wrote; or, repeated, the homes of
    peers that hold every stage between them: then the newest step of which their checkpoints have every parameter is taken.

    With --device-memory the model is cut into --stages, or into as few as it takes, so that the smallest device can serve each
    of them. What each stage takes is printed: memory, and the upload that its speed needs.

    With --link codecs, boundary and local steps are those that come to a loss first over lines of that rate each way, by the
    measurements of `peerd help performance` and simulated steps; so are optimizer, microbatches of an update and learning
    rate where no flag names them. What was chosen, why, and what it costs is printed. With local updates --microbatches are
    those of an update, and a step has as many for each.

    MODEL is decoder (the built-in one), hf:NAME (an architecture of transformers, such as hf:llama, or a checkpoint's name on
    the hub), a local folder with a checkpoint to go on from, with its own tokenizer unless --tokenizer names another, or
    blocks:ENTRY (from an installed package, or blocks:resnet).
    It is checked to split exactly before anything is written. Of what is not the decoder only sizes that flags name change.

    With --trust on a step counts once most peers of a stage hold the same numbers, and who signs two versions is shut out. With
    audits peers also compute some work of their mates again; that needs averages without a codec. See `peerd help trust`.

    \b
    Examples:
      peerd new my-run --stages 2 --steps 1000
      peerd new llama --model hf:llama --layers 6 --set vocab_size=256
      peerd start my-run
      peerd new my-run --tokenizer bpe:2048 --evaluation-fraction 0.02
      peerd new my-run --link 20Mbit --rtt 60ms
      peerd new wider --from exported --stages 4 --steps 2000
    """
    target = Path(folder).expanduser().absolute()
    given = {name for name in fields if context.get_parameter_source(name) is ParameterSource.COMMANDLINE}
    _check_sources(given, is_given=bool(sources))
    _check_link(fields, given | ({"from"} if sources else set()))
    if not sources:
        manifest = _manifest_of(target, fields)
    create_folder(target)
    run_file = target / "run.toml"
    if run_file.exists() and not force:
        raise UsageError(f"{run_file} exists", "choose another folder, or overwrite it with --force")
    if sources:
        manifest = _continued(target, sources, {name: fields[name] for name in given})
    elif fields["model"] != "decoder":
        manifest = _with_model(target, manifest, fields, given)
    choice = _choice_for(manifest, fields, given) if fields["link"] else None
    manifest = choice.manifest if choice is not None else manifest
    loads = loads_of(manifest)
    if device_memory:
        manifest = fitted_to(manifest, loads, device_memory, "num_stages" in given)
    _write(target, manifest, estimates(manifest, loads), choice, not fields["name"], as_json)


def _check_sources(given: set[str], *, is_given: bool) -> None:
    """Raise UsageError if flags do not go with --from, or need it."""
    if not is_given:
        if "before" in given:
            raise UsageError("--before goes with --from", "name the earlier run's homes or export with --from")
        return
    model_flags = _MODEL_FLAGS | {"model": "--model", "config_file": "--config", "settings": "--set"}
    model_flags |= {"tie_word_embeddings": "--tie-word-embeddings"} | _BOUNDARY_FLAGS
    for flag in [flag for name, flag in model_flags.items() if name in given]:
        raise UsageError(f"{flag} cannot go with --from", "the model is the earlier run's: leave it out")


def _check_link(fields: dict[str, Any], given: set[str]) -> None:
    """Raise UsageError if flags do not go with --link, or need it."""
    if not fields["link"]:
        for name in {"rtt", "tflops"} & given:
            raise UsageError(f"--{name} goes with --link", "name the rate of the lines with --link")
        return
    for flag in [flag for name, flag in (CHOSEN_FLAGS | {"from": "--from"}).items() if name in given]:
        raise UsageError(f"{flag} cannot go with --link", "leave out one of them: --link chooses what crosses the network itself")
    if fields["trust"] == "audits":
        raise UsageError("--trust audits cannot go with --link", "leave out one of them: with codecs of averages nobody can audit")


def _choice_for(manifest: Manifest, fields: dict[str, Any], given: set[str]) -> ChosenWay:
    from peerd.planner.contenders import KeptChoices
    from peerd.planner.race_results import race_results
    from peerd.sim.home_lines import HomePeers

    peers = HomePeers(bytes_per_s=fields["link"], round_trip_s=fields["rtt"], flops=1e12 * fields["tflops"])
    kept = KeptChoices(
        optimizer=fields["optimizer"] if "optimizer" in given else None,
        microbatches="microbatches_per_step" in given,
        learning_rate="learning_rate" in given,
    )
    return chosen_for(manifest, peers, kept, race_results())


def _write(
    folder: Path, manifest: Manifest, stages: list[StageEstimate], choice: ChosenWay | None, named_by_folder: bool, as_json: bool
) -> None:
    from peerd.cli.render_estimate import NOMINAL_FLOPS, estimate_fields, estimate_lines
    from peerd.config.atomic import replace_file
    from peerd.config.manifest import run_id
    from peerd.config.organiser import KEY_FILE, create_key, load_key, public_bytes
    from peerd.config.run_file import explained
    from peerd.planner.link_needs import planned_needs

    run_file, key_file = folder / "run.toml", folder / KEY_FILE
    key = load_key(key_file) if key_file.exists() else create_key(key_file)
    replace_file(run_file, explained(manifest))
    run = run_id(public_bytes(key), manifest.name)
    reply = {"schema": SCHEMA, "run": run, "run_file": str(run_file), "key_file": str(key_file), "step": manifest.start.step}
    reply |= {"link": choice_fields(choice)} if choice is not None else {}
    needs = planned_needs(manifest, stages, NOMINAL_FLOPS)
    if is_printed({**reply, "stages": [estimate_fields(*each) for each in zip(stages, needs, strict=True)]}, as_json):
        return
    if manifest.name != folder.name and named_by_folder:
        click.echo(f"name:   {manifest.name} (the folder's name without what a run's name cannot have; --name chooses another)")
    click.echo(f"wrote {run_file} (edit it as you like) and {key_file} (keep it secret)")
    if manifest.start.state:
        click.echo(f"begins: at step {manifest.start.step}, in {manifest.train.num_stages} stages")
    for line in [*(choice_lines(choice) if choice is not None else []), *estimate_lines(stages, needs, manifest.slots)]:
        click.echo(line)
    click.echo(f"run id: {run}")
    click.echo(pasteable(f"next:   peerd start {quote(str(run_file))}"))
    if (num_stages := manifest.train.num_stages) > 1:
        peers = ",".join(f"cpu:{number}" for number in range(min(num_stages, MOST_SHOWN_PEERS)))
        click.echo(
            f"        a step needs a peer at each of the {num_stages} stages; {len(peers.split(','))} on this machine: --device {peers}"
        )


def _with_model(folder: Path, manifest: Manifest, fields: dict[str, Any], given: set[str]) -> Manifest:
    """The manifest with a model other than the built-in one. Weights that come with the model are written beside it as START_FILE."""
    from peerd.cli.launch import run_child
    from peerd.config import manifest as manifests

    request = {
        "model": fields["model"],
        "config": fields["config_file"] or "",
        "changes": {_GENERAL_NAMES[name]: fields[name] for name in _MODEL_FLAGS if name in given} | _settings(fields["settings"]),
        "tie_word_embeddings": fields["tie_word_embeddings"],
        "num_stages": fields["num_stages"],
        "seed": fields["seed"],
        "start": str(folder / START_FILE),
    }
    reply = run_child("peerd.intake", request, what="taking in the model")
    if reply["start"] and fields["boundary"] != "none":
        raise UsageError("a checkpoint's weights do not fit a narrow boundary", "name its architecture: --model hf:NAME")
    for remark in reply["remarks"]:
        click.echo(f"peerd: {remark}", err=True)
    start, data = manifests.StartConfig(state=START_FILE if reply["start"] else ""), manifest.data
    if reply["tokenizer"] and "tokenizer" not in given:
        data = dataclasses.replace(data, tokenizer=reply["tokenizer"])
        click.echo("peerd: its own tokenizer is used; --tokenizer names another", err=True)
    try:
        train = dataclasses.replace(manifest.train, evaluate_every_steps=fields["evaluate_every_steps"])
        narrow = {name: fields[name] for name in _BOUNDARY_FLAGS if name in given}
        model = reply["model"] | narrow | _masking(reply["model"], data.tokenizer)
        document = {"model": model, "train": {"num_stages": manifest.train.num_stages}}
        taken_in = manifests.parse(document, "the model").model
        return dataclasses.replace(manifest, model=taken_in, data=data, start=start, train=train)
    except ValueError as error:
        raise UsageError(str(error), "correct that flag; `peerd new --help` lists them") from None


def _masking(model: dict[str, Any], tokenizer: str) -> dict[str, Any]:
    """Additional fields of a masked language model, which hides the share of tokens that BERT hides."""
    if model.get("objective") != "masked":
        return {}
    token = mask_token_of(tokenizer, model["vocab_size"])
    click.echo(f"peerd: {MASKED_SHARE:.0%} of the tokens are hidden behind token {token}, and learned; [model] says both", err=True)
    return {"masked_share": MASKED_SHARE, "mask_token": token}


def _settings(given: tuple[str, ...]) -> dict[str, Any]:
    """Parse --set KEY=VALUE. A value is JSON if it parses as such, else text."""
    found: dict[str, Any] = {}
    for setting in given:
        key, sign, value = setting.partition("=")
        if not (key and sign):
            raise UsageError(f"--set {setting}: not KEY=VALUE", "name a field of the config and its value")
        try:
            found[key] = json.loads(value)
        except ValueError:
            found[key] = value
    return found


def _continued(folder: Path, sources: tuple[str, ...], given: dict[str, Any]) -> Manifest:
    """The earlier run's manifest, changed by the given flags. Its state is written beside it as START_FILE."""
    from peerd.cli.launch import run_child
    from peerd.config import manifest as manifests

    folders = [str(Path(source).expanduser().absolute()) for source in sources]
    request = {"sources": folders, "out": str(folder / START_FILE), "before": given.get("before")}
    reply = run_child("peerd.repartition", request, what="reading the earlier run")
    earlier = manifests.parse(reply["manifest"], "the earlier run")
    tokenizer = given.get("tokenizer") or known_tokenizer(earlier)
    data = data_of({"source": earlier.data.source, "field": earlier.data.field} | given | {"tokenizer": tokenizer})
    fraction = given.get("evaluation_fraction", earlier.data.evaluation_fraction)
    if not reply["optimizer"]:
        click.echo("peerd: the state comes without the optimizer's, whose averages begin anew", err=True)
    if reply["inexact_steps"]:
        click.echo(f"peerd: {reply['inexact_steps']} steps of the earlier run were not exact", err=True)
    if earlier.model.tells_tokens and given.get("seed", earlier.seed) != earlier.seed:
        raise UsageError("with this boundary the seed is a part of the model", f"leave --seed out: it stays {earlier.seed}")
    try:
        manifest = dataclasses.replace(
            earlier,
            name=given["name"] if given.get("name") else _name_from(folder),
            seed=given.get("seed", earlier.seed),
            data=dataclasses.replace(data, evaluation_fraction=fraction),
            start=manifests.StartConfig(state=START_FILE, step=reply["step"]),
            about=dataclasses.replace(earlier.about, **{name: given[name] for name in _ABOUT_FIELDS if name in given}),
            swarm=dataclasses.replace(earlier.swarm, **_trust_of(given)),
            train=dataclasses.replace(earlier.train, **recut(earlier, {name: given[name] for name in _TRAIN_FIELDS if name in given})),
        )
    except ValueError as error:
        raise UsageError(str(error), "correct that flag; `peerd new --help` lists them") from None
    if 0 < manifest.train.steps <= manifest.start.step:
        raise UsageError(f"the earlier run has done {manifest.start.step} steps", "name more with --steps, or 0 for no end")
    return manifest


def recut(earlier: Manifest, fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of [train] that flags change. With another number of stages, a cut that was not even is replaced by "cost"."""
    chosen = earlier.train.cut != "even" or bool(earlier.model.boundary_layers)
    moves = fields.get("num_stages", earlier.train.num_stages) != earlier.train.num_stages
    return {**fields, "cut": "cost"} if chosen and moves else fields


def _manifest_of(folder: Path, fields: dict[str, Any]) -> Manifest:
    from peerd.config.manifest import AboutConfig, Manifest, SwarmConfig, TrainConfig

    name = fields["name"] if fields["name"] is not None else _name_from(folder)
    if fields["model"] == "decoder" and (fields["config_file"] or fields["settings"]):
        raise UsageError("--config and --set are for models of transformers", "name one with --model hf:NAME")
    data, train = data_of(fields), {field: fields[field] for field in _TRAIN_FIELDS}
    if fields["model"].startswith("blocks:"):  # it makes its own samples; the decoder that stands in for it would need text to evaluate
        train["evaluate_every_steps"] = 0
    try:
        return Manifest(
            name=name,
            seed=fields["seed"],
            model=_decoder_of(fields, vocab_size_of(data.tokenizer)),
            data=dataclasses.replace(data, evaluation_fraction=fields["evaluation_fraction"]),
            train=TrainConfig(**train),
            swarm=SwarmConfig(**_trust_of(fields)),
            about=AboutConfig(**{field: fields[field] for field in _ABOUT_FIELDS}),
        )
    except ValueError as error:
        raise UsageError(str(error), "correct that flag; `peerd new --help` lists them") from None


def _trust_of(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of [swarm] that --trust names. Audits do not look into the sums of groups, so such a run has none."""
    trust = {"trust": fields["trust"]} if "trust" in fields else {}
    return trust | {"group_size": 0} if trust.get("trust") == "audits" else trust


def _decoder_of(fields: dict[str, Any], vocab_size: int) -> ModelConfig:
    """The built-in decoder. In a run of another model it is a placeholder."""
    from peerd.config.manifest import ModelConfig

    few_layers = max(4, fields["num_stages"])
    if fields["model"] != "decoder":
        return ModelConfig(num_layers=few_layers)
    num_layers, d_ff = fields["num_layers"] or few_layers, fields["d_ff"] or 4 * fields["d_model"]
    sizes = {"num_layers": num_layers, "d_model": fields["d_model"], "num_heads": fields["num_heads"], "d_ff": d_ff}
    sizes |= {"boundary_rank": fields["boundary_rank"] or 0}
    return ModelConfig(**sizes, boundary=fields["boundary"], vocab_size=vocab_size, tie_word_embeddings=fields["tie_word_embeddings"])


def _name_from(folder: Path) -> str:
    """The folder's name without characters that the name of a run cannot have."""
    allowed = "".join(character for character in folder.name if character.isascii() and (character.isalnum() or character in "-_."))
    return allowed[:64] or "run"
