"""What the audit of a trace found: numbers per epoch, faults by kind, the verdict; as text and as JSON."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any

from common.errors import printable

NUM_LISTED = 10
NUM_LABELS = 10

KINDS = {
    "steps": "steps that not every rank took once, in turn",
    "foreign": "rows that are not of the rank and world that they stand under",
    "unknown": "samples that no shard has",
    "repeated": "samples used again in an epoch",
    "missing": "samples not used in an epoch",
    "size": "batches of another size than planned",
    "order": "batches with other samples than planned, or in another order",
    "deal": "samples of a shard that was dealt to another rank or worker",
    "worker": "batches made by another worker than planned",
}


class Faults:
    """What broke the promise: counted by kind, the first ten of each in words."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.examples: dict[str, list[str]] = {}

    def add(self, kind: str, *texts: str, count: int = 0) -> None:
        """Note faults, one per text; `count` where there are more of them than texts."""
        if not (texts or count):
            return
        self.counts[kind] += max(count, len(texts))
        listed = self.examples.setdefault(kind, [])
        listed += texts[: NUM_LISTED - len(listed)]

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Count and examples by kind, those that occurred."""
        found = [kind for kind in KINDS if self.counts[kind]]
        return {kind: {"count": self.counts[kind], "examples": self.examples[kind]} for kind in found}


@dataclass
class EpochReport:
    """One epoch, in numbers of samples: `once`, `repeated`, `missing`, `skipped` and `not_reached` make `total`.

    `steps` holds (world size, steps of each rank) for each world in turn; `reads` counts repeats, too; `distinct`
    samples were used at all; `missing` is None where the shards' sizes are not known, `order_kept` where no order is
    promised.
    """

    epoch: int
    complete: bool
    steps: list[tuple[int, list[int]]]
    reads: int
    total: int
    distinct: int
    once: int
    repeated: int
    missing: int | None
    skipped: int
    not_reached: int
    equal_steps: bool
    order_kept: bool | None
    shards_per_batch: float
    workers_per_batch: float
    classes_per_batch: float
    labels: dict[str, int] = field(default_factory=dict)

    def cells(self) -> list[str]:
        """The table's row."""
        return [
            str(self.epoch) + ("" if self.complete else " so far"),
            ", then ".join(f"{n[0]} x {size}" if len(set(n)) == 1 else "/".join(map(str, n)) for size, n in self.steps),
            f"{self.distinct}/{self.total}", str(self.once), str(self.repeated),
            "?" if self.missing is None else str(self.missing), str(self.skipped),
            f"{self.shards_per_batch:.1f}", f"{self.workers_per_batch:.1f}", f"{self.classes_per_batch:.1f}",
            self._labels(),
        ]

    def _labels(self) -> str:
        if len(self.labels) > NUM_LABELS:
            return f"{len(self.labels)} labels, {min(self.labels.values())} to {max(self.labels.values())} each"
        return ", ".join(f"{printable(name)} {count}" for name, count in self.labels.items())


HEADER = ["epoch", "steps x ranks", "distinct", "seen once", "repeated", "missing", "skipped",
          "shards/batch", "workers/batch", "classes/batch", "labels"]


@dataclass
class AuditReport:
    """The whole audit. `promise` is what the mode promises, in words."""

    run: str
    sampling: str
    promise: str
    state: str | None
    num_attempts: int
    faults: Faults
    epochs: list[EpochReport] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def kept(self) -> bool:
        return not self.faults.counts

    def as_dict(self) -> dict[str, Any]:
        """For `--json`: every number, and the verdict `kept` or `broken`."""
        values = {name: value for name, value in vars(self).items() if name not in ("epochs", "faults")}
        return {"verdict": "kept" if self.kept else "broken", **values,
                "epochs": [asdict(epoch) for epoch in self.epochs], "faults": self.faults.as_dict()}

    def text(self) -> str:
        """For people: a line on the run, a table of epochs, notes, faults, the verdict last."""
        starts = f"{self.num_attempts} start{'s' * (self.num_attempts != 1)}"
        lines = [f"{self.run}: {self.sampling}, state {self.state or 'unknown'}, {starts}"]
        lines += _table([HEADER, *(epoch.cells() for epoch in self.epochs)])
        lines += [f"note: {note}" for note in self.notes]
        for kind, found in self.faults.as_dict().items():
            lines.append(f"broken: {KINDS[kind]}: {found['count']}")
            lines += [f"    {text}" for text in found["examples"]]
            if found["count"] > len(found["examples"]):
                lines.append(f"    and {found['count'] - len(found['examples'])} more")
        lines.append(f"{'kept' if self.kept else 'broken'}: {self.promise}")
        return "\n".join(lines)


def _table(rows: list[list[str]]) -> list[str]:
    """Columns of equal width, the last one left as it is; epochs in a row that differ in number alone share a line."""
    folded = []
    for _, same in groupby(rows, key=lambda row: row[1:]):
        group = list(same)
        folded.append([group[0][0] if len(group) == 1 else f"{group[0][0]}-{group[-1][0]}", *group[0][1:]])
    widths = [max(len(row[i]) for row in folded) for i in range(len(rows[0]))]
    widths[-1] = 0
    return ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in folded]
