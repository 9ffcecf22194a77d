"""Models of transformers that are small enough to train in a test, made from configs alone."""

from __future__ import annotations

from typing import Any

from peerd.config.manifest import ComputeConfig, Manifest, TrainConfig
from peerd.config.model_kinds import HuggingFaceConfig
from peerd.models.hf.manifest_model import choose_model

ARCHITECTURES = [
    "gpt2",
    "llama",
    "qwen2",
    "qwen3",
    "bert",
    "mistral",
    "gemma",
    "gemma2",
    "gemma3",
    "phi3",
    "phi",
    "opt",
    "gpt_neox",
    "olmo2",
    "granite",
    "mixtral",
    "smollm3",
    "starcoder2",
    "stablelm",
    "cohere",
    "glm",
    "qwen3_moe",
    "deepseek_v3",
    "gpt_oss",
    "lfm2",
    "mamba",
    "roberta",
    "distilbert",
    "bloom",
    "falcon",
]


def hf_model(name: str = "llama", **changes: Any) -> HuggingFaceConfig:
    """Three layers of width 32 and a vocabulary of bytes."""
    sizes = {"num_hidden_layers": 3, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 48, "vocab_size": 256}
    return choose_model(name, {}, sizes | changes)


def hf_manifest(num_stages: int = 3, model: HuggingFaceConfig | None = None, **train: Any) -> Manifest:
    settings: dict[str, Any] = {"microbatches_per_step": 3, "microbatch_size": 2, "sequence_length": 16} | train
    return Manifest(
        seed=7, model=model or hf_model(), train=TrainConfig(num_stages=num_stages, **settings), compute=ComputeConfig(threads=1)
    )
