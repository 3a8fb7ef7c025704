"""The picture of a run: what is in its cells, that it stays small for long runs, that it can be written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from common.errors import UserError
from common.trace import main
from common.tracing import plot
from common.tracing.audit import audit
from common.tracing.canvas import NUM_COLUMNS, Canvas
from common.tracing.run import RecordedRun
from tests.trace_runs import Start, TracedRun, make_run

ROOT = Path(__file__).resolve().parent.parent


def canvas_of(run: TracedRun) -> Canvas:
    opened = RecordedRun.open(run.write())
    canvas = Canvas.for_run(opened)
    audit(opened, canvas)
    canvas.finish()
    return canvas


def test_a_cell_holds_its_batch(tmp_path):
    run = make_run(tmp_path, "split", (10, 3, 7, 9), num_workers=2)
    canvas = canvas_of(run)
    assert canvas.width == 1 and canvas.shards.shape == (2, 6, 24)
    for rank, rows in run.rows.items():
        for column, row in enumerate(rows):
            assert canvas.shards[rank, column, ::6].tolist() == [int(name[-4:]) for name in row["shard"]]
            assert canvas.workers[rank, column, ::6].tolist() == row["worker"]
    assert canvas.epochs == {0: 0, 1: 3}


def test_repeats_and_gaps_are_marked_where_they_are(tmp_path):
    run = make_run(tmp_path, sizes=(10, 10, 7))
    for key in ("shard", "count", "key", "label"):
        run.rows[0][2][key][1] = run.rows[0][0][key][0]
    run.rows[1].pop(5)
    canvas = canvas_of(run)
    assert np.argwhere(canvas.repeats).tolist() == [[0, 2]]
    assert {tuple(place): canvas.gaps[tuple(place)] for place in np.argwhere(canvas.gaps)} == {(0, 2): 1, (1, 5): 4}
    assert (canvas.shards[1, 5] == -1).all() and (canvas.shards[0, 5] >= 0).all()


def test_a_long_run_is_binned(tmp_path):
    run = make_run(tmp_path, sizes=(500,) * 8, starts=[Start(2, 2)], num_epochs=2, shuffle=0)
    canvas = canvas_of(run)
    assert canvas.width == 5 and canvas.shards.shape[1] == NUM_COLUMNS
    assert canvas.uses.sum() == 8000 and (canvas.shards >= 0).all()
    for column in (0, 199, 200, 399):
        held = {int(name[-4:]) for row in run.rows[1][column * 5 : column * 5 + 5] for name in row["shard"]}
        assert set(canvas.shards[1, column].tolist()) == held
        assert set(canvas.workers[1, column].tolist()) == {0, 1}


def test_a_restart_in_another_world_has_its_own_bands(tmp_path):
    canvas = canvas_of(make_run(tmp_path, sizes=(30, 20), starts=[Start(2, 4, 5, 3), Start(3, 4)]))
    assert len(canvas.shards) == 3 and canvas.starts == [3]
    assert (canvas.shards[2, :3] == -1).all() and (canvas.shards[2, 3:5] >= 0).all()


def test_a_large_trace_is_drawn_from_a_sample_that_says_the_same(tmp_path, monkeypatch):
    run = make_run(tmp_path, sizes=(400,) * 10, starts=[Start(2, 1)], shuffle=0)
    whole = canvas_of(run)
    sample = Canvas.for_run(RecordedRun.open(tmp_path))
    sample.fill_from_sample()
    sample.finish()
    filled = sample.shards[..., 0] >= 0
    assert filled.mean() > 0.95
    assert (sample.shards[..., 0] == whole.shards[..., 0])[filled].mean() > 0.9  # a column may lie across a border
    monkeypatch.setattr(plot, "MAX_BYTES", 1000)
    assert "a sample" in plot.figure(tmp_path).axes[0].get_title()
    monkeypatch.undo()
    assert "promise kept" in plot.figure(tmp_path).axes[0].get_title()


@pytest.mark.parametrize("num_shards", [3, 40])
def test_the_command_writes_a_picture(tmp_path, capsys, num_shards):
    run = make_run(tmp_path / "run", sizes=(6,) * num_shards)
    run.rows[0].pop(1)
    run.write()
    assert main([str(run.folder), "--plot", str(tmp_path / "steps.png")]) == 1
    assert "epoch 0 step 1 is not recorded by rank 0" in capsys.readouterr().out
    with Image.open(tmp_path / "steps.png") as picture:
        pixels = np.asarray(picture.convert("RGB"))
    assert pixels.shape[1] > 1000 and len(np.unique(pixels.reshape(-1, 3), axis=0)) > 5
    main([str(run.folder), "--plot", str(tmp_path / "nowhere" / "steps.png")])
    assert capsys.readouterr().err.startswith("error: the plot cannot be written")


def test_a_plot_of_an_unknown_format_is_an_error(tmp_path):
    run = make_run(tmp_path / "run").write()
    with pytest.raises(UserError, match="--plot"):
        plot.save(plot.figure(run), tmp_path / "steps.docx")
    plot.save(plot.figure(run), tmp_path / "steps.png")


def test_a_plot_onto_a_folder_is_an_error(tmp_path, capsys):
    run = make_run(tmp_path / "run").write()
    assert main([str(run), "--plot", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"error: a folder, not a file; --plot {tmp_path}; give a FILE.png in it\n"


def test_matplotlib_is_not_loaded_without_a_plot(tmp_path):
    make_run(tmp_path).write()
    code = "import sys; from common.trace import main; sys.exit(main(sys.argv[1:]) or 'matplotlib' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, capture_output=True, timeout=60)
    assert result.returncode == 0, result.stderr
