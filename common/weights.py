"""Weights for a model: torchvision's own, a state_dict, or a checkpoint of ours.

What a file holds is read as plain tensors and never executed; what does not fit is named; a head for other
classes is replaced, and the notes say so.

    notes = load_weights(module, "resnet18", "runs/pets/best.pt")
"""

from __future__ import annotations

import hashlib
import http.client
import os
import pickle
import re
import tempfile
import urllib.request
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchvision import models

from common import checkpoint
from common.checkpoint import bare_name
from common.errors import UserError

DOWNLOAD_TIMEOUT_SECONDS = 30


def load_weights(module: nn.Module, arch: str, weights: str, new_head: bool = True) -> list[str]:
    """Fill `module` (on the CPU) from `weights`: none, DEFAULT or a file. Notes on what was not taken over.

    A head for another number of classes starts anew; without `new_head` it does not fit.

    Raises UserError for weights that cannot be had, read or fitted. build_model calls it.
    """
    if weights.lower() == "none":
        return []
    file = _default_file(arch) if weights.upper() == "DEFAULT" else Path(weights).expanduser()
    own = module.state_dict()
    state = _read(file, own)
    notes = _drop_auxiliary_heads(own, state, file) + (_keep_own_head(own, state, file) if new_head else [])
    _fit(module, own, state, file)
    return notes


def _default_file(arch: str) -> Path:
    """torchvision's own weights for `arch` in torch.hub's folder, downloaded where they are missing."""
    if arch == "tiny":
        raise UserError("tiny has no weights to download; --weights DEFAULT; use --weights none or a file")
    url = models.get_model_weights(arch).DEFAULT.url
    file = Path(torch.hub.get_dir(), "checkpoints", url.rpartition("/")[2])
    if not file.exists():
        try:
            _download(url, file)
        except (OSError, http.client.HTTPException) as error:
            raise UserError(f"no weights for {arch} ({error}); {url}; save that file as {file}, "
                            "or use --weights none or --weights FILE") from None
    return file


def _download(url: str, file: Path) -> None:
    """Whole or not at all, and checked against the digest in its name. torch.hub's own call has no time limit."""
    file.parent.mkdir(parents=True, exist_ok=True)
    request = urllib.request.Request(url, headers={"User-Agent": "torch.hub"})
    digest = hashlib.sha256()
    with tempfile.NamedTemporaryFile(dir=file.parent, prefix=f".{file.name}.", delete=False) as part:
        try:
            with urllib.request.urlopen(request, timeout=DOWNLOAD_TIMEOUT_SECONDS) as response:
                while block := response.read(1 << 20):
                    digest.update(block)
                    part.write(block)
            expected = re.search(r"-([0-9a-f]{8,})\.", file.name)
            if expected and not digest.hexdigest().startswith(expected[1]):
                raise OSError("the download is damaged")
            part.close()
            os.chmod(part.name, 0o644)
            os.replace(part.name, file)
        except BaseException:
            os.unlink(part.name)
            raise


def _drop_auxiliary_heads(own: dict[str, Tensor], state: dict[str, Tensor], file: Path) -> list[str]:
    """GoogLeNet and Inception come with heads that only help their training, and are not built here."""
    keys = [key for key in state if re.match(r"(AuxLogits|aux1|aux2)\.", key) and key not in own]
    for key in keys:
        del state[key]
    return [f"the auxiliary heads in {file} are left out"] if keys else []


def _keep_own_head(own: dict[str, Tensor], state: dict[str, Tensor], file: Path) -> list[str]:
    """Put our fresh head over the one in `state` where only the number of classes differs."""
    head = list(own)[-1].rpartition(".")[0]  # true of tiny and of every torchvision classifier: the head comes last
    keys = [key for key in own if key.rpartition(".")[0] == head]
    same = all(key in state and state[key].shape[1:] == own[key].shape[1:] for key in keys)
    if not same or all(state[key].shape == own[key].shape for key in keys):
        return []
    num_there, num_here = len(state[keys[0]]), len(own[keys[0]])
    state.update({key: own[key] for key in keys})
    return [f"the head ({head}) starts anew: {num_there} classes in {file}, {num_here} here"]


def _fit(module: nn.Module, own: dict[str, Tensor], state: dict[str, Tensor], file: Path) -> None:
    """Copy `state` into `module`; raise UserError naming what does not fit."""
    faults = [
        f"{key} is {tuple(state[key].shape)} and not {tuple(own[key].shape)}"
        for key in own
        if key in state and state[key].shape != own[key].shape
    ]
    if not faults:
        missing, unexpected = module.load_state_dict(state, strict=False)
        faults += [f"{key} is missing" for key in missing if not key.endswith("num_batches_tracked")]
        faults += [f"{key} is unknown" for key in unexpected]
    if faults:
        more = f" and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise UserError(f"the weights do not fit the model: {', '.join(faults[:3])}{more}; {file}; "
                        "give the --arch and --image_size that they were made with")


def _read(file: Path, own: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state_dict in `file` under today's names. Nothing but tensors and plain containers is loaded."""
    try:
        held = checkpoint.read(file)
    except (FileNotFoundError, IsADirectoryError):
        kind = "a folder and not a file" if os.path.isdir(file) else "no such file"
        raise UserError(f"{kind}; --weights {file}; give a file of weights, DEFAULT or none") from None
    except OSError as error:
        raise UserError(f"cannot be read ({error.strerror or error}); --weights {file}; mend that") from None
    except pickle.UnpicklingError:
        raise UserError("damaged, or more than plain tensors in it, which could run code when loaded; "
                        f"--weights {file}; save it again as torch.save(model.state_dict(), FILE)") from None
    except ValueError as error:
        raise UserError(f"the file is damaged ({error}); --weights {file}; take another copy, or save it again "
                        "as torch.save(model.state_dict(), FILE)") from None
    for key in ("model", "state_dict"):
        if isinstance(held, dict) and isinstance(held.get(key), dict):
            held = held[key]
    if not (isinstance(held, dict) and held and all(isinstance(value, Tensor) for value in held.values())):
        raise UserError(f"holds no state_dict; {file}; save one as torch.save(model.state_dict(), FILE)")
    state: Any = OrderedDict((_bare(key), value) for key, value in held.items())
    # The versions of the layers, by which torch reads older layouts; they travel beside the tensors.
    versions = getattr(held, "_metadata", getattr(own, "_metadata", {}))
    state._metadata = OrderedDict((_bare(f"{key}.")[:-1], value) for key, value in versions.items())
    return state


def _bare(key: str) -> str:
    """The bare name of a weight; DenseNet's old names as they are now."""
    return re.sub(r"(denselayer\d+\.(?:norm|conv))\.(\d)\.", r"\1\2.", bare_name(str(key)))
