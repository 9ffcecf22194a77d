"""Reading a checkpoint as transformers does: its weights from safetensors alone, and nothing of its own code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from peerd.errors import ManifestError
from peerd.models.hf.library import first_line, load_library


def load_pretrained(folder: Path) -> tuple[Any, Any]:
    """A causal language model, float32 and in evaluation mode, and its tokenizer. ManifestError where the folder has no such."""
    library = load_library()
    safe = {"local_files_only": True, "trust_remote_code": False}
    try:
        model = library.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, use_safetensors=True, **safe)
        return model.eval(), library.AutoTokenizer.from_pretrained(folder, **safe)
    except Exception as error:  # whatever the library makes of files that are not what they should be
        raise ManifestError(f"{folder} cannot be read: {first_line(error)}", "name an export with a tokenizer, or a native one") from None
