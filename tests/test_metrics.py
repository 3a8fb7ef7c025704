"""Means, accuracies and validation sums, against plain arithmetic and for any number of ranks."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import UserError
from common.metrics import (
    AverageMeter,
    BatchSums,
    ConfusionMatrix,
    accuracy,
    batch_sums,
    correct_counts,
    gather_batch_sums,
    summarise,
)

NAN, INF = math.nan, math.inf


class Ranks:
    """A world without processes: what every rank would hand in is known beforehand."""

    def __init__(self, parts: list[Any]):
        self.parts = parts

    def gather(self, value: Any) -> list[Any]:
        return self.parts


# --- AverageMeter -----------------------------------------------------------------------------------------------------


def test_the_mean_is_weighted() -> None:
    meter = AverageMeter()
    assert math.isnan(meter.mean)
    meter.update(1.0, 3)
    meter.update(5.0, 1)
    assert (meter.value, meter.mean) == (5.0, 2.0)


def test_the_state_is_plain_numbers_and_comes_back() -> None:
    meter, other = AverageMeter(), AverageMeter()
    meter.update(0.1, 3)
    state = json.loads(json.dumps(meter.state_dict()))
    assert all(type(value) is float for value in meter.state_dict().values())
    other.load_state_dict(state)
    assert (other.value, other.mean) == (meter.value, meter.mean)
    other.update(2.0)
    assert other.mean == pytest.approx((0.3 + 2.0) / 4)


def test_a_batch_without_samples_changes_nothing() -> None:
    meter = AverageMeter()
    meter.update(2.0, 4)
    meter.update(NAN, 0)
    assert meter.mean == 2.0


# --- accuracy ---------------------------------------------------------------------------------------------------------


def test_top_k_on_known_rows() -> None:
    logits = torch.tensor([[0.1, 0.9, 0.5], [0.9, 0.1, 0.5], [0.1, 0.5, 0.9], [0.3, 0.2, 0.1]])
    label = torch.tensor([1, 2, 0, 2])
    assert accuracy(logits, label, (1, 2, 3)) == [1, 2, 4]
    assert accuracy(logits, label) == [1, 4]  # five of three classes is any of them
    assert accuracy(logits, label, (100,)) == [4]
    assert correct_counts(logits, label).dtype == torch.int64


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_top_k_agrees_with_torch_where_nothing_is_equal(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.stack([torch.randperm(10, generator=generator) for _ in range(50)]).to(dtype)
    label = torch.randint(0, 10, (50,), generator=generator)
    hits = logits.topk(5).indices == label[:, None]
    assert accuracy(logits, label) == [int(hits[:, :1].sum()), int(hits.sum())]


def test_equal_logits_rank_by_class() -> None:
    logits = torch.zeros(4, 4)
    assert accuracy(logits, torch.tensor([0, 1, 2, 3]), (1, 2, 3)) == [1, 2, 3]
    assert accuracy(torch.tensor([[INF, INF, 0.0]]), torch.tensor([1]), (1, 2)) == [0, 1]
    assert accuracy(torch.tensor([[-INF, -INF, -INF]]), torch.tensor([0])) == [1, 1]


def test_nan_is_a_wrong_answer() -> None:
    rows = torch.tensor([[NAN, NAN, NAN], [1.0, NAN, 0.0], [NAN, 1.0, 0.0], [1.0, 0.5, 0.0]])
    assert accuracy(rows, torch.tensor([0, 0, 0, 0]), (1, 5)) == [1, 1]


def test_no_rows_no_answers() -> None:
    assert accuracy(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64)) == [0, 0]


# --- sums of validation batches ---------------------------------------------------------------------------------------


def rows_of(losses: list[float], samples: int = 7) -> list[BatchSums]:
    return [BatchSums(t, loss, t % 5, t % 7, samples) for t, loss in enumerate(losses)]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0, 1e6, allow_nan=False), min_size=1, max_size=40))
def test_the_same_last_digit_on_any_number_of_ranks(losses: list[float]) -> None:
    rows = rows_of(losses)
    whole = summarise(rows)
    for num_ranks in (1, 2, 3, 4, 64):
        parts = [[tuple(row) for row in rows[rank::num_ranks]] for rank in range(num_ranks)]
        assert summarise(gather_batch_sums(Ranks(parts), rows[::num_ranks])) == whole


def test_losses_are_added_in_the_order_of_the_batches() -> None:
    rows = rows_of([1e16, 1.0, -1e16, 1.0], samples=1)
    for order in (rows, rows[::-1]):
        assert summarise(gather_batch_sums(Ranks([order]), order))["loss"] == ((1e16 + 1.0) - 1e16 + 1.0) / 4


def test_21_images_count_as_21_and_the_mean_is_by_sample() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, label = torch.randn(21, 6, generator=generator), torch.randint(0, 6, (21,), generator=generator)
    loss = torch.nn.functional.cross_entropy(logits, label, reduction="none")
    rows = [batch_sums(t, *(x[t * 4 : t * 4 + 4] for x in (logits, label, loss))) for t in range(6)]
    result = summarise(rows)
    correct1, correct5 = accuracy(logits, label)
    assert result["samples"] == 21
    assert result["loss"] == pytest.approx(float(loss.double().mean()), rel=1e-12)
    assert (result["top1"], result["top5"]) == (100.0 * correct1 / 21, 100.0 * correct5 / 21)
    assert rows[5].samples == 1  # batches of unequal size: the mean of their means would be another number


def test_sums_of_a_batch_are_plain_numbers() -> None:
    weight = torch.ones(2, 3, requires_grad=True)
    row = batch_sums(3, weight * 1.0, torch.tensor([0, 1]), weight.sum(dim=1))
    assert row == (3, 6.0, 1, 2, 2)
    assert [type(value) for value in row] == [int, float, int, int, int]


@pytest.mark.parametrize("numbers", [[0, 2], [0, 1, 1], [1, 2]])
def test_a_missing_or_repeated_batch_is_noticed(numbers: list[int]) -> None:
    rows = [BatchSums(t, 1.0, 1, 1, 1) for t in numbers]
    with pytest.raises(AssertionError, match="missing or came twice"):
        gather_batch_sums(Ranks([rows]), rows)


def test_nothing_to_validate_on_is_an_error_of_the_user() -> None:
    with pytest.raises(UserError, match="--val_path"):
        summarise([])


# --- confusion matrix -------------------------------------------------------------------------------------------------


def test_counts_by_label_and_answer() -> None:
    matrix = ConfusionMatrix(3)
    answers = torch.tensor([0, 1, 1, 2, 0, 0])
    label = torch.tensor([0, 1, 0, 2, 0, 1])
    for rows in (slice(0, 4), slice(4, 6), slice(6, 6)):
        matrix.update(torch.nn.functional.one_hot(answers[rows], 3).float(), label[rows])
    assert matrix.counts.tolist() == [[2, 1, 0], [1, 1, 0], [0, 0, 1]]
    assert matrix.counts.dtype == torch.int64 and matrix.by_class().tolist() == [[2, 1, 1], [3, 2, 1]]


def test_the_diagonal_is_top1() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(0, 3, (200, 5), generator=generator).float()  # many equal ones
    logits[::10, 2] = NAN
    label = torch.randint(0, 5, (200,), generator=generator)
    matrix = ConfusionMatrix(5)
    matrix.update(logits, label)
    assert [int(matrix.counts.trace())] == accuracy(logits, label, (1,))
    assert matrix.pairs.total() == 200 and int(matrix.counts.sum()) == 180


def test_nan_is_no_answer() -> None:
    matrix = ConfusionMatrix(3)
    matrix.update(torch.tensor([[1.0, 0, 0], [NAN, 0, 0]]), torch.tensor([0, 0]))
    assert matrix.counts.tolist() == [[1, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert matrix.by_class().tolist() == [[1, 0, 0], [2, 0, 0]]


def test_ranks_add_up_exactly() -> None:
    matrix = ConfusionMatrix(2)
    matrix.add_ranks(Ranks([Counter({(0, 1): 2**60, (1, 1): 1}), Counter({(0, 1): 1, (1, 0): 2})]))
    assert matrix.counts.tolist() == [[0, 2**60 + 1], [2, 1]]


def test_classes_that_do_not_occur_cost_nothing() -> None:
    """A table of 500 000 classes would be 2 TB."""
    matrix, label = ConfusionMatrix(500_000), torch.tensor([7, 499_999])
    logits = torch.zeros(2, 500_000)
    logits[:, 7] = 1
    for _ in range(3):
        matrix.update(logits, label)
    matrix.add_ranks(Ranks([matrix.pairs] * 2))
    assert matrix.pairs == {(7, 7): 6, (499_999, 7): 6} and matrix.by_class()[:, 7].tolist() == [6, 6]
