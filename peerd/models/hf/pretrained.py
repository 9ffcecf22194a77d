"""Reads a checkpoint through transformers: weights from safetensors only, and none of the checkpoint's code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from peerd.errors import ManifestError
from peerd.models.hf.library import first_line, load_library


def load_pretrained(folder: Path) -> tuple[Any, Any]:
    """A causal language model, float32 and in evaluation mode, and its tokenizer. ManifestError if the folder has none."""
    library = load_library()
    safe = {"local_files_only": True, "trust_remote_code": False}
    try:
        model = library.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, use_safetensors=True, **safe)
        return model.eval(), library.AutoTokenizer.from_pretrained(folder, **safe)
    except Exception as error:  # the library raises anything for malformed files
        raise ManifestError(f"{folder} cannot be read: {first_line(error)}", "name an export with a tokenizer, or a native one") from None
