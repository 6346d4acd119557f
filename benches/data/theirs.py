"""The same batches from `datasets`, `tokenizers` and PyTorch's DataLoader, as someone who knows them would write it."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from datasets import IterableDataset, load_dataset
from setting import Setting
from tokenizers import Tokenizer
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

TEXTS_AT_ONCE = 512


@dataclass
class Packed(torch.utils.data.IterableDataset):
    """Documents encoded, joined and cut into whole batches in each worker."""

    documents: IterableDataset
    setting: Setting
    remaining: np.ndarray
    """Tokens of documents that were read and are not in a batch yet."""

    def __iter__(self) -> Iterator[np.ndarray]:
        tokenizer = Tokenizer.from_file(str(self.setting.root / "tokenizer" / "tokenizer.json"))
        end = tokenizer.token_to_id("<|endoftext|>")
        rows, length = self.setting.sequences, self.setting.sequence_length
        documents = iter(self.documents)
        while texts := [document["text"] for document in itertools.islice(documents, TEXTS_AT_ONCE)]:
            ids = [[*encoding.ids, end] for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
            new = np.fromiter(itertools.chain.from_iterable(ids), dtype=np.int32, count=sum(map(len, ids)))
            self.remaining = np.concatenate([self.remaining, new])
            while len(self.remaining) > rows * length:
                batch = self.remaining[: rows * length + 1]
                self.remaining = self.remaining[rows * length :]
                yield np.stack([batch[:-1].reshape(rows, length), batch[1:].reshape(rows, length)])

    def state_dict(self) -> dict[str, Any]:
        return {"documents": self.documents.state_dict(), "left": self.remaining}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.documents.load_state_dict(state["documents"])
        self.remaining = state["left"]


@dataclass
class Theirs:
    """A worker per core, each encoding on its own; with `stateful` the loader can save its position."""

    setting: Setting
    stateful: bool = False

    def batches(self, state: Any = None) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        setting = self.setting
        options: dict[str, Any] = {"split": "train", "streaming": True, "columns": ["text"]}
        if setting.hub:
            documents = load_dataset(setting.hub, **options)
        else:
            documents = load_dataset("parquet", data_files=[str(path) for path in setting.files()], **options)
        documents = documents.shuffle(seed=setting.seed, buffer_size=setting.shuffle_buffer_size)
        packed = Packed(documents, setting, np.empty(0, np.int32))
        kind = StatefulDataLoader if self.stateful else DataLoader
        self.loader = kind(packed, batch_size=None, num_workers=setting.workers)
        if state is not None:
            self.loader.load_state_dict(state)
        return ((batch[0].numpy(), batch[1].numpy()) for batch in self.loader)

    def state(self) -> Any:
        return self.loader.state_dict() if self.stateful else None
