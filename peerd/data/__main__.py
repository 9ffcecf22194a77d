"""Makes a run's token file ahead of its start, and says what it is.

`python -m peerd.data JSON` shows a bar on a terminal. JSON: {"run_file": path, "data": source or ""}.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from peerd.config.manifest import load
from peerd.config.paths import cache_folder
from peerd.data.progress import TerminalBar, silent
from peerd.data.tokens import prepare_tokens
from peerd.errors import ExitCode, PeerdError

SCHEMA = 1


def prepare(run_file: Path, source: str) -> dict[str, Any]:
    """What the token file of a run.toml is, once it is there; `source` replaces the run's own."""
    manifest, bar = load(run_file), TerminalBar()
    data = dataclasses.replace(manifest.data, source=source) if source else manifest.data
    data = data.located(run_file.absolute().parent)
    try:
        made = prepare_tokens(data.source, cache_folder(), data, bar if sys.stderr.isatty() else silent)
    finally:
        bar.clear()
    evaluation = int(data.evaluation_fraction * made.num_tokens)
    return {
        "schema": SCHEMA,
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


def main(arguments: list[str]) -> int:
    try:
        request = json.loads(arguments[0])
        print(json.dumps(prepare(Path(request["run_file"]), request["data"])))
    except PeerdError as error:
        print(f"peerd: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("peerd: interrupted; the same command goes on from here", file=sys.stderr)
        return ExitCode.INTERRUPTED
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
