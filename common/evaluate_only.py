"""`--evaluate`: a trained model on the validation set, its numbers and, on request, each image's prediction.

    python train_single.py --evaluate --val_path shards/val --resume runs/…/best.pt --predictions predictions.jsonl

It asks for no training shards, and makes or changes no folder of a run.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

from torch import nn

from common import checkpoint
from common.distributed import World
from common.errors import UserError
from common.evaluation import Validation, evaluate
from common.predictions import Predictions, skipped_path
from common.running.error_log import ErrorLog
from common.step import Recipe
from common.stop import StopSignals


def trained_weights(world: World, validation: Validation, resume: str, output: str | None,
                    weights: str) -> tuple[str, Validation]:
    """Where the model comes from: the checkpoint of `--resume` (auto: the newest in `--output`), else `--weights`.

    The validation set comes back with the classes of that model, where the file tells them. Raises SharedError where a
    label means something else to it.
    """
    def find() -> tuple[str, Any]:
        if resume == "auto":
            newest = checkpoint.newest(Path(output or ""))
            if newest is None:
                raise UserError(f"no checkpoint; --output {output}; name the folder of a run, or a file with --resume")
            return str(newest[0]), newest[1].get("plan")
        if resume != "none":
            return resume, checkpoint.load(Path(resume)).get("plan")
        file = Path(weights).expanduser()
        return weights, checkpoint.load(file).get("plan") if file.is_file() else None

    file, plan = world.on_main(find)
    if isinstance(plan, dict) and isinstance(plan.get("num_classes"), int):
        validation = validation.matched(plan["num_classes"], plan.get("classes"))
    return file, validation


def evaluate_only(module: nn.Module, data: Validation, recipe: Recipe, world: World, stop: StopSignals,
                  file: str | None, max_errors: int) -> None:
    """One validation: its numbers on stdout, and the predictions in `file`. Every rank calls it.

    What `--on_error skip` leaves out counts as in training, and is listed beside `file` in STEM.errors.jsonl. After a
    stop signal no numbers are printed, and there is neither file.
    """
    module.to(world.device).to(memory_format=recipe.memory_format)
    listed = skipped_path(file) if file else None
    errors = ErrorLog(listed, world, max_errors)
    with Predictions(file, world) if file else nullcontext() as predictions:
        try:
            result = evaluate(module, data, recipe, world, lambda: stop.requested, errors, predictions)
        except UserError as error:
            raise world.own_error(error) from None
        if predictions is not None and result is not None:
            predictions.finish()
    skipped = errors.skipped()
    if world.is_main and result is None:
        print("stopped: nothing was evaluated", flush=True)
        if listed is not None:
            listed.unlink(missing_ok=True)
    if world.is_main and result is not None:
        numbers = {name: value for name, value in result.items() if isinstance(value, float)}
        words = ", ".join(f"{name} {value!r}{' %' * (name != 'loss')}" for name, value in numbers.items())
        print(f"validation {words}, {result['samples']} samples{f'; predictions: {file}' if file else ''}", flush=True)
        if skipped:
            print(f"skipped {skipped}; {listed or 'python -m common.check_shards finds them all'}", flush=True)
