"""Draws a traced run: steps from left to right, a band per rank, coloured by shard, with the workers in gray below.

A cell is one rank's batch, its samples from top to bottom. Where there are more steps than columns, a column joins
several and shows an even choice of their samples. On top of a band red marks repeats (the more, the
stronger) and black marks gaps.

    python -m common.trace RUN --plot steps.png
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from common.errors import UserError
from common.tracing.audit import audit
from common.tracing.canvas import Canvas
from common.tracing.report import AuditReport
from common.tracing.rows import rank_files
from common.tracing.run import RecordedRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_BYTES = 64 << 20  # a trace of this size, about a million samples, is drawn whole at the end of a run
MAX_NAMED = 16  # shards or workers that the legend names one by one
MAX_LINES = 60  # epochs that get a line
RED, BLACK, WHITE = (0.85, 0.1, 0.1), (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)

DASHED = (0, (2, 2))  # a dash and a space, in points


def figure(folder: str | Path) -> Figure:
    """The picture of a run, for TensorBoard at its end. A trace too long to read is drawn from a sample of its rows."""
    run = RecordedRun.open(folder)
    canvas = Canvas.for_run(run)
    if sum(path.stat().st_size for path in rank_files(run.folder).values()) <= MAX_BYTES:
        return paint(canvas, title_of(audit(run, canvas)))
    canvas.fill_from_sample()
    return paint(canvas, f"{run.folder}: {run.plan.sampling}, a sample of its batches")


def save(picture: Figure, path: str | Path) -> None:
    """Write a figure in the format that the name asks for. Raises UserError where it cannot be written."""
    try:
        picture.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise UserError(f"the plot cannot be written ({error}); --plot {path}; give another FILE.png") from None


def title_of(report: AuditReport) -> str:
    """The picture's heading."""
    return f"{report.run}: {report.sampling}, {'promise kept' if report.kept else 'promise broken'}"


def paint(canvas: Canvas, title: str) -> Figure:
    """Turn a canvas into a figure of its own; no global state of matplotlib is used."""
    from matplotlib.figure import Figure  # half a second

    canvas.finish()
    num_ranks = len(canvas.shards)
    picture = Figure(figsize=(13, min(2.2 + 0.6 * num_ranks, 18)), layout="constrained")
    axes = picture.add_subplot()
    image, band = _image(canvas)
    extent = (0, canvas.shards.shape[1] * canvas.width, num_ranks * band, 0)
    axes.imshow(image, extent=extent, aspect="auto", interpolation="nearest")
    axes.set_xlim(0, canvas.num_steps)
    axes.set_title(title)
    axes.set_xlabel("step of the run" + (f" ({canvas.width} in a column)" if canvas.width > 1 else ""))
    axes.set_ylabel("rank")
    shown = range(0, num_ranks, max(1, num_ranks // 32))
    axes.set_yticks([(rank + 0.5) * band for rank in shown], [str(rank) for rank in shown])
    _draw_borders(canvas, axes)
    _draw_legend(canvas, picture, axes)
    return picture


def _image(canvas: Canvas) -> tuple[np.ndarray, int]:
    """The picture as float (lines, columns, 3), and how many of its lines are one rank's.

    A band is a thin strip of repeats, one of gaps, the shards, the workers, and space.
    """
    num_ranks, num_columns, num_lines = canvas.shards.shape
    thin = max(1, num_lines // 8)
    band = num_lines + 5 * thin
    image = np.ones((num_ranks, band, num_columns, 3))
    share = canvas.repeats / np.maximum(canvas.uses, 1)
    share[canvas.repeats > 0] = 0.3 + 0.7 * share[canvas.repeats > 0]  # one repeat among many is to be seen, too
    image[:, :thin] = (1 - share[..., None] * (1 - np.array(RED)))[:, None]
    image[:, thin : 2 * thin][(canvas.gaps > 0)[:, None].repeat(thin, axis=1)] = BLACK
    image[:, 2 * thin : 2 * thin + num_lines] = _colours(_shard_colours(canvas), canvas.shards).transpose(0, 2, 1, 3)
    workers = _colours(_worker_colours(canvas), canvas.workers).transpose(0, 2, 1, 3)
    image[:, 2 * thin + num_lines : 4 * thin + num_lines] = workers[:, np.arange(2 * thin) * num_lines // (2 * thin)]
    return image.reshape(num_ranks * band, num_columns, 3), band


def _colours(table: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """The colour of each number, white for -1."""
    return np.concatenate([table, [WHITE]])[numbers]


def _shard_colours(canvas: Canvas) -> np.ndarray:
    """(shards, 3): apart from each other where they are few, along a scale where they are many."""
    from matplotlib import colormaps

    num_shards = len(canvas.run.shard_names)
    if num_shards <= MAX_NAMED:
        numbers = np.arange(num_shards)
        return colormaps["tab20"]((numbers * 2 + numbers // 10) % 20)[:, :3]  # its strong half first
    return colormaps["turbo"](np.linspace(0, 1, num_shards))[:, :3]


def _worker_colours(canvas: Canvas) -> np.ndarray:
    """(workers, 3): grays from light to dark."""
    num_workers = max(int(canvas.workers.max()) + 1, 1)
    return np.repeat(np.linspace(0.85, 0.15 if num_workers > 1 else 0.85, num_workers)[:, None], 3, axis=1)


def _draw_borders(canvas: Canvas, axes: Axes) -> None:
    """A line where an epoch begins, a dashed one where the run was started again."""
    epochs = [step for step in canvas.epochs.values() if step > 0]
    for step in epochs if len(epochs) <= MAX_LINES else []:
        axes.axvline(step, color=BLACK, linewidth=0.8)
    for step in canvas.starts:
        axes.axvline(step, color=BLACK, linewidth=0.8, linestyle=DASHED)


def _draw_legend(canvas: Canvas, picture: Figure, axes: Axes) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, Normalize
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    shards, workers, names = _shard_colours(canvas), _worker_colours(canvas), canvas.run.shard_names
    handles: list[Patch | Line2D] = []
    if len(names) <= MAX_NAMED:
        handles += [Patch(color=tuple(colour), label=name) for colour, name in zip(shards, names, strict=True)]
    else:
        scale = ScalarMappable(Normalize(0, len(names) - 1), ListedColormap(list(map(tuple, shards))))
        bar = picture.colorbar(scale, ax=axes, label="shard", pad=0.01)
        bar.set_ticks([0, len(names) - 1], labels=[names[0], names[-1]])
    if len(workers) <= MAX_NAMED:
        handles += [Patch(color=tuple(colour), label=f"worker {i}") for i, colour in enumerate(workers)]
    handles += [Patch(color=RED, label="repeat")] if canvas.repeats.any() else []
    handles += [Patch(color=BLACK, label="gap")] if canvas.gaps.any() else []
    handles += [Line2D([], [], color=BLACK, linewidth=0.8, label="epoch")] if any(canvas.epochs.values()) else []
    handles += [Line2D([], [], color=BLACK, linewidth=0.8, linestyle=DASHED, label="restart")] if canvas.starts else []
    picture.legend(handles=handles, loc="outside right upper", fontsize="small", frameon=False)
