"""The one training loop: epochs of steps, and what happens every once in a while. All three scripts call `fit`.

Ranks never diverge: whatever one of them learns (a signal, a bad loss, too many bad samples) is added up over
all ranks once per step, and all act on the sum.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

import torch

from common import checkpoint
from common.collate import Batch
from common.distributed import World
from common.errors import UserError, printable
from common.evaluation import Validation, evaluate
from common.launching.failure import SharedError
from common.loader import Loader, on_device
from common.metrics import AverageMeter
from common.plan import Plan
from common.profiling import UNPROFILED, profiled
from common.running.records import Records
from common.running.resume import take_over
from common.running.state import State
from common.sampling import Progress
from common.step import Outcome, Stepper
from common.stop import StopSignals


@dataclass
class Run:
    """What a run is made of, and its state."""

    world: World
    stepper: Stepper
    module: torch.nn.Module  # bare: without DP, DDP or compile around it
    loader: Loader
    validation: Validation | None
    records: Records
    plan: Plan
    state: State
    stop: StopSignals
    num_steps: int  # of the whole run
    save_every: int | None
    profile: bool = False
    stop_looked_for_at: float = 0.0  # when the file `stop` was

    def restore(self, saved: dict[str, Any] | None) -> None:
        """Take model, optimiser and scaler from a checkpoint. Raises UserError where they do not fit."""
        if saved is not None:
            config, stepper = self.records.description["config"], self.stepper
            for note in take_over(saved, config, self.module, stepper.optimizer, stepper.scaler):
                self.records.report.note(note)


def fit(run: Run) -> str:
    """Train to the end, or until a stop: returns "complete" or "stopped". Every rank calls it."""
    run.validation = run.validation and run.validation.matched(run.plan.num_classes, run.plan.classes)
    run.module.train()
    try:
        run.stepper.warm_up(run.loader.dataset.transform.size)
        return "stopped" if _train(run) else "complete"
    except UserError as error:
        raise run.world.own_error(error) from None
    except RuntimeError as error:
        if type(error).__module__.startswith(("torch._inductor", "torch._dynamo")):
            reason = str(error).strip().partition("\n")[0][:160]
            raise run.world.own_error(UserError(
                f"the model cannot be compiled ({type(error).__name__}: {reason}); --compile; install a C++ compiler, "
                "or leave it out")) from None
        if "does not have a deterministic implementation" not in str(error):
            raise
        operator = str(error).split()[0]
        raise SharedError(f"{operator} gives other bits each time on {run.world.device}; --deterministic; "
                          "leave it out, or choose another --arch") from None


def _train(run: Run) -> bool:
    """The rest of the run. Returns whether it was stopped, as all ranks agree."""
    state = run.state
    if state.epoch_done and end_epoch(run, stop=False):
        return True
    if state.progress.step and state.progress.global_step >= run.num_steps:  # ended by --max_steps, maybe not validated
        return end_in_epoch(run)
    batches, stop = on_device(iter(run.loader), run.world.device), False
    profile = run.records.folder.path / "profile" / f"rank{run.world.rank:05d}.json"
    if run.profile:
        batches = profiled(batches, profile, run.world.device)
    while not stop and state.progress.global_step < run.num_steps:
        batch, wait_seconds = _timed(batches)
        if batch is None:
            break
        stop = train_step(run, batch, wait_seconds)
        if batch.step.last:
            stop = end_epoch(run, stop)
        elif state.progress.global_step == run.num_steps:
            save(run, "last.pt")
            stop = stop or end_in_epoch(run)
        elif stop or run.save_every and state.progress.global_step % run.save_every == 0:
            save(run, "last.pt")
    batches.close()  # after an error the workers die with this process, which waits for nothing
    if run.profile and not profile.exists():
        run.records.report.note(f"note: no profile: it begins with step {UNPROFILED + 1} of a start; this had fewer")
    return stop


def end_epoch(run: Run, stop: bool) -> bool:
    """Validate, keep the best, go on to the next epoch, save. Returns whether to stop, as all ranks agree.

    After a stop the epoch stays open in the checkpoint, and the resumed run begins with its validation.
    """
    state = run.state
    state.epoch_done = True
    best = False
    result = None if stop else validate(run)
    if result is not None:
        best = state.keep_best(result)
        state.progress = Progress(state.progress.epoch + 1, 0, state.progress.global_step, 0)
        state.epoch_done, state.loss, state.top1 = False, AverageMeter(), AverageMeter()
    if best:
        save(run, "best.pt")  # first: a run killed in between comes here again, since last.pt does not know of it yet
    save(run, "last.pt")
    return result is None


def end_in_epoch(run: Run) -> bool:
    """Validate where --max_steps ended the run, and keep the best. Returns whether to stop, as all ranks agree.

    last.pt has these steps already, without the validation: a run killed in here comes again, to the same files.
    """
    result = validate(run)
    if result is not None and run.state.keep_best(result):
        save(run, "best.pt")  # first, as ever
        save(run, "last.pt")
    return result is None


def validate(run: Run) -> dict[str, Any] | None:
    """The result of a validation, also reported; {} where there is nothing to validate on, None after a stop."""
    if run.validation is None:
        return {}
    result = evaluate(run.module, run.validation, run.stepper.recipe, run.world, lambda: asked_to_stop(run),
                      run.records.errors)
    if result is not None:
        report, progress = run.records.report, run.state.progress
        report.validation(progress.epoch, progress.global_step, result)
        report.confusion(result["confusion"], run.plan.classes, progress.global_step)
    return result


def save(run: Run, name: str) -> None:
    """Write a checkpoint of the whole run. Every rank calls it; rank 0 writes; all raise if it cannot."""
    def write() -> None:
        checkpoint.check_finite(run.module)
        checkpoint.save(run.records.folder.path / name, {
            "model": checkpoint.bare_state(run.module),
            "optimizer": checkpoint.on_cpu(run.stepper.optimizer.state_dict()),
            "scaler": run.stepper.scaler.state_dict(),
            "schedule": {name: value for name, value in asdict(run.stepper.recipe).items()
                         if isinstance(value, int | float | str)},
            "rng": torch.get_rng_state(),
            **run.state.as_dict(),
            **run.records.description,
        })
    run.world.on_main(write)


def asked_to_stop(run: Run) -> bool:
    """Whether this rank knows of a signal, or rank 0 of a file `stop` in the run's folder, looked for each second."""
    now = time.monotonic()
    if run.world.is_main and now - run.stop_looked_for_at >= 1.0:
        run.stop_looked_for_at = now
        if run.records.folder.take_stop_file():
            run.stop.requested = True
    return run.stop.requested


def _timed(batches: Any) -> tuple[Batch | None, float]:
    start = time.monotonic()
    return next(batches, None), time.monotonic() - start


def train_step(run: Run, batch: Batch, wait_seconds: float) -> bool:
    """One step, its bookkeeping, and what all ranks agree on after it: whether to stop."""
    step = batch.step
    if step.global_step == 0:
        run.records.report.images(batch, run.plan.classes)
    outcome = run.stepper.train(batch)
    stop, loss, correct, num_samples = agree(run, batch, outcome)
    run.state.progress = Progress(step.epoch, step.step + 1, step.global_step + 1, step.stop)
    if num_samples:
        run.state.loss.update(loss / num_samples, num_samples)
        run.state.top1.update(100 * correct / num_samples, num_samples)
    elif not run.state.loss.weight and (step.last or not step.epoch and step.global_step + 1 == run.num_steps):
        raise run.records.errors.refusal(f"not one sample of epoch {step.epoch} could be used", "train")
    run.records.report.train(epoch=step.epoch, step=step.global_step + 1, loss=run.state.loss, top1=run.state.top1,
                     lr=run.stepper.recipe.lr_at(step), num_images=num_samples, wait_seconds=wait_seconds)
    return stop


def agree(run: Run, batch: Batch, outcome: Outcome) -> tuple[bool, float, float, int]:
    """Add up over the ranks. Raises UserError on all of them for a loss that is not finite or too many bad samples."""
    bad = run.records.errors.add(batch)
    finite = torch.isfinite(torch.tensor(outcome.loss)).item()
    loss = outcome.loss if finite else 0.0
    stop, num_infinite, num_bad, loss, correct, num_samples = run.world.sum(
        [asked_to_stop(run), not finite, bad, loss, outcome.correct, outcome.num_samples])
    run.records.errors.check(int(num_bad))
    if num_infinite:
        names = [f"{shard}/{printable(key)}" for shard, key in zip(batch.shard, batch.key, strict=True)]
        keys = ", ".join(key for keys in run.world.gather([] if finite else names) for key in keys)
        raise SharedError(f"the loss is not finite; epoch {batch.step.epoch}, step {batch.step.step}, samples {keys}; "
                          "the last checkpoint is untouched: lower -lr, set --clip_grad, or look at these samples")
    return stop > 0, loss, correct, int(num_samples)
