"""The audit: clean runs of every mode, world and restart keep their promise; each planted fault is found and named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.coverage import split_coverage, split_order
from common.errors import UserError
from common.sampling import EpochOrder
from common.trace import main
from common.tracing.audit import audit
from common.tracing.report import AuditReport
from common.tracing.run import RecordedRun
from tests.trace_runs import Start, TracedRun, make_run

ROOT = Path(__file__).resolve().parent.parent
SIZES = (10, 3, 7)


def judge(run: TracedRun) -> AuditReport:
    return audit(RecordedRun.open(run.write()))


def faults(run: TracedRun) -> dict[str, list[str]]:
    report = judge(run)
    assert report.kept == (not report.faults.as_dict())
    return {kind: found["examples"] for kind, found in report.faults.as_dict().items()}


def name(row: dict, i: int) -> str:
    return f"{row['shard'][i]} count {row['count'][i]} key {row['key'][i]}"


# Clean runs


@pytest.mark.parametrize("sampling", ["exact", "split", "resampled"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("num_workers", [0, 1, 3])
@pytest.mark.parametrize("shuffle", [-1, 0, 5, 5000])
def test_a_clean_run_keeps_its_promise(tmp_path, sampling, world_size, num_workers, shuffle):
    sizes = (10, 3, 7, 0, 12)
    run = make_run(tmp_path, sampling, sizes, [Start(world_size, 4)], num_workers=num_workers, shuffle=shuffle)
    report = judge(run)
    assert report.kept, report.text()
    assert [epoch.epoch for epoch in report.epochs] == [0, 1]
    for epoch in report.epochs:
        assert epoch.complete and epoch.equal_steps
        assert epoch.once + epoch.repeated + epoch.missing == 32 == epoch.total
        assert epoch.order_kept == (True if sampling == "exact" else None)
        steps = 32 // (4 * world_size) if sampling != "exact" else -(-32 // (4 * world_size))
        assert epoch.steps == [(world_size, [steps] * world_size)]
        if sampling == "exact":
            assert (epoch.once, epoch.repeated, epoch.missing, epoch.labels) == (32, 0, 0, {"cat": 16, "dog": 16})


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_restarts_in_any_world_are_clean(tmp_path, data):
    sizes = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any))
    starts = []
    for _ in range(data.draw(st.integers(1, 4))):
        taken = data.draw(st.integers(0, 8))
        world_size, batch_size = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
        starts.append(Start(world_size, batch_size, taken, data.draw(st.integers(0, taken))))
    starts[-1] = Start(starts[-1].world_size, starts[-1].batch_size)
    run = make_run(tmp_path, "exact", sizes, starts, num_workers=data.draw(st.integers(0, 3)),
                   num_epochs=data.draw(st.integers(1, 3)), shuffle=data.draw(st.sampled_from([-1, 0, 4, 100])))
    if not any(run.rows.values()):
        return
    report = judge(run)
    assert report.kept, report.text()
    assert all(epoch.once == sum(sizes) for epoch in report.epochs)
    run.status = {}  # where each attempt began is then told by its first row, if it came to one
    if all(start.num_steps != 0 for start in starts):
        assert judge(run).kept


@pytest.mark.parametrize("sampling", ["split", "resampled"])
def test_a_stream_that_was_replayed_is_clean(tmp_path, sampling):
    run = make_run(tmp_path, sampling, SIZES, [Start(2, 2)])
    again = make_run(tmp_path, sampling, SIZES, [Start(2, 2)])
    for rank, rows in again.rows.items():  # killed after six steps of five, the fourth of epoch 0 was saved
        run.rows[rank] = rows[:6] + [{**row, "attempt": 1} for row in rows[4:]]
    run.status["attempts"].append({"epoch": 0, "step": 4, "global_step": 4, "position": 16})
    run.config["plans"] *= 2
    report = judge(run)
    assert report.kept, report.text()
    assert report.epochs[0].steps == [(2, [5, 5])] and report.epochs[0].reads == 20


def test_rows_that_a_later_attempt_replaced_count_for_nothing(tmp_path):
    run = make_run(tmp_path, starts=[Start(2, 4, 5, 1), Start(2, 4)])
    report = judge(run)
    assert report.kept and report.num_attempts == 2
    assert [(epoch.reads, epoch.steps) for epoch in report.epochs] == [(20, [(2, [3, 3])])] * 2
    run.status["attempts"][1] = dict(epoch=1, step=0, global_step=3, position=0)  # as if it had begun later
    assert "steps" in faults(run)


def test_an_attempt_may_go_back_behind_the_one_before_it(tmp_path):
    """The newest checkpoint was torn, so the third start went on from an older one."""
    run = make_run(tmp_path)
    for rank, rows in run.rows.items():
        second, third = ([{**row, "attempt": attempt} for row in rows] for attempt in (1, 2))
        run.rows[rank] = rows[:3] + second[2:4] + third[1:]
    for step in (2, 1):
        run.status["attempts"].append({"epoch": 0, "step": step, "global_step": step, "position": 8 * step})
    run.config["plans"] *= 3
    report = judge(run)
    assert report.kept, report.text()
    run.status = {}
    assert judge(run).kept


@pytest.mark.parametrize("state", ["running", "stopped", "failed"])
def test_an_unfinished_epoch_is_judged_as_far_as_it_came(tmp_path, state):
    report = judge(make_run(tmp_path, starts=[Start(2, 4, 4)], state=state))
    last = report.epochs[-1]
    assert report.kept and not last.complete
    assert (last.epoch, last.once, last.missing, last.not_reached) == (1, 8, 0, 12)
    assert any("epoch 1 is not finished" in note for note in report.notes)
    assert "1 so far" in report.text()


def test_max_steps_ends_a_complete_run_within_an_epoch(tmp_path):
    assert judge(make_run(tmp_path, starts=[Start(2, 4, 4)], max_steps=4)).kept
    assert "steps" in faults(make_run(tmp_path, starts=[Start(2, 4, 4)], max_steps=5))


def test_a_complete_run_that_lacks_its_end_is_broken(tmp_path):
    found = faults(make_run(tmp_path, starts=[Start(2, 4, 3)]))
    assert found["steps"][:2] == [f"epoch 1 step 0 is not recorded by rank {rank}" for rank in (0, 1)]
    assert len(found["missing"]) == 10


def test_a_step_under_way_when_the_run_died_is_left_out(tmp_path):
    run = make_run(tmp_path, starts=[Start(2, 4, 4)], state="running")
    run.rows[1].pop()
    report = judge(run)
    assert report.kept and any("1 of 2 ranks" in note for note in report.notes)
    assert report.epochs[0].complete and len(report.epochs) == 1
    run.status["state"] = "stopped"  # then all ranks had finished the step
    assert faults(run)["steps"] == ["epoch 1 step 0 is not recorded by rank 1"]


def test_tracing_that_began_with_a_later_attempt_is_judged_from_there(tmp_path):
    run = make_run(tmp_path, starts=[Start(2, 4, 2, 2), Start(2, 4)])
    run.rows = {rank: [row for row in rows if row["attempt"] == 1] for rank, rows in run.rows.items()}
    report = judge(run)
    assert report.kept and report.notes == ["nothing is recorded before epoch 0 step 2: judged from there"]
    assert (report.epochs[0].once, report.epochs[0].not_reached, report.epochs[1].once) == (4, 16, 20)


@pytest.mark.parametrize("second, third", [(2, 3), (5, 2), (2, None)])
def test_what_a_start_without_a_trace_did_is_not_judged(tmp_path, second, third):
    """Nothing is known of it: neither a gap nor a proof. In the middle of an epoch, over its end, to the run's end."""
    starts = [Start(2, 4, 1, 1), Start(2, 2, second, second), *([Start(2, 4)] if third else [])]
    run = make_run(tmp_path, starts=starts if third else [starts[0], Start(2, 2)])
    run.config["plans"][1]["traced"] = False
    run.rows = {rank: [row for row in rows if row["attempt"] != 1] for rank, rows in run.rows.items()}
    report = judge(run)
    assert report.kept, report.text()
    (note,) = report.notes
    assert note.startswith("nothing is recorded from epoch 0 step 1 ") and note.endswith("not judged")
    assert report.epochs[0].once == 8 and not report.epochs[0].complete
    run.rows[1].pop(0)
    assert "steps" in faults(run)
    run.config["plans"][1]["traced"] = True
    assert "missing" in faults(run)


def test_an_epoch_is_judged_though_a_later_start_asked_for_fewer(tmp_path):
    run = make_run(tmp_path)
    run.config["plans"].append({**run.config["plans"][0], "num_epochs": 1})
    run.config["plan"] = run.config["plans"][1]
    run.status["attempts"].append({"epoch": 2, "step": 0, "global_step": 6, "position": 0})
    report = judge(run)
    assert report.kept and [epoch.once for epoch in report.epochs] == [20, 20]
    run.rows[0].pop()
    assert "missing" in faults(run)


def test_a_rank_without_samples_writes_empty_rows(tmp_path):
    run = make_run(tmp_path, sizes=(5,), starts=[Start(4, 2)])
    run2 = make_run(tmp_path, sizes=(9,), starts=[Start(4, 2)])
    assert run2.rows[3][1]["key"] == []
    assert judge(run).kept and judge(run2).kept


def test_skipped_samples_are_no_gaps(tmp_path):
    run = make_run(tmp_path)
    row = run.rows[1][1]
    run.errors = [{"shard": row["shard"][2], "key": row["key"][2], "count": row["count"][2], "epoch": 0}]
    for key in ("worker", "shard", "count", "key", "label", "replica"):
        del row[key][2]
    report = judge(run)
    assert report.kept and (report.epochs[0].skipped, report.epochs[0].missing, report.epochs[1].skipped) == (1, 0, 0)
    run.errors[0]["epoch"] = 1  # then epoch 0 has a gap
    assert set(faults(run)) == {"missing", "size", "order"}


def test_a_sample_that_was_skipped_and_then_read_counts_once(tmp_path):
    run = make_run(tmp_path)
    row = run.rows[1][1]
    run.errors = [{"shard": row["shard"][2], "key": row["key"][2], "count": row["count"][2], "epoch": 0}]
    report = judge(run)
    assert report.kept and (report.epochs[0].skipped, report.epochs[0].once) == (0, 20)


def test_skipped_samples_shorten_a_split_batch(tmp_path):
    run = make_run(tmp_path, "split")
    row = run.rows[1][1]
    shard, count = row["shard"][2], row["count"][2]
    for key in ("worker", "shard", "count", "key", "label", "replica"):
        del row[key][2]
    assert list(faults(run)) == ["size"]
    run.errors = [{"shard": shard, "key": "k", "count": count, "epoch": 0}]
    assert judge(run).kept
    for key in ("worker", "shard", "count", "key", "label", "replica"):
        row[key] *= 2
    assert list(faults(run)) == ["size"]


@pytest.mark.parametrize("mix", ["none", "pooled"])
@pytest.mark.parametrize(("world_size", "num_workers", "batch_size"),
                         [(1, 0, 3), (1, 2, 4), (2, 2, 3), (2, 5, 4), (3, 1, 2)])
def test_what_split_says_before_the_run_is_what_the_audit_finds(tmp_path, mix, world_size, num_workers, batch_size):
    sizes = (10, 3, 7, 12, 0, 9, 4)
    run = make_run(tmp_path, "split", sizes, [Start(world_size, batch_size)],
                   num_workers=num_workers, shuffle=-1, num_epochs=3, mix=mix)
    report = judge(run)
    steps = sum(sizes) // (world_size * batch_size)
    assert report.kept, report.text()
    for epoch in report.epochs:
        said = split_coverage(sizes, split_order(sizes, -1, 3, epoch.epoch), world_size, num_workers, batch_size,
                              range(epoch.epoch * steps, (epoch.epoch + 1) * steps), mix=mix)
        assert said == (epoch.missing, epoch.repeated)


def test_resampled_reports_how_many_samples_are_distinct(tmp_path):
    report = judge(make_run(tmp_path, "resampled", (4096,), [Start(2, 64)], num_epochs=1))
    epoch = report.epochs[0]
    assert report.kept and "with replacement" in report.text()
    assert epoch.reads == 4096 and 0.6 * 4096 < epoch.distinct < 0.66 * 4096
    assert f"{epoch.distinct}/4096" in report.text()


def test_batches_are_described(tmp_path):
    run = make_run(tmp_path, "split", SIZES, [Start(1, 4)], num_workers=3, shuffle=-1, num_epochs=1, mix="pooled")
    epoch = judge(run).epochs[0]
    assert (epoch.workers_per_batch, epoch.shards_per_batch) == (3.0, 3.0)
    batches = [row["label"] for row in run.rows[0]]
    assert epoch.classes_per_batch == sum(len(set(labels)) for labels in batches) / len(batches) > 1
    assert sum(epoch.labels.values()) == 20


# Planted faults


def test_a_repeat_is_found_and_named(tmp_path):
    run = make_run(tmp_path)
    source, row = run.rows[0][0], run.rows[1][2]
    was = f"{row['shard'][1]} count {row['count'][1]}"
    for key in ("shard", "count", "key", "label"):
        row[key][1] = source[key][3]
    found = faults(run)
    assert found["repeated"] == [f"epoch 0 step 2 rank 1: {name(source, 3)}"]
    assert found["missing"] == [f"epoch 0 step 2 rank 1: {was}"]
    assert found["order"] == [f"epoch 0 step 2 rank 1 row 1: {name(source, 3)}, planned {was}"]
    assert set(found) == {"repeated", "missing", "order"}


def test_a_gap_is_found_and_named(tmp_path):
    run = make_run(tmp_path)
    row = run.rows[0][4]
    was = f"{row['shard'][0]} count {row['count'][0]}"
    for key in ("worker", "shard", "count", "key", "label", "replica"):
        del row[key][0]
    found = faults(run)
    assert found["missing"] == [f"epoch 1 step 1 rank 0: {was}"]
    assert found["size"] == ["epoch 1 step 1 rank 0: 3 samples, planned 4"]
    assert set(found) == {"missing", "size", "order"}


def test_changed_order_is_found_though_everything_is_there(tmp_path):
    run = make_run(tmp_path)
    row = run.rows[1][0]
    for key in ("shard", "count", "key", "label"):
        row[key][0], row[key][1] = row[key][1], row[key][0]
    report = judge(run)
    assert [epoch.order_kept for epoch in report.epochs] == [False, True]
    assert list(report.faults.as_dict()) == ["order"]


def test_samples_exchanged_between_ranks_are_found(tmp_path):
    run = make_run(tmp_path)
    for key in ("shard", "count", "key", "label"):
        run.rows[0][1][key][2], run.rows[1][1][key][2] = run.rows[1][1][key][2], run.rows[0][1][key][2]
    found = faults(run)
    assert list(found) == ["order"] and len(found["order"]) == 2
    assert f"{name(run.rows[0][1], 2)} (rank 1's), planned" in found["order"][0]


def test_another_seed_or_window_is_another_order(tmp_path):
    run = make_run(tmp_path, sizes=(10, 3, 7, 5))
    for key, value in (("seed", 4), ("shuffle", -1)):
        plan = {**run.config["plan"], key: value}
        changed = TracedRun(run.folder, {**run.config, "plan": plan, "plans": [plan]}, run.status, run.rows)
        assert set(faults(changed)) == {"order"}


@pytest.mark.parametrize("sampling", ["exact", "split", "resampled"])
def test_unequal_steps_are_found(tmp_path, sampling):
    run = make_run(tmp_path, sampling)
    run.rows[1].pop()
    step = run.rows[0][-1]["step"]
    report = judge(run)
    assert report.faults.as_dict()["steps"]["examples"] == [f"epoch 1 step {step} is not recorded by rank 1"]
    assert not report.epochs[1].equal_steps and report.epochs[1].steps == [(2, [step + 1, step])]


@pytest.mark.parametrize("sampling", ["exact", "split", "resampled"])
def test_a_step_that_no_rank_recorded_is_found(tmp_path, sampling):
    run = make_run(tmp_path, sampling)
    for rank in (0, 1):
        del run.rows[rank][1]
    assert faults(run)["steps"] == [f"epoch 0 step 1 is not recorded by rank {rank}" for rank in (0, 1)]
    run = make_run(tmp_path, sampling)
    for rank in (0, 1):
        del run.rows[rank][0]
    assert faults(run)["steps"] == [f"epoch 0 step 0 is not recorded by rank {rank}" for rank in (0, 1)]


def test_a_rank_without_a_file_is_found(tmp_path):
    run = make_run(tmp_path)
    del run.rows[1]
    assert judge(run).faults.counts["steps"] == 6


def test_an_epoch_that_nobody_recorded_is_found(tmp_path):
    run = make_run(tmp_path, num_epochs=3)
    run.rows = {rank: [row for row in rows if row["epoch"] != 1] for rank, rows in run.rows.items()}
    report = judge(run)
    assert [epoch.missing for epoch in report.epochs] == [0, 20, 0]
    assert report.faults.counts["steps"] == 6


def test_a_row_recorded_twice_is_found(tmp_path):
    run = make_run(tmp_path)
    run.rows[0].insert(2, run.rows[0][1])
    found = faults(run)
    assert found["steps"] == ["epoch 0 step 1 is recorded 2 times by rank 0"] and len(found["repeated"]) == 4


@pytest.mark.parametrize("field", ["step", "epoch"])
def test_a_row_far_out_of_the_run_is_found(tmp_path, field, capsys):
    run = make_run(tmp_path / "run")
    run.rows[1][1][field] = 10**15
    assert "steps" in faults(run)
    run.rows[50_000] = [{**run.rows[0][0], "rank": 50_000}]
    run.write()
    assert main([str(run.folder), "--plot", str(tmp_path / "steps.png")]) == 1


def test_a_run_that_took_over_the_checkpoint_of_another_is_judged_from_there(tmp_path):
    run = make_run(tmp_path, starts=[Start(2, 4, 4, 4), Start(2, 4)])
    run.rows = {rank: [{**row, "attempt": 0} for row in rows if row["attempt"]] for rank, rows in run.rows.items()}
    run.status["attempts"].pop(0)
    report = judge(run)
    assert report.kept and report.notes == ["nothing is recorded before epoch 1 step 1: judged from there"]
    assert [(epoch.epoch, epoch.once, epoch.not_reached) for epoch in report.epochs] == [(1, 12, 8)]


def test_rows_out_of_order_are_found(tmp_path):
    run = make_run(tmp_path)
    run.rows[1][0], run.rows[1][1] = run.rows[1][1], run.rows[1][0]
    assert faults(run)["steps"] == ["epoch 0 step 0 is not recorded by rank 1",
                                    "epoch 0 step 0 is recorded again, or too late, by rank 1"]
    run = make_run(tmp_path)
    for rows in run.rows.values():
        rows.append(rows.pop(0))
    assert "steps" in faults(run)


@pytest.mark.parametrize(("field", "value"), [("rank", 0), ("world_size", 3), ("rank", 7)])
def test_a_foreign_row_is_found(tmp_path, field, value):
    run = make_run(tmp_path)
    run.rows[1][2][field] = value
    row = run.rows[1][2]
    found = faults(run)
    assert list(found) == ["foreign"]
    told = f"epoch 0 step 2 rank 1: recorded as rank {row['rank']} of {row['world_size']}, not 1 of 2, {name(row, 0)}"
    assert found["foreign"][0].startswith(told)


def test_the_file_of_a_rank_outside_the_world_is_found(tmp_path):
    run = make_run(tmp_path)
    run.rows[4] = [{**row, "rank": 4} for row in run.rows[1]]
    assert {"foreign", "repeated"} <= set(faults(run))


def test_samples_that_no_shard_has_are_found(tmp_path):
    run = make_run(tmp_path, "resampled")
    run.rows[0][0]["shard"][0] = "train-0009"
    run.rows[0][1]["count"][1] = 99
    run.rows[1][1]["count"][0] = -1
    found = faults(run)
    assert list(found) == ["unknown"] and len(found["unknown"]) == 3
    assert name(run.rows[0][0], 0) in found["unknown"][0]


def test_another_worker_than_planned_is_found(tmp_path):
    run = make_run(tmp_path)
    run.rows[0][1]["worker"][2] = 0
    assert faults(run) == {"worker": ["epoch 0 step 1 rank 0: worker 0, 1, planned 1"]}


def test_a_shard_of_another_rank_or_worker_is_found(tmp_path):
    run = make_run(tmp_path, "split", (6, 6, 6, 6), num_workers=2)
    mine, other = run.rows[0][0], run.rows[1][0]
    for key in ("shard", "count", "key", "label"):
        mine[key][1] = other[key][1]
    run.rows[1][1]["worker"][3] ^= 1
    found = faults(run)
    assert found["deal"][0] == f"epoch 0 step 0 rank 0: {name(mine, 1)}, dealt to rank 1"
    assert "rank 1" in found["deal"][1] and "dealt to worker" in found["deal"][1]
    assert list(found) == ["deal"] and len(found["deal"]) == 2


@pytest.mark.parametrize("mix", ["none", "queue"])
def test_a_batch_of_the_epoch_beside_is_found(tmp_path, mix):
    run = make_run(tmp_path, "split", (6,) * 8, num_workers=2, mix=mix)
    rows = run.rows[1]
    assert (rows[5]["epoch"], rows[7]["epoch"]) == (0, 1) and judge(run).kept
    for key in ("worker", "shard", "count", "key", "label"):
        rows[5][key], rows[7][key] = rows[7][key], rows[5][key]
    assert "deal" in faults(run)


def test_ranks_that_shuffled_shards_by_themselves_are_found(tmp_path):
    run = make_run(tmp_path, "split", (6,) * 8)
    run.rows[1] = make_run(tmp_path, "split", (6,) * 8, seed=99).rows[1]
    assert "deal" in faults(run)


@pytest.mark.parametrize("sampling", ["split", "resampled"])
def test_a_batch_of_another_size_is_found(tmp_path, sampling):
    run = make_run(tmp_path, sampling)
    for key in ("worker", "shard", "count", "key", "label", "replica"):
        run.rows[0][1][key].pop()
    assert faults(run) == {"size": ["epoch 0 step 1 rank 0: 3 samples, planned 4"]}


def test_a_resumed_run_that_read_from_the_start_again_is_found(tmp_path):
    """It says that it begins at step 2 and reads what step 0 read."""
    run = make_run(tmp_path, starts=[Start(2, 4, 2, 2), Start(2, 4)])
    for rank in (0, 1):
        first, row = run.rows[rank][0], run.rows[rank][2]
        for key in ("shard", "count", "key", "label"):
            row[key] = first[key][: len(row[key])]
    assert {"repeated", "missing", "order"} <= set(faults(run))


def test_steps_lost_between_two_attempts_are_found(tmp_path):
    run = make_run(tmp_path, starts=[Start(2, 4, 2, 2), Start(2, 4)])
    for rank in (0, 1):
        del run.rows[rank][1]
    found = faults(run)
    assert found["steps"] == [f"epoch 0 step 1 is not recorded by rank {rank}" for rank in (0, 1)]
    assert len(found["missing"]) == 8


def test_the_first_rows_cannot_be_lost_unseen(tmp_path):
    """What is left of attempt 0 was replaced, yet it shows that the run was traced from the start."""
    run = make_run(tmp_path, starts=[Start(2, 4, 4, 2), Start(2, 4)])
    run.rows = {rank: rows[2:] for rank, rows in run.rows.items()}
    assert len(faults(run)["steps"]) == 4


def test_no_more_than_ten_of_a_kind_are_listed(tmp_path):
    run = make_run(tmp_path, sizes=(50, 50))
    run.rows[1] = []
    text = judge(run).text()
    assert text.count("is not recorded by rank 1") == 10 and "    and 16 more" in text


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_changed_row_of_an_exact_run_is_found(tmp_path, data):
    run = make_run(tmp_path, sizes=(6, 1, 5), starts=[Start(2, 2, 3, 2), Start(3, 1)])
    rows = [row for rows in run.rows.values() for row in rows if row["key"]]
    live = [row for row in rows if row["attempt"] == 1 or row["step"] < 2]
    row = data.draw(st.sampled_from(live))
    i = data.draw(st.integers(0, len(row["key"]) - 1))
    field = data.draw(st.sampled_from(["count", "shard", "worker", "rank", "epoch", "step"]))
    if field == "shard":
        others = sorted({"train-0000", "train-0001", "train-0002"} - {row["shard"][i]})
        row["shard"][i] = data.draw(st.sampled_from(others))
    elif field in ("count", "worker"):
        row[field][i] += data.draw(st.sampled_from([-1, 1, 2]))
    else:
        row[field] += data.draw(st.sampled_from([1, 2]))
    report = judge(run)
    live_now = row["attempt"] == 1 or (row["epoch"], row["step"]) < (0, 2)
    assert not report.kept or not live_now


# The command


def test_exit_status_and_text(tmp_path, capsys, monkeypatch):
    make_run(tmp_path / "good").write()
    monkeypatch.chdir(tmp_path)
    assert main(["good"]) == 0
    good = capsys.readouterr().out.splitlines()
    assert good[-1].startswith("kept: every sample once per epoch")
    odd = make_run(tmp_path / "odd")
    odd.config["plan"]["classes"] = [f"line\nbreak\r\x1b[{label}" for label in range(10)]
    odd.write()
    assert main([str(tmp_path / "odd")]) == 0
    printed = capsys.readouterr().out
    assert "line\\nbreak\\r\\x1b[1 " in printed and printed.count("\n") == len(good) and "\x1b" not in printed
    bad = make_run(tmp_path / "bad")
    bad.rows[0].pop()
    bad.write()
    assert main([str(tmp_path / "bad")]) == 1
    out = capsys.readouterr()
    assert out.out.splitlines()[-1].startswith("broken: ") and "broken: steps that" in out.out and not out.err


def test_json_has_every_number(tmp_path, capsys):
    make_run(tmp_path).write()
    assert main([str(tmp_path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["verdict"] == "kept" and report["sampling"] == "exact" and report["faults"] == {}
    assert report["epochs"][1]["once"] == 20 and report["epochs"][1]["steps"] == [[2, [3, 3]]]


def unreadable(run: TracedRun | Path, capsys) -> str:
    assert main([str(run if isinstance(run, Path) else run.folder)]) == 2
    out = capsys.readouterr()
    assert out.out == "" and len(out.err.splitlines()) == 1 and out.err.startswith("error: ")
    return out.err


def test_what_cannot_be_read_is_one_line(tmp_path, capsys):
    run = make_run(tmp_path / "run")
    assert "no such folder" in unreadable(tmp_path / "nowhere", capsys)
    (tmp_path / "empty").mkdir()
    assert "--trace save" in unreadable(tmp_path / "empty", capsys)
    run.write()
    (run.folder / "config.json").unlink()
    assert "config.json" in unreadable(run, capsys)
    for text in ("{", "[]", "{}", '{"plan": {"sampling": "exact"}}', '{"plan": 3}'):
        (run.folder / "config.json").write_text(text)
        assert "config.json" in unreadable(run, capsys)
    run.rows = {0: [], 1: []}
    run.write()
    assert "no row" in unreadable(run, capsys)


@pytest.mark.parametrize("line", ['{"attempt": 0, "epo', "", "[]", "null", '{"attempt": 0}', "\0\0\0"])
def test_a_torn_line_is_dropped_at_the_end_and_an_error_elsewhere(tmp_path, capsys, line):
    run = make_run(tmp_path)
    path = run.write() / "trace" / "rank00000.jsonl"
    whole = path.read_text()
    path.write_text(whole + line)  # no newline: torn
    assert main([str(tmp_path)]) == 0
    capsys.readouterr()
    lines = whole.splitlines(keepends=True)
    path.write_text("".join(lines[:2]) + line + "\n" + "".join(lines[2:]))
    assert "rank00000.jsonl line 3" in unreadable(run, capsys)


@pytest.mark.parametrize(("field", "value"), [
    ("worker", [0]), ("count", ["x", "y", "z", "u"]), ("count", [None] * 4), ("step", "3"), ("epoch", None),
    ("shard", [[1]] * 4), ("label", 3), ("attempt", 5), ("attempt", -1), ("worker", ["0"] * 4), ("worker", [{}] * 4),
    ("label", [None] * 4), ("label", [[1]] * 4), ("key", [7] * 4), ("count", [True] * 4), ("worker", [-(10**30)] * 4),
])
def test_a_row_with_fields_of_another_kind_is_an_error(tmp_path, capsys, field, value):
    run = make_run(tmp_path)
    run.rows[0][1][field] = value
    run.write()
    unreadable(run, capsys)


@pytest.mark.parametrize(("file", "field", "value"), [
    ("errors", "shard", []), ("errors", "count", "1"), ("errors", "count", 1e999), ("errors", "epoch", [0]),
    ("plan", "classes", [None]), ("plan", "shard_names", 3), ("plan", "shard_sizes", [0.5] * 3), ("plan", "mix", []),
    ("plan", "max_steps", "x"), ("config", "plans", True), ("status", "attempts", {"a": 1}),
    ("status", "attempts", [{"epoch": 0, "step": 1e999, "global_step": 0, "position": 0}]),
])
def test_files_with_values_of_another_kind_are_unreadable(tmp_path, capsys, file, field, value):
    run = make_run(tmp_path)
    run.errors = [{"shard": "train-0000", "key": "k", "count": 1, "epoch": 0}]
    files = {"errors": run.errors[0], "plan": run.config["plan"], "config": run.config, "status": run.status}
    files[file][field] = value
    run.write()
    unreadable(run, capsys)


@pytest.mark.parametrize("count", [9, 10, 10**30])
def test_a_skipped_sample_beyond_what_was_seen_of_its_shard(tmp_path, count):
    """Where the sizes are not known, it is none of those that the rows name."""
    run = make_run(tmp_path, "resampled", (9, 9))
    run.config["plan"]["shard_names"] = run.config["plan"]["shard_sizes"] = None
    for key in ("worker", "shard", "count", "key", "label", "replica"):
        del run.rows[1][1][key][2]
    run.errors = [{"shard": "train-0001", "key": "k", "count": count, "epoch": 0}]
    assert judge(run).kept


def test_a_beginning_that_contradicts_its_position(tmp_path):
    run = make_run(tmp_path)
    run.status["attempts"][0]["step"] = 1
    assert not judge(run).kept


def test_a_reader_who_leaves_is_no_error(tmp_path):
    """`| head` closes the pipe: no traceback, and no verdict that was never given."""
    make_run(tmp_path).write()
    for arguments in (("common.trace", str(tmp_path)), ("common.trace", "--help")):
        reading, writing = os.pipe()
        os.close(reading)
        result = subprocess.run([sys.executable, "-m", *arguments], cwd=ROOT, stdout=writing, stderr=subprocess.PIPE,
                                timeout=60)
        os.close(writing)
        assert (result.returncode, result.stderr) == (141, b"")


def test_shards_of_another_run_are_refused_and_stand_in_for_lost_sizes(tmp_path, capsys):
    from tests.helpers import write_shards

    shards = str(write_shards(tmp_path / "shards", SIZES, name="train"))
    run = make_run(tmp_path / "run")
    run.write()
    assert main([str(run.folder), "-s", shards]) == 0
    for plan in run.config["plans"]:
        del plan["shard_sizes"], plan["shard_names"]
    run.write()
    capsys.readouterr()
    assert "-s" in unreadable(run, capsys)
    assert main([str(run.folder), "-s", shards]) == 0
    other = make_run(tmp_path / "other", sizes=(10, 3, 8))
    other.write()
    capsys.readouterr()
    assert main([str(other.folder), "-s", shards]) == 2
    assert "train-0002" in capsys.readouterr().err


def test_a_stream_of_unknown_size_is_judged_by_what_was_seen(tmp_path):
    run = make_run(tmp_path, "resampled", (9, 9))
    run.config["plan"]["shard_names"] = run.config["plan"]["shard_sizes"] = None
    report = judge(run)
    assert report.kept and report.epochs[0].missing is None and "?" in report.text()


def test_an_epoch_of_fewer_samples_than_the_shards_hold(tmp_path):
    run = make_run(tmp_path, num_epochs=1)
    order = EpochOrder(SIZES, 5, 3, 0)
    run.config["plan"]["epoch_samples"] = 16
    for rows in run.rows.values():
        rows.pop()
    assert len(order.locate(0, 16)) == 16
    report = judge(run)
    assert report.kept and (report.epochs[0].once, report.epochs[0].not_reached) == (16, 4)
    run.config["plan"]["epoch_samples"] = 21
    with pytest.raises(UserError, match="21 samples"):
        judge(run)


# Cost


def test_memory_does_not_grow_with_the_trace(tmp_path):
    """400 000 samples in 400 epochs, 400 000 in one: a subprocess peaks below 100 MB either way."""
    code = ("import sys; from common.trace import main; status = main(sys.argv[1:])\n"
            "print(open('/proc/self/status').read().split('VmHWM:')[1].split()[0]); sys.exit(status)")
    peaks = []
    for sizes, num_epochs in (((500, 500), 400), ((1000,) * 400, 1)):
        folder = tmp_path / str(num_epochs)
        make_run(folder, sizes=sizes, starts=[Start(2, 500)], num_epochs=num_epochs, shuffle=0).write()
        result = subprocess.run([sys.executable, "-c", code, str(folder), "--json"], cwd=ROOT,
                                capture_output=True, text=True, timeout=120)
        assert result.returncode == 0, result.stderr
        peaks.append(int(result.stdout.split()[-1]) / 1024)
    assert max(peaks) < 100, peaks


def test_auditing_needs_no_torch(tmp_path):
    make_run(tmp_path).write()
    code = "import sys; from common.trace import main; sys.exit(main(sys.argv[1:]) or 'torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, capture_output=True, timeout=60)
    assert result.returncode == 0, result.stderr
