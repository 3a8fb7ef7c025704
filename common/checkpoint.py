"""Checkpoints: written whole or not at all, read without executing anything, the same for all three scripts.

    last.pt        the newest            last.prev.pt   the one before: taken where last.pt is damaged,
                                             which is renamed last.damaged.pt
    best.pt        the best validation top-1

    torch.load("runs/…/last.pt", weights_only=True)["model"]     # a plain state_dict
"""

from __future__ import annotations

import dataclasses
import os
import pickle
import re
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from common.errors import UserError
from common.files import check_regular
from common.metrics import AverageMeter
from common.sampling import Progress

NEEDED = {  # by a run to go on, and what each of them is
    "model": dict, "optimizer": dict, "scaler": dict, "progress": dict, "epoch_done": bool, "meters": dict,
    "best_top1": float, "rng": torch.Tensor, "config": dict, "plan": dict,
}
PLACE, METER = {field.name for field in dataclasses.fields(Progress)}, set(AverageMeter().state_dict())
TEMPORARY = ".saving"


def save(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint. Called by rank 0. Raises UserError where that cannot be done; the older file is untouched.

    The run stops then: who goes on without saving finds out after days that there is nothing to go on from.
    """
    temporary = path.with_name(path.name + TEMPORARY)
    try:
        with open(temporary, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        if path.name == "last.pt" and path.exists():
            os.replace(path, path.with_name("last.prev.pt"))
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except (OSError, RuntimeError) as error:
        with suppress(OSError):
            temporary.unlink()
        raise UserError(f"the checkpoint cannot be written ({_reason(error)}); {path}; the one before is kept: "
                        "make room or mend the permissions, then go on with --resume auto") from None


def _reason(error: BaseException) -> str:
    """The system's words, which torch hides behind its own: its zip writer fails again while it cleans up."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__context__
    return str(error).splitlines()[0][:120]


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def clean(folder: Path) -> None:
    """Remove what a killed save left behind. Called by rank 0 before the first save."""
    for leftover in folder.glob("*" + TEMPORARY):
        with suppress(OSError):
            leftover.unlink()


def load(path: Path) -> dict[str, Any]:
    """Read a checkpoint to the CPU. What is no tensor or plain container in the file is refused, not run."""
    if os.path.isdir(path):
        raise UserError(f"a folder and not a checkpoint; {path}; go on with the run in it with --output {path} "
                        "--resume auto, or name the file in it")
    try:
        state = read(path)
    except FileNotFoundError:
        raise UserError(f"no such checkpoint; {path}; --resume takes none, auto or a file") from None
    except OSError as error:
        raise UserError(f"the checkpoint cannot be read ({error.strerror or error}); {path}; "
                        "mend that, or take another one") from None
    except pickle.UnpicklingError:
        raise UserError("the file is damaged or holds more than tensors and plain containers, and is not loaded; "
                        f"{path}; use a checkpoint of these scripts, or save a state_dict") from None
    except ValueError as error:
        raise UserError(f"the checkpoint is damaged ({error}); {path}; take another one") from None
    if not isinstance(state, dict):
        raise UserError(f"not a checkpoint but a {type(state).__name__}; {path}; use a file that these scripts wrote")
    return state


def read(path: Path) -> Any:
    """What torch.save has left in a file, on the CPU. Nothing of it is executed.

    Raises OSError where the file cannot be read, ValueError with the reason where it is damaged, UnpicklingError where
    it may hold code.
    """
    check_regular(path)
    with open(path, "rb") as file:
        begin = file.read(1)
    if not begin:
        raise ValueError("it is empty")
    if begin not in (b"P", b"\x80"):
        raise ValueError("it is no file of torch.save")
    if begin == b"P" and not zipfile.is_zipfile(path):
        raise ValueError("it is cut short")
    try:
        if begin == b"P":  # else of the old format
            _check_sums(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, pickle.UnpicklingError):
        raise
    except Exception as error:  # whatever the readers of zip, pickle and tensors make of bytes that are not theirs
        reason = (str(error).splitlines() or [""])[0].partition(". This is an internal")[0] or type(error).__name__
        raise ValueError(reason) from None


def _check_sums(path: Path) -> None:
    """torch writes checksums and does not look at them. A second per GB."""
    with zipfile.ZipFile(path) as file:
        if not any(info.CRC for info in file.infolist()):
            return  # saved without: torch.serialization.set_crc32_options(False)
        name = file.testzip()
    if name is not None:
        raise ValueError(f"the checksum of {name} is wrong")


def load_for_resume(path: Path) -> dict[str, Any]:
    """A checkpoint with all that a run needs to go on. Weights alone are refused with what is missing."""
    state = load(path)
    missing = [name for name in NEEDED if name not in state]
    if missing:
        raise UserError(f"a run cannot go on from this file, it has no {', '.join(missing)}; {path}; "
                        "start from weights alone with --weights FILE")
    if fault := _fault(state):
        raise UserError(f"a run cannot go on from this file, {fault}; {path}; "
                        "take another one, or start from its weights alone with --weights FILE")
    return state


def _fault(state: dict[str, Any]) -> str:
    """What no run has left in a checkpoint that has all its fields; "" where nothing is wrong."""
    for name, kind in NEEDED.items():
        if not isinstance(state[name], kind):
            return f"its {name} is a {type(state[name]).__name__} and not a {kind.__name__}"
    progress, plan, meters = state["progress"], state["plan"], state["meters"]
    if set(progress) != PLACE or not all(type(value) is int and value >= 0 for value in progress.values()):
        return f"its progress is {str(progress)[:120]}"
    for name in ("config", "plan"):
        for key, value in state[name].items():
            if isinstance(value, torch.Tensor):  # compared with what is no tensor
                return f"the {key} of its {name} is a Tensor"
    for name in ("seed", "epoch_samples"):
        if type(plan.get(name)) is not int:
            return f"the {name} of its plan is {str(plan.get(name))[:120]}"
    if progress["position"] > plan["epoch_samples"]:
        return f"its progress is at position {progress['position']} of an epoch of {plan['epoch_samples']} samples"
    for name in ("loss", "top1"):
        meter = meters.get(name)
        if not isinstance(meter, dict) or not all(isinstance(meter.get(key), float) for key in METER):
            return f"the {name} of its meters is {str(meter)[:120]}"
    return ""


def newest(folder: Path, set_aside: bool = False) -> tuple[Path, dict[str, Any]] | None:
    """The newest checkpoint that loads, for `--resume auto`; None where there is none at all.

    A damaged last.pt gives way to the one before, and says so; if nothing loads the run does not start from scratch.
    `set_aside` renames the damaged one, for who goes on with the run: it must not become the one before.
    """
    paths = [path for path in (folder / "last.pt", folder / "last.prev.pt") if path.exists()]
    errors = []
    for path in paths:
        try:
            state = load_for_resume(path)
        except UserError as error:
            errors.append(str(error))
            continue
        if errors:
            print(f"warning: {errors[0]} (going on from {path.name}, the one before)", flush=True)
            if set_aside and paths[0].exists():
                os.replace(paths[0], paths[0].with_name("last.damaged.pt"))
        return path, state
    if errors:
        best = f"go on from {folder / 'best.pt'} with --resume FILE, or " if (folder / "best.pt").exists() else ""
        raise UserError(f"no checkpoint can be loaded: {'; '.join(errors)} ({best}remove them to start anew)")
    return None


def check_finite(module: torch.nn.Module) -> None:
    """Raise UserError for weights that are infinite or no numbers: they would replace the last ones of use."""
    for name, value in module.named_parameters():
        if not torch.isfinite(value).all():
            raise UserError(f"the weights are not finite ({name}); nothing is saved; the last checkpoint is untouched: "
                            "lower -lr or set --clip_grad, then go on with --resume auto")


def on_cpu(value: Any) -> Any:
    """The same containers with their tensors on the CPU, so that a machine without the device loads them too."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {key: on_cpu(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(on_cpu(item) for item in value)
    return value


def bare_state(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The module's state_dict without the prefixes of wrappers, on the CPU."""
    return {bare_name(name): value.detach().cpu() for name, value in module.state_dict().items()}


def bare_name(name: str) -> str:
    """A weight's name without the prefixes of wrappers (DataParallel, DDP, compile), however they are nested."""
    return re.sub(r"^(module\.|_orig_mod\.)+", "", name)
