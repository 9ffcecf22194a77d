"""The run.toml that `peerd new` writes: a manifest with a line of explanation above each field.

manifest.py defines the fields; this module explains them to an organiser.
"""

from __future__ import annotations

import dataclasses
import textwrap

from peerd.config.codec import EXAMPLES, FOR_AVERAGING
from peerd.config.manifest import Manifest

_HEAD = """\
# A peerd run: what is trained, on what, and how. It is the same for every peer and is signed when the run starts.
# Fields left out take their defaults. `peerd help organiser` goes through the steps.
"""

_CODECS, _ALSO = (", ".join(f'"{name}"' for name in names) for names in (EXAMPLES, FOR_AVERAGING))

# Filled in when the run starts; the organiser does not write them.
_DERIVED = {
    *(
        ("data", name)
        for name in ("source_blake3", "blake3", "chunks_blake3", "num_tokens", "token_bytes", "tokenizer_blake3", "end_of_text")
    ),
    *(("start", name) for name in ("step", "blake3")),
}

_SECTIONS = {
    "model": "What is trained.",
    "data": "The text to train on. A list of blocks makes its own samples.",
    "start": "What the run begins from.",
    "train": "How it is trained. One step is one update of the whole model.",
    "compute": "How each peer computes.",
    "wire": f"How tensors travel: {_CODECS}; see `peerd help organiser`.",
    "swarm": "How peers keep track of each other.",
}

_FIELDS = {
    "name": "Letters, digits, '-', '_', '.'. With the organiser's key it makes the run's id.",
    "seed": "Decides the first weights and which text each microbatch holds.",
    "model.kind": '"decoder": the built-in one; "hf": a transformers model by its config; "blocks": an installed entry point.',
    "model.config": "The content of its config.json. `peerd new` has checked that it splits exactly; `peerd start` checks again.",
    "model.objective": '"causal" or "masked": which of its language models.',
    "model.masked_share": "Of each sequence's tokens a masked model learns so many, hidden from it; 0: it learns the token that follows.",
    "model.mask_token": "The number of the token that hides another.",
    "model.entry": "Name in the entry-point group peerd.blocks; each peer must have its package installed.",
    "model.input_shape": "One sample for the first block. This and what follows is the entry's; `peerd new` has filled it in.",
    "model.shapes": "What each block gives for one sample.",
    "model.num_heads": "2 x num_heads must divide d_model.",
    "model.d_ff": "Width of the gated hidden layer.",
    "model.vocab_size": "256 for the byte tokenizer, else at least what the tokenizer has.",
    "model.layers_per_group": "So many layers in a row share one set of weights; 1: each has its own.",
    "model.boundary": 'Between stages: "none", or narrowed by "bottleneck" or "maxout", which costs some quality.',
    "model.boundary_factor": "So many times narrower.",
    "model.boundary_layers": "Layers before which it is narrowed; []: wherever the run is cut into stages.",
    "model.tie_word_embeddings": "Input and output embeddings are one weight; in several stages the first and the last each hold it.",
    "data.source": '"stdlib": the Python standard library\'s sources; or a file, a folder, an http(s) address, or hub:OWNER/NAME.',
    "data.field": "Where the text is in records of jsonl or parquet files; empty: the files are plain text.",
    "data.tokenizer": '"bytes"; "bpe:SIZE": trained on the text; or a tokenizer.json, its folder, or hub:OWNER/NAME.',
    "data.evaluation_fraction": "Share of the text, at its end, that is kept for evaluation and never trained on.",
    "start.state": "Empty: first weights. Or a file that `peerd new --from` wrote: the state that an earlier run reached.",
    "train.num_stages": "Parts the model is cut into; each needs at least one peer. At most model.num_layers.",
    "train.cut": 'Layers of each stage: "even", "cost" (about equal work), or a list such as [3, 2].',
    "train.microbatches_per_step": "The unit of work that travels through the stages. More of them keep more peers busy.",
    "train.microbatch_size": "Sequences per microbatch.",
    "train.sequence_length": "Tokens per sequence.",
    "train.first_sequence_length": "Sequences begin so short and grow to sequence_length by step sequence_length_steps; 0: no ramp.",
    "train.steps": "The run ends after so many steps, those before its start included; 0 goes on for ever.",
    "train.warmup_steps": "Steps over which the learning rate rises from zero.",
    "train.schedule": 'After the warm-up: "constant", or "linear" or "cosine" down to final_learning_rate.',
    "train.decay_steps": "The step at which the falling rate has come down, warm-up included; 0: at the run's last.",
    "train.optimizer": '"adamw", "lamb" (large batches), or "sgd" with momentum.',
    "train.no_decay": 'Parameters without weight decay, such as ["embedding.weight", "blocks.*"]. Vectors (norms, biases) never have it.',
    "train.max_gradient_norm": "Clip gradients by the norm of the whole model's, over all stages; 0: never.",
    "train.dropout": "Share of hidden states left out while training, after the embedding and of what the layers add to them.",
    "train.precision": '"bfloat16" or "float16" for the passes; parameters stay float32. All peers\' devices should be good at it.',
    "train.loss_scale": "First scale of float16's gradients, a power of two; it is halved when they overflow.",
    "train.loss_scale_growth_steps": "The scale is doubled after so many steps without overflow.",
    "train.delayed_updates": "Make a step's update while the next step is computed without it: every gradient is one update late.",
    "train.average_parameters_every_steps": "Peers of a stage average parameters this often, against drift of unlike devices; 0: never.",
    "train.accumulate": '"float64" makes the sum of gradients independent of its order (exact comparisons); "float32" is faster.',
    "train.evaluate_every_steps": "The loss on the evaluation text is computed this often, by the swarm itself; 0: never.",
    "train.evaluation_microbatches": "Microbatches of one evaluation.",
    "compute.threads": "Torch threads per peer; 0 takes the machine's. A fixed number makes gradients equal to the bit between peers.",
    "compute.recompute": '"always" saves memory, "never" is faster, "auto" decides by the memory at hand.',
    "compute.slots": "Microbatches a peer holds at once; 0: as the number of stages needs, up to four times as many over long links.",
    "compute.offload_optimizer": "Keep the optimizer's state in the machine's memory to spare a GPU's. Changes nothing on CPUs.",
    "wire.activations": 'Hidden states on their way to the next stage. "auto": each link is compressed as far as it needs.',
    "wire.activation_gradients": "Gradients on their way back.",
    "wire.weight_gradients": f"Gradients that the peers of a stage average, or {_ALSO}. Replicas stay equal, but the sum is not exact.",
    "swarm.rebalance_period_s": "How often peers consider moving to a weaker stage; 0: never.",
    "swarm.checkpoint_every_steps": "Each peer keeps its stage on disk this often, so that a run that was switched off resumes; 0: never.",
    "swarm.announce_period_s": "How often a peer announces itself; three missed periods and it counts as gone.",
}


def explained(manifest: Manifest) -> str:
    """The text of a run.toml that parses to `manifest`, without the fields that are filled in when the run starts."""
    lines = [_HEAD]
    for entry in dataclasses.fields(Manifest):
        value = getattr(manifest, entry.name)
        if not dataclasses.is_dataclass(value):
            lines += _assignment(entry.name, entry.name, value)
    for section, purpose in _SECTIONS.items():
        lines += ["", *(f"# {line}" for line in textwrap.wrap(purpose, 125)), f"[{section}]"]
        part = getattr(manifest, section)
        for entry in dataclasses.fields(part):
            if (section, entry.name) not in _DERIVED:
                lines += _assignment(f"{section}.{entry.name}", entry.name, getattr(part, entry.name))
    return "\n".join(lines) + "\n"


def _assignment(path: str, name: str, value: object) -> list[str]:
    import tomli_w

    comment = _FIELDS.get(path)
    assignment = tomli_w.dumps({name: value}).rstrip("\n")
    if isinstance(value, tuple):
        assignment = f"{name} = [{', '.join(_inline(each) for each in value)}]"  # on one line
    if isinstance(value, str) and "\n" in value and value.isascii() and value.replace("\n", "").isprintable() and "'''" not in value:
        assignment = f"{name} = '''\n{value}'''"  # verbatim, over several lines
    return [f"# {comment}", assignment] if comment else [assignment]


def _inline(value: object) -> str:
    import tomli_w

    return tomli_w.dumps({"x": value}).removeprefix("x = ").rstrip("\n")
