"""The manifest's [data]: the text that a run trains on, and its tokens."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from peerd.config.bounds import Between, check_bounds

REMOTE = ("http://", "https://", "hub:")
"""Prefixes of data sources and tokenizers that are not on this machine."""
AGREED = ("blake3", "chunks_blake3", "num_tokens", "token_bytes", "tokenizer_blake3", "end_of_text")
"""What [data] says of the token file, under the names that `TokenFile` has for them."""
LOCAL = "local"
"""Name of a file of the organiser's in a signed manifest; peers never learn a path of another machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """The tokens that the run trains on. Peers agree on the token file's hash, never on a path."""

    source: str = "stdlib"
    """ "stdlib": the Python standard library's sources; or a file, a folder, an http(s) address, or hub:OWNER/NAME.

    Peers learn neither paths nor addresses of the organiser's.
    """
    source_blake3: str = ""
    """Hash of the file behind a URL, hex; filled in when the run is started. A file with another hash is refused."""
    field: str = ""
    """Where the text is in records of jsonl or parquet files; empty: the files are plain text."""
    tokenizer: str = "bytes"
    """ "bytes"; "bpe:SIZE": trained on the text; or a tokenizer.json, its folder, or hub:OWNER/NAME."""
    evaluation_fraction: Annotated[float, Between(0.0, 0.5)] = 0.0
    """Share of the text, at its end, that is kept for evaluation and never trained on."""
    blake3: str = ""
    """Hash of the token file, hex; filled in when the run is started."""
    chunks_blake3: str = ""
    """Hash of the hashes of its chunks, which checks a download from a peer; filled in when the run is started."""
    num_tokens: Annotated[int, Between(0, 1 << 48)] = 0
    """Length of the token file; filled in when the run is started."""
    token_bytes: int = 1
    """Bytes per token in the token file: 1, 2 or 4, little endian; filled in when the run is started."""
    tokenizer_blake3: str = ""
    """Hash of the tokenizer.json, hex; filled in when the run is started. Empty for bytes."""
    end_of_text: str = ""
    """The token that ends each document; filled in when the run is started. Empty if there is none."""

    def __post_init__(self) -> None:
        check_bounds("data.", self)
        if self.token_bytes not in (1, 2, 4):
            raise ValueError("data.token_bytes must be 1, 2 or 4")
        if not _names_a_tokenizer(self.tokenizer):
            raise ValueError(
                f"data.tokenizer is {self.tokenizer!r}; it must be bytes, bpe:SIZE with 257 to 1000000 tokens, hub:NAME, or the path of a"
                " tokenizer.json or of its folder (./NAME where it lies beside the run.toml)"
            )
        for name in ("source_blake3", "blake3", "chunks_blake3", "tokenizer_blake3"):
            check_hash(f"data.{name}", getattr(self, name))

    @property
    def tokenizer_is_path(self) -> bool:
        plain = self.tokenizer in ("bytes", LOCAL) or self.tokenizer.startswith(("bpe:", *REMOTE))
        return not plain

    def located(self, folder: Path) -> DataConfig:
        """The same with absolute paths. Relative ones start at `folder`, which holds the run.toml; addresses and names stay."""
        source, tokenizer = self.source, self.tokenizer
        if source != "stdlib" and not source.startswith(REMOTE):
            source = str((folder / Path(source).expanduser()).absolute())
        if self.tokenizer_is_path:
            tokenizer = str((folder / Path(tokenizer).expanduser()).absolute())
        return dataclasses.replace(self, source=source, tokenizer=tokenizer)

    def published(self) -> DataConfig:
        """The version for the signed manifest: peers never learn a path of another machine, or an address that contains a key."""
        source = self.source if self.source == "stdlib" else LOCAL
        tokenizer = self.tokenizer if self.tokenizer == "bytes" or self.tokenizer.startswith("bpe:") else LOCAL
        return dataclasses.replace(self, source=source, tokenizer=tokenizer)


def _names_a_tokenizer(tokenizer: str) -> bool:
    kind, _, rest = tokenizer.partition(":")
    if kind == "bpe":
        return rest.isascii() and rest.isdigit() and len(rest) < 8 and 256 < int(rest) <= 1_000_000
    return tokenizer in ("bytes", LOCAL) or (kind == "hub" and bool(rest)) or "/" in tokenizer or tokenizer.endswith(".json")


def check_hash(name: str, value: str) -> None:
    """Raise a ValueError unless this is a BLAKE3 in hex, or empty. The hash becomes part of a path."""
    if value and not (len(value) == 64 and all(character in "0123456789abcdef" for character in value)):
        raise ValueError(f"{name} must be 64 hex digits")
