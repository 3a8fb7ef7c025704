"""TensorBoard events of a run: one file, also after restarts, in which no step comes twice.

    tensorboard --logdir runs

A restart copies what the earlier attempts wrote up to its first step into a new file and removes the old ones.
torch.utils.tensorboard and matplotlib are imported when something is first drawn, not when a run starts.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from common.files import writing
from common.metrics import ConfusionMatrix

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch.utils.tensorboard import SummaryWriter

PATTERN = "events.out.tfevents.*"
OPENING = "start/"  # tags of what every attempt writes before its first step
NUM_IMAGES, NUM_COLUMNS, TILE, CAPTION = 32, 8, 112, 40  # of the grid; TILE and CAPTION are pixels
MAX_COUNTED, MAX_NAMED, MAX_DRAWN = 12, 40, 1000  # classes up to which a confusion matrix has counts, names, a figure


class TensorBoard:
    """Writes events into `folder`, going on from `start_step`, the number of steps that are done. Rank 0 only.

    Raises UserError where the folder can no longer be written.
    """

    def __init__(self, folder: Path, start_step: int):
        self.folder, self.start_step = folder, start_step
        self._writer: SummaryWriter | None = None
        self._waiting: list[Callable[[SummaryWriter], None]] = []
        self._kept: set[str] = set()  # tags that an earlier attempt has written at `start_step`

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Numbers by tag, on the disk when this returns."""
        def write(writer: SummaryWriter) -> None:
            for tag, value in values.items():
                writer.add_scalar(tag, value, step)
            writer.flush()

        self._write(write, step, *values)

    def start_text(self, tag: str, text: str) -> None:
        """Markdown, written along with the first numbers."""
        self._waiting.append(lambda writer: writer.add_text(OPENING + tag, text, self.start_step))

    def start_images(self, image: torch.Tensor, captions: Sequence[str]) -> None:
        """A grid of the first of uint8 (n, 3, height, width), written along with the first numbers. Copies them."""
        images = image[: min(NUM_IMAGES, len(captions))].permute(0, 2, 3, 1).cpu().numpy().copy()
        if not len(images):
            return
        self._waiting.append(lambda writer: writer.add_image(OPENING + "first batch", image_grid(images, captions),
                                                             self.start_step, dataformats="HWC"))

    def figure(self, tag: str, figure: Figure, step: int) -> None:
        """A matplotlib figure as an image. No pyplot, so no window system is ever asked for."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        canvas = FigureCanvasAgg(figure)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a line for each letter that the font lacks
            canvas.draw()
        pixels = np.asarray(canvas.buffer_rgba())[..., :3]
        self._write(lambda writer: writer.add_image(tag, pixels, step, dataformats="HWC"), step, tag)

    def confusion(self, confusion: ConfusionMatrix, classes: Sequence[str], step: int) -> None:
        """Counts by class as a figure, where it can be seen, and as a table of the accuracy of each class."""
        right, total = confusion.by_class().numpy()
        if len(classes) <= MAX_DRAWN:
            self.figure("val/confusion", confusion_figure(confusion.counts.numpy(), right, total, classes), step)
        tag, table = "val/accuracy by class", accuracy_table(right, total, classes)
        self._write(lambda writer: writer.add_text(tag, table, step), step, tag + "/text_summary")

    def close(self) -> None:
        """Write what waits, and close the file. May be called twice."""
        if self._waiting:
            self._write(lambda writer: None, self.start_step)
        if self._writer is not None:
            with writing(self.folder):
                self._writer.close()
            self._writer = None

    def _write(self, write: Callable[[SummaryWriter], None], step: int, *tags: str) -> None:
        with writing(self.folder):
            if self._writer is None:
                self._writer = self._open()
            for waiting in self._waiting:
                waiting(self._writer)
            self._waiting.clear()
            # A validation that a restart does again, on the same weights, gives the same numbers: one is enough.
            if step != self.start_step or not self._kept.issuperset(tags):
                write(self._writer)

    def _open(self) -> SummaryWriter:
        """A writer whose file begins with all earlier events up to `start_step`; their own files are removed.

        Killed in between, the next restart finds the same events in two files and takes them once.
        """
        from torch.utils.tensorboard import SummaryWriter

        old = sorted(self.folder.glob(PATTERN))
        # The suffix keeps a restart in the same second, on the same host, under the same pid from wiping the old file.
        # Purging from step 0 makes a TensorBoard that is watching forget what it is about to read again.
        writer = SummaryWriter(str(self.folder), purge_step=0 if old else None, filename_suffix=f".{time.time_ns()}")
        for event in _earlier_events(old, self.start_step):
            writer._get_file_writer().add_event(event, event.step, event.wall_time)
            if event.step == self.start_step:
                self._kept.update(value.tag for value in event.summary.value)
        writer.flush()
        for path in old:
            path.unlink()
        return writer


def _earlier_events(paths: Sequence[Path], start_step: int) -> Iterator[Any]:
    """Events that still hold for a run that goes on after `start_step` steps. A torn end of a file is dropped."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

    seen = set()
    for path in paths:
        for record in RawEventFileLoader(str(path)).Load():
            event = Event.FromString(record)
            opens = any(value.tag.startswith(OPENING) for value in event.summary.value)
            holds = event.step < start_step or 0 < event.step == start_step and not opens
            if event.WhichOneof("what") == "summary" and holds and record not in seen:
                seen.add(record)
                yield event


def image_grid(images: np.ndarray, captions: Sequence[str]) -> np.ndarray:
    """Images, uint8 (n, height, width, 3), in rows of eight with their captions below: uint8 (height, width, 3)."""
    from PIL import Image, ImageDraw, ImageFont

    num_rows = -(-len(images) // NUM_COLUMNS)
    grid = Image.new("RGB", (TILE * min(len(images), NUM_COLUMNS), (TILE + CAPTION) * num_rows), "white")
    draw, font = ImageDraw.Draw(grid), ImageFont.load_default(11)
    for number, (image, caption) in enumerate(zip(images, captions, strict=False)):
        left, top = number % NUM_COLUMNS * TILE, number // NUM_COLUMNS * (TILE + CAPTION)
        grid.paste(Image.fromarray(image).resize((TILE, TILE)), (left, top))
        for row, line in enumerate(drawable(caption).split("\n")):
            draw.text((left + 2, top + TILE + 12 * row), line[:20], fill="black", font=font)
    return np.asarray(grid)


def drawable(text: str) -> str:
    """Names come from file names, which may hold bytes that are no letters and that nothing can draw."""
    return text.encode("utf-8", "replace").decode()


def class_accuracy(right: np.ndarray, total: np.ndarray) -> np.ndarray:
    """Percent of each class's samples that were recognised, float (classes,); NaN where there are none."""
    return np.where(total > 0, 100 * right / np.maximum(total, 1), np.nan)


def accuracy_table(right: np.ndarray, total: np.ndarray, classes: Sequence[str]) -> str:
    """Markdown, the worst class first; a hundred rows at most."""
    accuracy = class_accuracy(right, total)
    order = np.argsort(accuracy, kind="stable")[:100]  # NaN comes last
    rows = [f"| {drawable(classes[i])} | {f'{accuracy[i]:.2f}' if total[i] else '–'} | {total[i]} |" for i in order]
    return "\n".join(["| class | top-1, % | samples |", "|---|---|---|", *rows])


def confusion_figure(matrix: np.ndarray, right: np.ndarray, total: np.ndarray, classes: Sequence[str]) -> Figure:
    """A confusion matrix, int (true, predicted), in percent of each true class; names and counts as long as they are
    readable."""
    from matplotlib.figure import Figure

    share = 100 * matrix / np.maximum(total[:, None], 1)
    num_classes = len(classes)
    side = min(4 + 0.3 * num_classes, 10)
    figure = Figure(figsize=(side + 1, side), layout="constrained")
    axes = figure.add_subplot()
    drawn = axes.imshow(share, cmap="Blues", vmin=0, vmax=100)
    figure.colorbar(drawn, label="% of the true class")
    axes.set(xlabel="predicted", ylabel="true")
    if num_classes <= MAX_NAMED:
        names = [drawable(name)[:20] for name in classes]
        labels = [f"{name}  {percent:.1f} %" for name, percent in zip(names, class_accuracy(right, total), strict=True)]
        axes.set_xticks(range(num_classes), names, rotation=90, parse_math=False)
        axes.set_yticks(range(num_classes), labels, parse_math=False)
    if num_classes <= MAX_COUNTED:  # each text takes 2 ms
        for (row, column), number in np.ndenumerate(matrix):
            color = "white" if share[row, column] > 50 else "black"
            axes.text(column, row, f"{number}", ha="center", va="center", fontsize=7, color=color)
    return figure
