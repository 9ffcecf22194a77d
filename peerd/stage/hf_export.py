"""Exports a model as files that transformers loads: safetensors shards with their index, config.json and the tokenizer's files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from peerd.config.atomic import replace_file
from peerd.config.manifest import Manifest
from peerd.models.published import publish, tokenizer_files
from peerd.stage.export import write_tensors

MAX_SHARD_BYTES = 4 << 30
INDEX_FILE = "model.safetensors.index.json"


def write_hf_export(folder: Path, manifest: Manifest, parameters: Mapping[str, Tensor], step: int, tokenizer: str = "") -> list[str]:
    """Write the files, each whole or not at all, and delete stale shards. Returns their names. Raises DiskError, UsageError.

    `tokenizer` is the content of the run's tokenizer.json; empty if it has none.
    """
    published = publish(manifest, parameters, tokenizer)
    sizes = {name: published.tensors[name].nbytes for name in published.tensors}
    shards = split_into_shards(sizes)
    names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    for name, held in zip(names, shards, strict=True):
        write_tensors(folder / name, published.tensors.only(held), {"format": "pt", "step": str(step)})
    places = {each: name for name, held in zip(names, shards, strict=True) for each in held}
    texts = {
        INDEX_FILE: json.dumps({"metadata": {"total_size": sum(sizes.values())}, "weight_map": places}, indent=1),
        "config.json": json.dumps(published.config, indent=1),
        **tokenizer_files(manifest, tokenizer),
    }
    for name, text in texts.items():
        replace_file(folder / name, text)
    for stale in folder.glob("model-*-of-*.safetensors"):
        if stale.name not in names:
            stale.unlink()
    return [*names, *texts]


def split_into_shards(sizes: Mapping[str, int], most_bytes: int = MAX_SHARD_BYTES) -> list[list[str]]:
    """Split names, in their order, into shards of at most `most_bytes`; a larger tensor gets a shard of its own. `sizes` in bytes."""
    shards: list[list[str]] = [[]]
    room = most_bytes
    for name, size in sizes.items():
        if size > room and shards[-1]:
            shards.append([])
            room = most_bytes
        shards[-1].append(name)
        room -= size
    return shards
