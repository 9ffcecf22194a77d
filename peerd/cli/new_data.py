"""The text and the tokenizer of a run that `peerd new` writes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from peerd.cli.options import existing_path, existing_source
from peerd.errors import UsageError

if TYPE_CHECKING:
    from peerd.config.manifest import DataConfig, Manifest
    from peerd.data.tokenizer import FileTokenizer


def data_of(fields: dict[str, Any]) -> DataConfig:
    """The [data] for these flags. Paths are checked and made absolute."""
    from peerd.config.data_config import LOCAL, REMOTE, DataConfig
    from peerd.data.sources import guess_field

    if fields["source"] == LOCAL:
        raise UsageError("the earlier run's text is a file of its organiser's", "name it with --data")
    source, tokenizer = existing_source(fields["source"], "--data"), fields["tokenizer"]
    field = fields.get("field")
    if tokenizer != "bytes" and not tokenizer.startswith(("bpe:", *REMOTE)):
        tokenizer = existing_path(tokenizer, "--tokenizer", "bytes, bpe:SIZE, a tokenizer.json or its folder")
        tokenizer = tokenizer if "." in Path(tokenizer).name else tokenizer + "/"
    try:
        return DataConfig(source=source, field=guess_field(source) if field is None else field, tokenizer=tokenizer)
    except ValueError as error:
        raise UsageError(str(error), "correct --tokenizer") from None


def known_tokenizer(earlier: Manifest) -> str:
    """The earlier run's tokenizer: its path in this machine's cache, else its name."""
    from peerd.config.data_config import LOCAL
    from peerd.config.paths import cache_folder
    from peerd.data.tokenizer import tokenizer_path

    kept = tokenizer_path(earlier.data, cache_folder())
    if kept is None and earlier.data.tokenizer == LOCAL:
        raise UsageError("the earlier run's tokenizer is a file of its organiser's", "name it with --tokenizer")
    return str(kept) if kept is not None else earlier.data.tokenizer


def vocab_size_of(tokenizer: str) -> int:
    """Number of tokens of a tokenizer. A BPE that is not trained yet will have as many as requested."""
    from peerd.data.tokenizer import BYTE_VOCABULARY

    if tokenizer == "bytes":
        return BYTE_VOCABULARY
    return int(tokenizer.removeprefix("bpe:")) if tokenizer.startswith("bpe:") else _opened(tokenizer).vocab_size


def mask_token_of(tokenizer: str, vocab_size: int) -> int:
    """The token that replaces hidden ones: the tokenizer's mask token, else the model's last token if no text contains it."""
    own = None if tokenizer == "bytes" or tokenizer.startswith("bpe:") else _opened(tokenizer).mask_token
    if own is not None and own < vocab_size:
        return own
    if vocab_size_of(tokenizer) >= vocab_size:
        raise UsageError(
            f"all {vocab_size} tokens of the masked model are the tokenizer's: none is left to hide others behind",
            f"give it one more: --set vocab_size={vocab_size_of(tokenizer) + 1}",
        )
    return vocab_size - 1


def _opened(tokenizer: str) -> FileTokenizer:
    """The tokenizer of a path, or of a hub's name, which is downloaded."""
    from peerd.config.paths import cache_folder
    from peerd.data.download import obtain_tokenizer
    from peerd.data.progress import silent
    from peerd.data.tokenizer import TOKENIZER_FILE, FileTokenizer

    path = obtain_tokenizer(tokenizer, cache_folder(), silent)
    return FileTokenizer(path / TOKENIZER_FILE if path.is_dir() else path, "")
