"""Where a run stands: everything that changes besides model, optimiser and scaler, named in one place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from common.metrics import AverageMeter
from common.plan import Plan
from common.sampling import Progress


@dataclass
class State:
    """All that changes while a run goes on, besides model, optimiser and scaler. Goes whole into a checkpoint."""

    progress: Progress = field(default_factory=Progress)
    epoch_done: bool = False  # all its steps are, its validation is not
    loss: AverageMeter = field(default_factory=AverageMeter)
    top1: AverageMeter = field(default_factory=AverageMeter)
    best_top1: float = -1.0

    def as_dict(self) -> dict[str, Any]:
        return {"progress": asdict(self.progress), "epoch_done": self.epoch_done, "best_top1": self.best_top1,
                "meters": {"loss": self.loss.state_dict(), "top1": self.top1.state_dict()}}

    def keep_best(self, result: Mapping[str, Any]) -> bool:
        """Remember a validation's top1 if it is the best so far, and say whether it is. Without a top1 it is not."""
        best = result.get("top1", -1.0) > self.best_top1
        self.best_top1 = max(result.get("top1", -1.0), self.best_top1)
        return best

    @classmethod
    def from_checkpoint(cls, saved: dict[str, Any] | None, plan: Plan) -> State:
        """Where a run goes on; a new one without a checkpoint. Raises UserError for a plan that must not differ."""
        state = cls()
        if saved is not None:
            plan.check_resumed(saved["plan"])
            state.progress, state.epoch_done = Progress(**saved["progress"]), saved["epoch_done"]
            state.best_top1 = saved["best_top1"]
            state.loss.load_state_dict(saved["meters"]["loss"])
            state.top1.load_state_dict(saved["meters"]["top1"])
        return state
