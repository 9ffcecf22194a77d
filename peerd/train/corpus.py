"""The run's microbatches: the window of the token file that each sample is, for training and, apart from it, for evaluation."""

from __future__ import annotations

import dataclasses
import hashlib
import struct

import numpy as np
import torch
from torch import Tensor

from peerd.config.data_config import AGREED
from peerd.config.manifest import Manifest
from peerd.data.tokenizer import BYTE_VOCABULARY
from peerd.data.tokens import TokenFile
from peerd.errors import ManifestError, disk_error
from peerd.train.masking import Masking

EVALUATION = 2**64 - 1
"""Takes the step's place in the hash of an evaluation window: all evaluations read the same windows, and no step is so high."""


def agree_on_data(manifest: Manifest, token_file: TokenFile) -> Manifest:
    """The manifest with its data's hash and length filled in.

    Raises ManifestError if they are filled in already and differ: this machine's text or tokenizer is not the run's.
    """
    data = manifest.data
    if data.tokenizer_blake3 and data.tokenizer_blake3 != token_file.tokenizer_blake3:
        raise ManifestError(
            f"this machine's tokenizer has blake3 {token_file.tokenizer_blake3[:12]}..., the run's has {data.tokenizer_blake3[:12]}...",
            "use the organiser's own text and tokenizer, or fetch the data from a peer with --data swarm",
        )
    if data.blake3 and data.blake3 != token_file.blake3:
        raise ManifestError(
            f"this machine's data has blake3 {token_file.blake3[:12]}... ({token_file.num_tokens} tokens), "
            f"the run's has {data.blake3[:12]}... ({data.num_tokens} tokens)",
            "use the organiser's own text as data, or fetch it from a peer with --data swarm",
        )
    told = {name: getattr(token_file, name) for name in AGREED}
    agreed = dataclasses.replace(data, source_blake3=token_file.source_blake3 or data.source_blake3, **told)
    return dataclasses.replace(manifest, data=agreed)


class Corpus:
    """The run's microbatches, read from a memory-mapped token file.

    Contract: `microbatch(step, index)` and `evaluation_microbatch(index)` depend on the token file's content, the manifest and
    their arguments alone, so any peer can make any microbatch, and a resumed run sees the same data. They share no token.
    """

    def __init__(self, token_file: TokenFile, manifest: Manifest) -> None:
        """Raises ManifestError if the file is too short for one window or the vocabulary too small for its tokens."""
        train, num_tokens = manifest.train, token_file.num_tokens
        self.num_evaluation_tokens = int(manifest.data.evaluation_fraction * num_tokens)
        self.num_train_tokens = num_tokens - self.num_evaluation_tokens
        if self.num_train_tokens <= train.sequence_length + 1:
            raise ManifestError(
                f"the data has {self.num_train_tokens} tokens, too few for train.sequence_length = {train.sequence_length}",
                "use more text or a shorter sequence",
            )
        if train.evaluate_every_steps and self.num_evaluation_tokens <= train.sequence_length + 1:
            raise ManifestError(
                f"{self.num_evaluation_tokens} tokens are kept for evaluation, too few for train.sequence_length = {train.sequence_length}",
                "raise data.evaluation_fraction, use more text or a shorter sequence",
            )
        _check_vocabulary(manifest, token_file)
        self.token_file = token_file
        self.seed = manifest.seed
        self.microbatch_size = train.microbatch_size
        self.sequence_length = train.sequence_length
        self.length_at = manifest.sequence_length_at
        self._masking = masking_of(manifest)
        self._tells_tokens = manifest.model.tells_tokens
        try:
            self._tokens = np.memmap(token_file.path, dtype=np.dtype(f"<u{token_file.token_bytes}"), mode="r")
        except OSError as error:
            raise disk_error(token_file.path, error, "start again: the file is made anew") from error

    def microbatch(self, step: int, index: int) -> tuple[Tensor, Tensor]:
        """Tokens and labels of microbatch (step, index), int64 [microbatch_size, sequence_length].

        A label is the next token; for a masked model it is the hidden token, and NOT_ASKED where none is hidden. Where every stage needs
        the tokens, labels are the windows of sequence_length + 1 tokens, which hold both.
        While sequences grow, a window is the beginning of the full-length one.
        """
        return self._windows(step, index, 0, self.num_train_tokens, self.length_at(step))

    def evaluation_microbatch(self, index: int) -> tuple[Tensor, Tensor]:
        """Tokens and labels from the evaluation part of the file, always of full length."""
        return self._windows(EVALUATION, index, self.num_train_tokens, self.num_evaluation_tokens, self.sequence_length)

    def _windows(self, step: int, index: int, first: int, num_tokens: int, length: int) -> tuple[Tensor, Tensor]:
        rows = []
        for sample in range(self.microbatch_size):
            start = first + window_start(self.seed, step, index, sample, num_tokens - self.sequence_length)
            rows.append(self._tokens[start : start + length + 1])
        if self._masking is not None:
            masked = [self._masking.apply(row[:-1].astype(np.int64), self.seed, step, index, sample) for sample, row in enumerate(rows)]
            inputs, labels = (torch.from_numpy(np.stack(each)) for each in zip(*masked, strict=True))
            return inputs, labels
        windows = torch.from_numpy(np.stack(rows).astype(np.int64))
        return windows[:, :-1].contiguous(), windows if self._tells_tokens else windows[:, 1:].contiguous()


def masking_of(manifest: Manifest) -> Masking | None:
    """The run's masking; None if the model predicts the next token."""
    model = manifest.model
    return Masking(model.masked_share, model.mask_token) if model.masked_share else None


def window_start(seed: int, step: int, index: int, sample: int, num_starts: int) -> int:
    """The position in the token file at which a sample of microbatch (step, index) starts: a hash below num_starts.

    The bias of the modulo is below 1e-8 for any file under 10^11 tokens.
    """
    key = struct.pack("<4Q", seed, step, index, sample)
    return int.from_bytes(hashlib.blake2b(key, digest_size=8, person=b"peerd window").digest(), "little") % num_starts


def _check_vocabulary(manifest: Manifest, token_file: TokenFile) -> None:
    vocab_size = manifest.model.vocab_size
    if token_file.vocab_size <= vocab_size:
        return
    if not token_file.tokenizer_blake3:
        raise ManifestError(f"model.vocab_size is {vocab_size}", f"byte tokens need at least {BYTE_VOCABULARY}")
    raise ManifestError(
        f"model.vocab_size is {vocab_size}, and the run's tokenizer has {token_file.vocab_size} tokens",
        f"set model.vocab_size = {token_file.vocab_size} or more in run.toml",
    )
