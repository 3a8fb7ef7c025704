"""`--trace print`: what each block says, that blocks stay whole, and that the wrapper changes nothing else."""

from __future__ import annotations

import copy
import threading
from contextlib import nullcontext

import torch
from torch import nn

from common.collate import Batch
from common.data_parallel import current_replica, data_parallel
from common.reporting.screen import write_block
from common.sampling import Step
from common.tracing.printing import TracedModel, TracePrinter


def make_batch(num_samples: int = 3) -> Batch:
    n = num_samples
    return Batch(torch.zeros(n, 3, 4, 4, dtype=torch.uint8), torch.arange(n) + 5, Step(1, 12, 40, 0, n),
                 worker=[i % 2 for i in range(n)], shard=[f"train-{i:04d}" for i in range(n)],
                 count=[i * 10 for i in range(n)], key=[f"k{i}" for i in range(n)])


def make_printer(num_replicas: int = 1) -> tuple[TracePrinter, list[str]]:
    blocks: list[str] = []
    return TracePrinter(nullcontext(), rank=1, world_size=3, num_replicas=num_replicas, write=blocks.append), blocks


def net() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(48, 2), nn.BatchNorm1d(2))


def test_before_the_forward_each_sample_is_shown():
    printer, blocks = make_printer()
    printer.batch(make_batch(), torch.device("cuda", 1))
    head, columns, *rows = blocks[0].splitlines()
    assert head == "[batch] epoch 1 step 12, cuda:1, rank 1 of 3, input size (3, 3, 4, 4)"
    assert columns.split() == ["row", "worker", "shard", "count", "label"]
    shown = [" ".join(row.split()) for row in rows]
    assert shown == ["0 0 train-0000 0 5", "1 1 train-0001 10 6", "2 0 train-0002 20 7"]
    assert len({len(line) for line in [columns, *rows]}) == 1


def test_each_replica_shows_what_it_got_and_padding_is_no_sample():
    printer, blocks = make_printer(num_replicas=2)
    printer.batch(make_batch(), "cpu")
    here = threading.local()
    model = TracedModel(net(), printer, replica=lambda: here.number)
    where = []
    for here.number, rows in enumerate(([0, 1], [2, -1])):
        logits, places = model(torch.zeros(2, 3, 4, 4), torch.tensor(rows))
        assert logits.shape == (2, 2)
        where.append(places)
    assert [" ".join(line.split()) for line in blocks[2].splitlines()] == [
        "[forward] epoch 1 step 12, cpu replica 1, rank 1 of 3, input size (2, 3, 4, 4)",
        "row worker shard count label", "2 0 train-0002 20 7"]
    assert "train-0002" not in blocks[1]
    printer.done(torch.tensor([0, 1, 2, -1]), torch.cat(where), "cpu")
    assert [line[-13:] for line in blocks[3].splitlines()[2:]] == [f"cpu replica {number}" for number in (0, 0, 1)]


def test_replicas_on_the_cpu_speak_for_themselves():
    printer, blocks = make_printer(num_replicas=3)
    printer.batch(make_batch(6), "cpu")
    model = data_parallel(TracedModel(net(), printer, current_replica), [torch.device("cpu")] * 3)
    logits, where = model(torch.zeros(6, 3, 4, 4), torch.arange(6))
    assert where.tolist() == [0, 0, 1, 1, 2, 2] and logits.shape == (6, 2)
    lines = [block.splitlines() for block in blocks[1:]]
    shown = {head.split(", ")[1]: [line.split()[0] for line in table] for head, _, *table in lines}
    assert shown == {"cpu replica 0": ["0", "1"], "cpu replica 1": ["2", "3"], "cpu replica 2": ["4", "5"]}


def test_gpus_are_named_by_index_and_a_lone_cpu_without_a_number():
    assert make_printer(2)[0].place("cuda", 3) == "cuda:3"
    assert make_printer(2)[0].place("cpu", 1) == "cpu replica 1"
    assert make_printer(1)[0].place("cpu", 0) == "cpu"


def test_a_forward_outside_of_a_step_prints_nothing():
    printer, blocks = make_printer()
    TracedModel(net(), printer)(torch.zeros(2, 3, 4, 4), torch.tensor([-1, -1]))
    assert blocks == []


def test_a_rank_without_samples_says_so():
    printer, blocks = make_printer()
    printer.batch(make_batch(0), "cpu")
    TracedModel(net(), printer)(torch.zeros(2, 3, 4, 4), torch.tensor([-1, -1]))
    assert [block.splitlines()[1].strip() for block in blocks] == ["no samples", "no samples"]


def test_the_wrapper_changes_no_result_and_no_gradient():
    torch.manual_seed(0)
    bare = net()
    model = TracedModel(copy.deepcopy(bare), make_printer()[0])
    image, row = torch.randn(4, 3, 4, 4), torch.arange(4)
    logits, where = model(image, row)
    logits.square().sum().backward()
    bare(image).square().sum().backward()
    assert torch.equal(model.module[1].weight.grad, bare[1].weight.grad)
    assert where.tolist() == [0, 0, 0, 0] and where.dtype == torch.int64


def test_blocks_are_written_under_the_lock_in_one_call():
    held, seen = threading.Lock(), []
    printer = TracePrinter(held, 0, 1, write=lambda text: seen.append((held.locked(), text.count("[batch]"))))
    printer.batch(make_batch(), "cpu")
    assert seen == [(True, 1)] and not held.locked()


def test_stdout_gets_the_block_at_once(capsys):
    write_block("one\ntwo")
    assert capsys.readouterr().out == "one\ntwo\n"
