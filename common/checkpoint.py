"""Checkpoints: written whole or not at all, read without executing anything, the same for all three scripts.

    last.pt        the newest            last.prev.pt   the one before: taken where last.pt is damaged
    best.pt        the best validation top-1

    torch.load("runs/…/last.pt", weights_only=True)["model"]     # a plain state_dict
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from common.errors import UserError

PREFIXES = ("module.", "_orig_mod.")
NEEDED = ("model", "optimizer", "progress", "plan")
TEMPORARY = ".saving"


def save(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint. Called by rank 0. Raises UserError, with the older file untouched, where that cannot be done."""
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
        temporary.unlink(missing_ok=True)
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error).splitlines()[0]
        raise UserError(f"the checkpoint cannot be written ({reason}); {path}; the one before is kept: "
                        "make room or mend the permissions, then go on with --resume auto") from None


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def clean(folder: Path) -> None:
    """Remove what a killed save left behind. Called by rank 0 before the first save."""
    for leftover in folder.glob("*" + TEMPORARY):
        leftover.unlink(missing_ok=True)


def load(path: Path) -> dict[str, Any]:
    """Read a checkpoint to the CPU. Tensors and plain containers only: anything else in the file is refused, not run."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UserError(f"no such checkpoint; {path}; --resume takes none, auto or a file") from None
    except pickle.UnpicklingError:
        raise UserError(f"the file holds more than tensors and plain containers, and is not loaded; {path}; "
                        "use a checkpoint of these scripts, or save a state_dict") from None
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, AttributeError, TypeError, IndexError) as error:
        raise UserError(f"the checkpoint is damaged ({str(error).splitlines()[0][:100]}); {path}; take another one") from None
    if not isinstance(state, dict):
        raise UserError(f"not a checkpoint but a {type(state).__name__}; {path}; use a file that these scripts wrote")
    return state


def load_for_resume(path: Path) -> dict[str, Any]:
    """A checkpoint with all that a run needs to go on. Weights alone are refused with what is missing."""
    state = load(path)
    missing = [name for name in NEEDED if name not in state]
    if missing:
        raise UserError(f"a run cannot go on from this file, it has no {', '.join(missing)}; {path}; "
                        "start from weights alone with --weights FILE")
    return state


def newest(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """The newest checkpoint that loads, for `--resume auto`; None where there is none at all.

    A damaged last.pt gives way to the one before, and says so; if nothing loads the run does not start from scratch.
    """
    paths = [path for path in (folder / "last.pt", folder / "last.prev.pt") if path.exists()]
    errors = []
    for path in paths:
        try:
            state = load_for_resume(path)
        except UserError as error:
            errors.append(str(error))
            continue
        for message in errors:
            print(f"warning: {message}", flush=True)
        return path, state
    if errors:
        raise UserError(f"{errors[0]} (and none other in {folder} can be loaded; remove them to start anew)")
    return None


def bare_state(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The module's state_dict without the prefixes of wrappers, on the CPU."""
    return {_bare(name): value.detach().cpu() for name, value in module.state_dict().items()}


def _bare(name: str) -> str:
    for prefix in PREFIXES:
        name = name.replace(prefix, "") if name.startswith(prefix) else name
    return name


def differences(saved: dict[str, Any], current: dict[str, Any], names: tuple[str, ...]) -> Iterator[str]:
    """For each named field that differs: the field and both values."""
    for name in names:
        if name in saved and saved[name] != current.get(name):
            yield f"{name} was {saved[name]!r}, is {current.get(name)!r}"
