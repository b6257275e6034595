"""The one datamodule interface of the zoo: what a domain's data must answer, and the loaders that follow from it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sized
from typing import Any, ClassVar, Literal

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

Split = Literal["train", "val", "test", "predict"]


def epoch_order(length: int, seed: int | str, epoch: int) -> torch.Tensor:
    """The order in which ``length`` samples are served: a function of seed and epoch alone."""
    digest = hashlib.sha256(f"order/{seed}/{epoch}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return torch.randperm(length, generator=generator)


class BatchSampler(Sampler[list[int]]):
    """Batches of sample numbers, shared out over ranks.

    Global batch b holds positions b·R·B … (b+1)·R·B of the order and rank r takes every R-th of them, so R ranks
    with batch size B see together what one process with batch size R·B sees. Where samples run out, ranks that would
    stay idle repeat samples from the start; evaluation drops such repeats by sample number.

    Args:
        length: number of samples.
        batch_size: B, samples per batch and rank.
        order: from the epoch to the order of samples; None for their natural order.
        epoch: tells the current epoch when an iteration starts.
        rank: this process.
        ranks: R, number of processes.
    """

    def __init__(
        self,
        length: int,
        batch_size: int,
        order: Callable[[int], torch.Tensor] | None,
        epoch: Callable[[], int],
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        self.length, self.batch_size, self.order, self.epoch = length, batch_size, order, epoch
        self.rank, self.ranks = rank, ranks

    def __len__(self) -> int:
        share = -(-self.length // self.ranks)
        return -(-share // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.arange(self.length) if self.order is None else self.order(self.epoch())
        padded = torch.arange(self.length + -self.length % self.ranks) % self.length
        share = order[padded][self.rank :: self.ranks].tolist()
        for start in range(0, len(share), self.batch_size):
            yield share[start : start + self.batch_size]


class ZooDataModule(pl.LightningDataModule):
    """Base of all datamodules: a domain says what its samples are, the base serves them.

    A subclass fills :meth:`dataset`, :meth:`collate`, :meth:`fingerprint` and the property ``spec``, and, where there
    is anything to fetch or generate, ``prepare_data`` and ``setup``.

    Args:
        batch_size: samples per step and process.
        num_workers: loader processes; 0 loads in the main process.
        seed: of the order of training samples and of generated data.
    """

    generated: ClassVar[bool] = False
    """Whether samples are made on the fly rather than read from the user's or a public file."""

    def __init__(self, batch_size: int = 32, num_workers: int = 0, seed: int = 0) -> None:
        super().__init__()
        if batch_size < 1:
            raise ValueError(f"data.batch_size={batch_size} must be at least 1")
        if num_workers < 0:
            raise ValueError(f"data.num_workers={num_workers} must be at least 0")
        self.batch_size, self.num_workers, self.seed = batch_size, num_workers, seed

    def __getstate__(self) -> dict[str, Any]:
        """Leave the trainer out: loader processes get a copy of this object with its :meth:`collate`."""
        return {**self.__dict__, "trainer": None}

    @property
    def spec(self) -> Any:
        """Frozen dataclass of the facts that a model needs from the data; JSON-serialisable; valid after setup."""
        raise NotImplementedError

    def conform(self, spec: Any) -> None:
        """Make the user's file fit a finished model, or refuse.

        Args:
            spec: what the model was trained on.

        Raises:
            UserError: something that the model needs is missing; the message names it.
        """
        raise NotImplementedError

    def dataset(self, split: Split) -> Dataset[Any]:
        """The samples of a split; valid after setup."""
        raise NotImplementedError

    @staticmethod
    def collate(samples: Any) -> Any:
        """From what the dataset returns to a typed batch.

        Best a function from the file of the dataset, for loader processes import the file that it is from.
        """
        raise NotImplementedError

    def fingerprint(self) -> list[dict[str, str]]:
        """``name``, ``file`` and ``sha256`` of everything that was served."""
        raise NotImplementedError

    def notices(self) -> list[str]:
        """What to tell a user about the data before training on them, one line each; valid after setup."""
        return []

    def train_dataloader(self) -> DataLoader[Any]:
        """Training samples in an order that depends on seed and epoch alone, so that resuming repeats nothing."""
        return self._loader("train", shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        """Validation samples, each once."""
        return self._loader("val")

    def test_dataloader(self) -> DataLoader[Any]:
        """Test samples, each once."""
        return self._loader("test")

    def predict_dataloader(self) -> DataLoader[Any]:
        """Samples of the user's file, each once."""
        return self._loader("predict")

    def _loader(self, split: Split, shuffle: bool = False) -> DataLoader[Any]:
        dataset = self.dataset(split)
        if not isinstance(dataset, Sized):
            raise TypeError(f"the {split} dataset must have a length")
        length, trainer = len(dataset), self.trainer
        # The run's own seed counts too, so that runs with several seeds differ in their order of samples.
        seed = f"{self.seed}/{os.environ.get('PL_GLOBAL_SEED', '0')}"

        def order(epoch: int) -> torch.Tensor:
            return epoch_order(length, seed, epoch)

        def epoch() -> int:
            if trainer is None:
                return 0
            # Not current_epoch: when a resumed run fetches its first batches, that is still the epoch before.
            return int(trainer.fit_loop.epoch_progress.current.processed)  # type: ignore[attr-defined]

        sampler = BatchSampler(
            length,
            self.batch_size,
            order if shuffle else None,
            epoch,
            rank=trainer.global_rank if trainer is not None else 0,
            ranks=trainer.world_size if trainer is not None else 1,
        )
        return DataLoader(
            dataset,
            batch_sampler=sampler,
            collate_fn=self.collate,
            num_workers=self.num_workers,
            # Spawned workers inherit no threads, locks or CUDA contexts from the trainer.
            multiprocessing_context="spawn" if self.num_workers else None,
            persistent_workers=self.num_workers > 0,
            pin_memory=torch.cuda.is_available(),
        )
