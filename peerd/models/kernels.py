"""The folder of torch's compiler for its kernels. peerd compiles none, but parts of torch that it uses load the compiler."""

from __future__ import annotations

import os

from peerd.config.paths import cache_folder


def keep_kernels_in_cache() -> None:
    """Call this before the compiler is loaded: by default it creates a folder in the temporary directory and leaves it there."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "torchinductor"))
