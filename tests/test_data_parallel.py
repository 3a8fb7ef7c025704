"""Replicas on the CPU against the plain model, against torch's own chunks, and against themselves."""

from __future__ import annotations

import copy
import threading
from collections import namedtuple
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from common.data_parallel import DataParallel, chunk_sizes, current_replica, data_parallel, padded_size
from common.errors import UserError


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Where the cores are busy, threads that wait for each other at every operator take twenty times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def network(*extra: nn.Module, seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        features = nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU()
        return nn.Sequential(*features, *extra, nn.Flatten(), nn.Linear(8 * 36, 4))


def batch(num_rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    image = torch.randn(num_rows, 3, 8, 8, generator=generator).to(memory_format=torch.channels_last)
    return image, torch.randint(0, 4, (num_rows,), generator=generator)


class Probe(nn.Module):
    """Says what its replica sees: rows, number, thread and modes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple] = []

    def forward(self, *args: object, **kwargs: object) -> Tensor:
        modes = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu"),
                 torch.get_autocast_dtype("cpu"), self.training)
        self.seen.append((current_replica(), threading.current_thread(), modes, args, kwargs))
        rows = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        return torch.full((len(rows[0]) if rows else 1,), current_replica())


# --- cutting ----------------------------------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 200), st.integers(1, 20))
def test_chunks_are_those_of_torch(num_rows: int, num_parts: int) -> None:
    assert chunk_sizes(num_rows, num_parts) == [len(part) for part in torch.zeros(num_rows, 1).chunk(num_parts)]


def test_the_batches_that_articles_show() -> None:
    assert chunk_sizes(14, 3) == [5, 5, 4]
    assert chunk_sizes(4, 3) == [2, 2]
    for num_rows, replicas in ((14, [0] * 5 + [1] * 5 + [2] * 4), (4, [0, 0, 1, 1]), (1, [0]), (3, [0, 1, 2])):
        assert DataParallel(Probe(), 3)(torch.zeros(num_rows)).tolist() == replicas


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 200), st.integers(1, 20))
def test_padding_is_enough_and_no_more(num_rows: int, num_parts: int) -> None:
    size = padded_size(num_rows, num_parts)
    assert size >= num_rows and min(len(part) for part in torch.zeros(size, 1).chunk(num_parts)) >= 2
    for fewer in range(num_rows, size):
        assert min(len(part) for part in torch.zeros(fewer, 1).chunk(num_parts)) < 2


PADDED = [(1, 1, 2), (2, 1, 2), (33, 2, 33), (17, 16, 18), (7, 3, 8), (3, 3, 4)]


@pytest.mark.parametrize("num_rows, num_parts, size", PADDED)
def test_padding_of_known_batches(num_rows: int, num_parts: int, size: int) -> None:
    assert padded_size(num_rows, num_parts) == size


def test_everything_is_cut_alike_and_the_rest_is_handed_to_all() -> None:
    probe, marker = Probe(), object()
    DataParallel(probe, 3)(torch.arange(4), [torch.arange(4), "x"], mask={"m": torch.arange(4)}, flag=marker)
    assert len(probe.seen) == 2
    for number, (_, _, _, args, kwargs) in enumerate(probe.seen):
        rows = [2 * number, 2 * number + 1]
        assert args[0].tolist() == args[1][0].tolist() == kwargs["mask"]["m"].tolist() == rows
        assert args[1][1] == "x" and kwargs["flag"] is marker


def test_three_rows_by_keyword_on_four_replicas() -> None:
    image, _ = batch(3)
    module = Keyword()
    assert torch.equal(DataParallel(module, 4)(image=image, scale=2.0), module(image=image, scale=2.0))


class Keyword(nn.Module):
    def forward(self, *, image: Tensor, scale: float) -> Tensor:
        return image * scale


def test_tensors_that_cannot_be_cut_alike_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\[1, 9\] rows"):  # nn.DataParallel would silently leave out six rows
        DataParallel(Probe(), 3)(torch.zeros(9), torch.zeros(1))


def test_without_tensors_there_is_one_replica() -> None:
    probe = Probe()
    DataParallel(probe, 3)("text")
    assert len(probe.seen) == 1


# --- joining ----------------------------------------------------------------------------------------------------------


Pair = namedtuple("Pair", "left right")


class Outputs(nn.Module):
    def forward(self, rows: Tensor) -> object:
        return {"same": rows, "pair": Pair(rows + 1, (rows + 2, None)), "loss": rows.float().mean()}


def test_outputs_keep_their_shape() -> None:
    rows = torch.arange(7)
    result = DataParallel(Outputs(), 2)(rows)
    assert torch.equal(result["same"], rows) and torch.equal(result["pair"].left, rows + 1)
    assert torch.equal(result["pair"].right[0], rows + 2) and result["pair"].right[1] is None
    assert result["loss"].tolist() == [1.5, 5.0]  # a scalar of each replica, as nn.DataParallel gives it


def test_an_output_that_cannot_be_joined_is_refused() -> None:
    class Text(nn.Module):
        def forward(self, rows: Tensor) -> str:
            return "text"

    with pytest.raises(TypeError, match="not str"):
        DataParallel(Text(), 2)(torch.zeros(4))


# --- gradients and buffers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_replicas", [2, 3])
@pytest.mark.parametrize("num_rows", [14, 7, 4, 1])
def test_gradients_equal_the_plain_models(num_replicas: int, num_rows: int) -> None:
    plain = network()
    module = copy.deepcopy(plain)
    image, label = batch(num_rows)
    weight = torch.linspace(0, 1, num_rows)
    for model in (plain, DataParallel(module, num_replicas)):
        (nn.functional.cross_entropy(model(image), label, reduction="none") * weight).sum().backward()
    for ours, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-6, rtol=1e-6)


def test_a_layer_used_twice_stays_one_layer() -> None:
    layer, norm = nn.Linear(5, 5), nn.BatchNorm1d(5)
    plain = nn.Sequential(layer, norm, layer, norm)
    module = copy.deepcopy(plain).eval()
    plain.eval()
    rows = torch.randn(6, 5, requires_grad=True)
    plain(rows).sum().backward()
    DataParallel(module, 3)(rows).sum().backward()
    torch.testing.assert_close(module[0].weight.grad, plain[0].weight.grad)
    DataParallel(module.train(), 3)(rows)
    assert module[1].num_batches_tracked == 2  # one forward, two uses, replica 0 alone


def test_running_statistics_come_from_replica_0_alone() -> None:
    plain = nn.Sequential(nn.BatchNorm2d(3), nn.Flatten())
    module = copy.deepcopy(plain)
    identities = [id(buffer) for buffer in module.buffers()]
    model = DataParallel(module, 3)
    for seed in range(3):
        image, _ = batch(14, seed)
        together = model(image)
        part = plain(image[:5])
        assert torch.equal(together[:5], part)
    for ours, theirs in zip(module.buffers(), plain.buffers(), strict=True):
        assert torch.equal(ours, theirs)
    assert module[0].num_batches_tracked == 3 and identities == [id(buffer) for buffer in module.buffers()]


def test_every_replica_starts_from_the_current_statistics() -> None:
    module = nn.Sequential(nn.BatchNorm2d(3), nn.Flatten())
    model = DataParallel(module, 2)
    model(batch(8)[0])
    module.eval()
    image, _ = batch(6, seed=1)
    torch.testing.assert_close(model(image), module(image))


@pytest.mark.parametrize("num_rows, num_parts", [(1, 1), (7, 3), (17, 16)])
def test_padded_batches_pass_batch_norm_on_one_pixel(num_rows: int, num_parts: int) -> None:
    model = DataParallel(nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.BatchNorm2d(3)), num_parts)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        model(batch(num_rows)[0])
    model(batch(padded_size(num_rows, num_parts))[0])


def test_the_state_dict_has_the_prefix_of_torchs_wrapper() -> None:
    assert list(DataParallel(network(), 2).state_dict()) == list(nn.DataParallel(network()).state_dict())


# --- threads ----------------------------------------------------------------------------------------------------------


def test_each_replica_has_a_thread_and_a_number_of_its_own() -> None:
    probe = Probe()
    DataParallel(probe, 3)(torch.zeros(6))
    assert [number for number, *_ in probe.seen] == [0, 1, 2]
    threads = {thread for _, thread, *_ in probe.seen}
    assert len(threads) == 3 and threading.current_thread() not in threads
    assert not any(thread.is_alive() for thread in threads) and current_replica() == 0


def test_modes_are_those_of_the_caller() -> None:
    def modes(probe: Probe) -> set[tuple]:
        probe.seen.clear()
        DataParallel(probe, 2)(torch.zeros(4))
        return {seen[2] for seen in probe.seen}

    assert modes(Probe()) == {(True, False, False, torch.bfloat16, True)}
    assert modes(Probe().eval()) == {(True, False, False, torch.bfloat16, False)}
    with torch.no_grad():
        assert modes(Probe()) == {(False, False, False, torch.bfloat16, True)}
    with torch.inference_mode():
        assert modes(Probe()) == {(False, True, False, torch.bfloat16, True)}
    with torch.autocast("cpu", torch.float16):
        assert modes(Probe()) == {(True, False, True, torch.float16, True)}


def test_mixed_precision_gradients_reach_the_original() -> None:
    module, (image, label) = network(), batch(8)
    with torch.autocast("cpu", torch.bfloat16):
        logits = DataParallel(module, 2)(image)
    assert logits.dtype == torch.bfloat16
    nn.functional.cross_entropy(logits.float(), label).backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in module.parameters())


def weights_after_training(num_threads: int, seed: int) -> Tensor:
    torch.set_num_threads(num_threads)
    module = network(nn.Dropout(0.3), nn.BatchNorm2d(8))
    model, optimizer = DataParallel(module, 3), torch.optim.Adam(module.parameters(), lr=0.01)
    torch.manual_seed(seed)
    for step in range(6):
        image, label = batch(14, step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(image), label).backward()
        optimizer.step()
    return torch.cat([value.flatten().float() for value in module.state_dict().values()])


@pytest.mark.parametrize("num_threads", [1, 2])
def test_equal_seeds_give_equal_weights_with_dropout(num_threads: int) -> None:
    first = weights_after_training(num_threads, seed=3)
    assert all(torch.equal(first, weights_after_training(num_threads, seed=3)) for _ in range(4))
    assert not torch.equal(first, weights_after_training(num_threads, seed=4))


def test_replicas_drop_different_units() -> None:
    torch.manual_seed(0)
    masks = DataParallel(nn.Dropout(0.5), 3)(torch.ones(6, 50)).view(3, 2, 50)
    assert not torch.equal(masks[0], masks[1]) and not torch.equal(masks[1], masks[2])


class Failing(nn.Module):
    def __init__(self, error: BaseException):
        super().__init__()
        self.error = error

    def forward(self, rows: Tensor) -> Tensor:
        if current_replica() == 1:
            raise self.error
        return rows


class Odd(Exception):
    def __init__(self, one: int, two: int):
        super().__init__(f"{one} and {two}")


@pytest.mark.parametrize("error, kind, words", [
    (RuntimeError("too big"), RuntimeError, r"too big \(in replica 1\)"),
    (UserError("no labels"), UserError, r"no labels \(in replica 1\)"),
    (Odd(1, 2), RuntimeError, r"Odd: 1 and 2 \(in replica 1\)"),
    (KeyboardInterrupt(), KeyboardInterrupt, "^$"),
])
def test_errors_are_raised_again_with_the_replicas_number(error: BaseException, kind: type, words: str) -> None:
    model = DataParallel(Failing(error), 3)
    with pytest.raises(kind, match=words) as caught:
        model(torch.zeros(6))
    assert caught.value is error or caught.value.__cause__ is error
    assert model.module.error is error and current_replica() == 0
    assert not any(thread.name.startswith("replica") for thread in threading.enumerate())


# --- choosing ---------------------------------------------------------------------------------------------------------


def test_the_devices_choose_the_wrapper() -> None:
    cpu, gpus = torch.device("cpu"), [torch.device("cuda", 0), torch.device("cuda", 1)]
    model = data_parallel(network(), [cpu] * 3)
    assert isinstance(model, DataParallel) and model.num_replicas == 3
    if not torch.cuda.is_available():  # torch's wrapper then takes any list
        assert isinstance(data_parallel(network(), gpus), nn.DataParallel)
    for wrong in ([cpu, gpus[0]], [gpus[0], gpus[0]], []):
        with pytest.raises(UserError, match="--gpu"):
            data_parallel(network(), wrong)
    with pytest.raises(UserError, match="--gpu 0"):
        DataParallel(network(), 0)


def test_a_compiled_model_is_refused() -> None:
    class Compiled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self._orig_mod = network()

    in_place = network()
    in_place.compile(backend="eager")
    for module in (Compiled(), nn.Sequential(Compiled()), in_place):
        with pytest.raises(UserError, match="--compile"):
            data_parallel(module, [torch.device("cpu")] * 2)


def test_torchs_wrapper_tells_its_replicas_number_and_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: its replicas run here on threads, as torch would run them there."""
    numbers_after: list[int] = []

    def on_threads(self, replicas, inputs, kwargs):
        for replica, part, options in zip(replicas, inputs, kwargs, strict=True):
            def run(replica=replica, part=part, options=options):
                replica(*part, **options)
                numbers_after.append(current_replica())

            thread = threading.Thread(target=run)
            thread.start()
            thread.join()
        return []

    monkeypatch.setattr(nn.DataParallel, "parallel_apply", on_threads)
    monkeypatch.setattr("torch.autocast", RecordedAutocast)
    RecordedAutocast.calls.clear()
    probe = Probe()
    model = data_parallel(probe, [torch.device("cuda", 0), torch.device("cuda", 1)])
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    try:
        model.parallel_apply([probe, probe], [(torch.zeros(2),)] * 2, [{}] * 2)
    finally:
        torch.set_autocast_dtype("cuda", torch.float16)
    assert [number for number, *_ in probe.seen] == [0, 1]
    assert [call[:2] for call in RecordedAutocast.calls] == [("cuda", torch.bfloat16)] * 2
    assert numbers_after == [0, 0]  # a lone replica runs on the caller's thread, which must not keep its number


class RecordedAutocast:
    calls: list[tuple] = []

    def __init__(self, *args: object):
        self.calls.append(args)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass
