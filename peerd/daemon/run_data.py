"""Finds the parts of a run on this machine: its text, the organiser's own or an equal one, and the state that it begins from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import structlog

from peerd.config.data_config import LOCAL, REMOTE
from peerd.config.manifest import Manifest, load
from peerd.config.organiser import KEY_FILE, load_key
from peerd.config.paths import cache_folder
from peerd.config.settings import Settings
from peerd.daemon.place import Place
from peerd.data.progress import Report, silent
from peerd.data.sources import STDLIB
from peerd.data.tokenizer import BYTES, tokenizer_path
from peerd.data.tokens import kept_tokens, prepare_tokens
from peerd.errors import DiskError, ManifestError, PeerdError
from peerd.models.stages import with_cut
from peerd.stage.optimizer import check_no_decay
from peerd.stage.start import StartState
from peerd.swarm.signed import sign_manifest
from peerd.train.corpus import Corpus, agree_on_data
from peerd.train.samples import Microbatches, Samples

SWARM = "swarm"
"""The data source that means: fetch the run's token file from a peer that has it."""
LOG = structlog.get_logger()


Text = tuple[Microbatches | None, str]
"""The run's text on this machine, and where it is read from."""


def organise(settings: Settings, report: Report = silent) -> Place:
    """Read run.toml, make the token file, find the state that the run begins from, sign."""
    path = Path(settings.run_file)
    manifest = load(path)
    check_model(manifest)
    manifest = with_cut(manifest)
    check_no_decay(manifest)
    (corpus, source), published = _organisers_text(manifest, settings, path.parent, report)
    start = None
    if manifest.start.state:
        start = StartState((path.parent / Path(manifest.start.state).expanduser()).absolute())
        published = start.agree(replace(published, start=replace(manifest.start, state=LOCAL)))
    signed = sign_manifest(published, load_key(path.parent / KEY_FILE))
    return Place(signed=signed, data_source=source, corpus=corpus, start=start)


def check_model(manifest: Manifest) -> None:
    """Raise a ManifestError if the model does not split into stages exactly."""
    if manifest.model.needs_split_check:
        from peerd.equality import check_split  # other runs do not need it

        check_split(manifest)


def _organisers_text(manifest: Manifest, settings: Settings, folder: Path, report: Report) -> tuple[Text, Manifest]:
    """Return the text, and the manifest that identifies it without its path."""
    if manifest.model.makes_samples:
        return (Samples(manifest), ""), manifest
    data = (replace(manifest.data, source=settings.data) if settings.data else manifest.data).located(folder)
    tokens = prepare_tokens(data.source, cache_folder(), data, report)
    agreed = agree_on_data(manifest, tokens)
    published = replace(agreed, data=replace(agreed.data, source=data.source).published())
    return (Corpus(tokens, agreed), data.source), published


def start_for(manifest: Manifest, path: str) -> StartState | None:
    """Return the state that the run begins from, if this machine still has it at that path."""
    if not (path and manifest.start.state):
        return None
    try:
        start = StartState(Path(path))
        start.agree(manifest)
    except (ManifestError, DiskError) as error:
        LOG.info("the state that the run begins from is not here any more", reason=error.message)
        return None
    return start


def text_for(manifest: Manifest, settings: Settings, remembered: str = "", report: Report = silent) -> Text:
    """Return the run's text if this machine has it; a peer without it serves a stage and launches nothing.

    `remembered` is the text's path when this home was last in the run. Raises PeerdError only for a source that the settings name.
    """
    if manifest.model.makes_samples:
        return Samples(manifest), ""
    source = settings.data or remembered or (STDLIB if manifest.data.source == STDLIB else "")
    if source == SWARM:
        kept = kept_tokens(manifest.data, cache_folder())
        return Corpus(kept, manifest) if kept else None, SWARM
    if not source:
        return None, ""
    if not settings.data and manifest.data.tokenizer != BYTES and tokenizer_path(manifest.data, cache_folder()) is None:
        LOG.info("the run's tokenizer is not on this machine, so it launches no microbatches", remedy="--data stdlib or --data swarm")
        return None, ""
    try:
        tokens = prepare_tokens(source, cache_folder(), manifest.data, report)
        agree_on_data(manifest, tokens)
    except PeerdError as error:
        if settings.data:
            raise
        LOG.info("this machine's text is not the run's, so it launches no microbatches", source=source, reason=error.message)
        return None, ""
    place = source if source == STDLIB or source.startswith(REMOTE) else str(Path(source).expanduser().absolute())
    return Corpus(tokens, manifest), place
