"""The one datamodule interface: which samples are served, in which order, to whom."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from zoo.data.forecasting.module import ForecastingData
from zoo.data.module import BatchSampler, Split, ZooDataModule, epoch_order

SIZES = (1, 4, 7, 8, 15, 64)


@pytest.fixture(autouse=True)
def _seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")


class Numbers(ZooDataModule):
    """Ten numbers, each its own sample."""

    def dataset(self, split: Split) -> Dataset[Any]:
        return TensorDataset(torch.arange(10))

    def collate(self, samples: Any) -> torch.Tensor:
        return torch.stack([number for (number,) in samples])


def stub(progress: Any) -> Any:
    """What the loaders ask a trainer, and something that no other process could take over."""
    loop = SimpleNamespace(epoch_progress=SimpleNamespace(current=progress))
    return SimpleNamespace(fit_loop=loop, global_rank=0, world_size=1, callback=lambda: None)


def natural(length: int, batch_size: int, rank: int = 0, ranks: int = 1) -> BatchSampler:
    return BatchSampler(length, batch_size, None, lambda: 0, rank, ranks)


@pytest.mark.parametrize("batch_size", SIZES)
@pytest.mark.parametrize("length", [1, 15, 16])
def test_one_process_sees_every_sample_once_in_order(length: int, batch_size: int) -> None:
    sampler = natural(length, batch_size)
    served = list(sampler)
    assert [number for batch in served for number in batch] == list(range(length))
    assert len(served) == len(sampler)
    assert {len(batch) for batch in served[:-1]} <= {batch_size}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("batch_size", SIZES)
@pytest.mark.parametrize("length", [1, 15, 16])
def test_ranks_see_every_sample_with_equally_many_batches(length: int, batch_size: int, ranks: int) -> None:
    samplers = [natural(length, batch_size, rank, ranks) for rank in range(ranks)]
    served = [list(sampler) for sampler in samplers]
    assert {len(batches) for batches in served} == {len(samplers[0])}
    numbers = [number for batches in served for batch in batches for number in batch]
    assert set(numbers) == set(range(length))
    assert len(numbers) - length == -length % ranks


def test_ranks_share_the_batch_of_one_process() -> None:
    def order(epoch: int) -> torch.Tensor:
        return epoch_order(24, 3, epoch)

    one = list(BatchSampler(24, 8, order, lambda: 5))
    two = [list(BatchSampler(24, 4, order, lambda: 5, rank, 2)) for rank in (0, 1)]
    for whole, first, second in zip(one, *two, strict=True):
        assert whole[0::2] == first
        assert whole[1::2] == second


def test_order_is_a_function_of_seed_and_epoch() -> None:
    orders = {(seed, epoch): epoch_order(50, seed, epoch).tolist() for seed in (0, 1) for epoch in (0, 1, 2)}
    assert len(set(map(tuple, orders.values()))) == 6
    torch.manual_seed(9)
    assert all(epoch_order(50, *key).tolist() == order for key, order in orders.items())
    assert all(sorted(order) == list(range(50)) for order in orders.values())
    # Stored runs are resumed by later versions: the order must not change unnoticed.
    assert epoch_order(6, "0/0", 0).tolist() == [0, 2, 1, 4, 5, 3]


def test_training_order_follows_the_epoch_of_the_trainer() -> None:
    data = Numbers(batch_size=4, seed=7)
    progress = SimpleNamespace(processed=0)
    data.trainer = stub(progress)
    loader = data.train_dataloader()
    for epoch in (0, 1, 5):
        progress.processed = epoch
        assert torch.cat(list(loader)).tolist() == epoch_order(10, "7/0", epoch).tolist()
    for other in (data.val_dataloader(), data.test_dataloader(), data.predict_dataloader()):
        assert torch.cat(list(other)).tolist() == list(range(10))


def test_without_a_trainer_there_is_one_process_and_epoch_0() -> None:
    data = Numbers(batch_size=4, seed=7)
    assert torch.cat(list(data.train_dataloader())).tolist() == epoch_order(10, "7/0", 0).tolist()


def test_seeds_of_data_and_run_both_count(monkeypatch: pytest.MonkeyPatch) -> None:
    def order(seed: int) -> list[int]:
        return torch.cat(list(Numbers(seed=seed).train_dataloader())).tolist()

    first = order(0)
    assert order(0) == first != order(1)
    monkeypatch.setenv("PL_GLOBAL_SEED", "1")
    assert order(0) not in (first, list(range(10)))


def test_workers_serve_the_same_batches() -> None:
    served = []
    for workers in (0, 2):
        data = ForecastingData(rows=1000, lookback=24, horizon=12, batch_size=256, num_workers=workers)
        data.setup()
        data.trainer = stub(SimpleNamespace(processed=1))
        served.append(list(data.train_dataloader()))
    assert len(served[0]) == 3
    for one, other in zip(*served, strict=True):
        for name in ("index", "past", "future", "scored", "phase"):
            assert torch.equal(getattr(one, name), getattr(other, name)), name
    assert served[0][0].index.tolist() == epoch_order(665, "0/0", 1)[:256].tolist()


@pytest.mark.parametrize(
    ("settings", "reason"),
    [({"batch_size": 0}, "data.batch_size=0"), ({"num_workers": -1}, "data.num_workers=-1")],
)
def test_senseless_settings_are_refused(settings: dict[str, int], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Numbers(**settings)


def test_endless_data_are_refused() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    class Endless(Numbers):
        def dataset(self, split: Split) -> Dataset[Any]:
            return Stream()

    with pytest.raises(TypeError, match="the val dataset must have a length"):
        Endless().val_dataloader()


def test_what_a_domain_must_fill_in_says_so() -> None:
    data = ZooDataModule()
    for call in (
        lambda: data.spec,
        lambda: data.conform(None),
        lambda: data.dataset("train"),
        data.fingerprint,
    ):
        with pytest.raises(NotImplementedError):
            call()
    assert data.notices() == []
    assert not data.generated


def test_a_copy_for_loader_processes_leaves_the_trainer_behind() -> None:
    """A method as collate takes the whole object along."""
    data = Numbers(batch_size=4)
    data.trainer = stub(SimpleNamespace(processed=0))
    collate = pickle.loads(pickle.dumps(data.collate))
    assert collate.__self__.trainer is None
    assert data.trainer is not None
    assert collate([(torch.tensor(3),)]).tolist() == [3]
