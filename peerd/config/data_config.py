"""Which text a run trains on and what its tokens are: the manifest's [data]."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from peerd.config.bounds import between

REMOTE = ("http://", "https://", "hub:")
"""What the name of a data source or tokenizer begins with that is not on this machine."""
LOCAL = "local"
"""What a signed manifest calls a file that only its organiser has; peers never learn a path of another machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Which tokens the run trains on. Peers agree on the token file's hash, never on a path."""

    source: str = "stdlib"
    """`stdlib` (the Python standard library's sources), or in a run.toml a file, a folder, a URL or `hub:NAME` of the organiser."""
    source_blake3: str = ""
    """Hash of the file that a URL gives, hex; filled in when the run is started. Where it is given, another file is refused."""
    field: str = ""
    """The field of jsonl records or parquet rows that holds the text; empty: files are plain text."""
    tokenizer: str = "bytes"
    """`bytes`, `bpe:SIZE` (trained on the text), or in a run.toml a tokenizer.json, its folder or `hub:NAME`."""
    evaluation_fraction: float = 0.0
    """Share of the tokens, at the end of the token file, that evaluation reads and training never does."""
    blake3: str = ""
    """Hash of the token file, hex; filled in when the run is started."""
    chunks_blake3: str = ""
    """Hash of the hashes of its chunks, by which a download from a peer is checked; filled in when the run is started."""
    num_tokens: int = 0
    """Length of the token file; filled in when the run is started."""
    token_bytes: int = 1
    """Bytes per token in it: 1, 2 or 4, little endian; filled in when the run is started."""
    tokenizer_blake3: str = ""
    """Hash of the tokenizer.json, hex; filled in when the run is started. Empty for bytes."""
    end_of_text: str = ""
    """The token that ends each document; filled in when the run is started. Empty where there is none."""

    def __post_init__(self) -> None:
        between("data.evaluation_fraction", self.evaluation_fraction, 0.0, 0.5)
        between("data.num_tokens", self.num_tokens, 0, 1 << 48)
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
        """With its paths as seen from `folder`, where the run.toml lies; what is no path stays as it is."""
        source, tokenizer = self.source, self.tokenizer
        if source != "stdlib" and not source.startswith(REMOTE):
            source = str((folder / Path(source).expanduser()).absolute())
        if self.tokenizer_is_path:
            tokenizer = str((folder / Path(tokenizer).expanduser()).absolute())
        return dataclasses.replace(self, source=source, tokenizer=tokenizer)

    def published(self) -> DataConfig:
        """As the signed manifest has it: peers never learn a path of another machine, or an address with a key in it."""
        source = self.source if self.source == "stdlib" else LOCAL
        tokenizer = self.tokenizer if self.tokenizer == "bytes" or self.tokenizer.startswith("bpe:") else LOCAL
        return dataclasses.replace(self, source=source, tokenizer=tokenizer)


def _names_a_tokenizer(tokenizer: str) -> bool:
    kind, _, rest = tokenizer.partition(":")
    if kind == "bpe":
        return rest.isascii() and rest.isdigit() and len(rest) < 8 and 256 < int(rest) <= 1_000_000
    return tokenizer in ("bytes", LOCAL) or (kind == "hub" and bool(rest)) or "/" in tokenizer or tokenizer.endswith(".json")


def check_hash(name: str, value: str) -> None:
    """ValueError unless this is a BLAKE3 in hex, or empty: it becomes part of a path."""
    if value and not (len(value) == 64 and all(character in "0123456789abcdef" for character in value)):
        raise ValueError(f"{name} must be 64 hex digits")
