"""Makes a run's token file before the run starts, with a bar on a terminal."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peerd.config.manifest import load
from peerd.config.paths import cache_folder
from peerd.data.progress import TerminalBar, silent
from peerd.data.tokens import prepare_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFileRequest:
    run_file: str
    data: str = ""
    """Source that replaces the run's own."""


def run(request: TokenFileRequest) -> dict[str, Any]:
    """Make the token file of a run.toml, and return its properties."""
    run_file = Path(request.run_file)
    manifest, bar = load(run_file), TerminalBar()
    data = dataclasses.replace(manifest.data, source=request.data) if request.data else manifest.data
    data = data.located(run_file.absolute().parent)
    try:
        made = prepare_tokens(data.source, cache_folder(), data, bar if sys.stderr.isatty() else silent)
    except KeyboardInterrupt:
        bar.clear()
        print("peerd: interrupted; the same command continues from here", file=sys.stderr)
        raise
    finally:
        bar.clear()
    evaluation = int(data.evaluation_fraction * made.num_tokens)
    return {
        "source": data.source,
        "tokenizer": data.tokenizer,
        "vocab_size": made.vocab_size,
        "end_of_text": made.end_of_text,
        "num_tokens": made.num_tokens,
        "num_evaluation_tokens": evaluation,
        "token_bytes": made.token_bytes,
        "blake3": made.blake3,
        "file": str(made.path),
        "steps_per_pass": (made.num_tokens - evaluation) / manifest.tokens_per_step,
    }
