"""Checkpoints: written whole or not at all, read without executing anything, the same for all three scripts.

    last.pt        the newest            last.prev.pt   the one before: taken where last.pt is damaged,
                                             which is renamed last.damaged.pt
    best.pt        the best validation top-1

    torch.load("runs/…/last.pt", weights_only=True)["model"]     # a plain state_dict
"""

from __future__ import annotations

import os
import pickle
import re
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from common.errors import UserError

NEEDED = ("model", "optimizer", "scaler", "progress", "epoch_done", "meters", "best_top1", "rng", "config", "plan")
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
    try:
        if zipfile.is_zipfile(path):  # else of an old format, or not for us: torch tells
            _check_sums(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UserError(f"no such checkpoint; {path}; --resume takes none, auto or a file") from None
    except pickle.UnpicklingError:
        raise UserError("the file is damaged or holds more than tensors and plain containers, and is not loaded; "
                        f"{path}; use a checkpoint of these scripts, or save a state_dict") from None
    except Exception as error:  # whatever the readers of zip, pickle and tensors make of bytes that are not theirs
        reason = (str(error).splitlines() or [""])[0].partition(". This is an internal")[0] or type(error).__name__
        raise UserError(f"the checkpoint is damaged ({reason}); {path}; take another one") from None
    if not isinstance(state, dict):
        raise UserError(f"not a checkpoint but a {type(state).__name__}; {path}; use a file that these scripts wrote")
    return state


def _check_sums(path: Path) -> None:
    """torch writes checksums and does not look at them. A second per GB."""
    with zipfile.ZipFile(path) as file:
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
    return state


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
