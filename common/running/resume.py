"""Going on from a checkpoint: what must be as it was, what may differ and is said, and taking it all over.

    for note in take_over(saved, config, module, optimizer, scaler):
        print(note)                                 # "resumed with other flags: lr was 0.1, is 0.01"
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from common.errors import UserError

SAME = ("arch", "optimizer")  # of the config; the plan has its own
SAID = ("lr", "betas", "momentum", "weight_decay", "label_smoothing", "schedule", "warmup_epochs", "accum", "clip_grad",
        "amp", "n_epochs", "augment", "image_size", "batch_size")


def take_over(saved: Mapping[str, Any], config: Mapping[str, Any], module: torch.nn.Module,
              optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> Iterator[str]:
    """Put a checkpoint into what was built from `config`, which holds wherever both have a say. Yields notes.

    Every rank calls it. Raises UserError where the checkpoint is of another model or optimiser.
    """
    before = saved["config"]
    for name in SAME:
        if name in before and before[name] != config[name]:
            raise UserError(f"the run to be continued had {name} {before[name]}, this one has {config[name]}; "
                            f"--{name}, --resume; give the old value, or start another run with --weights FILE")
    options = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    try:
        module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        _lay_out(optimizer)
        if saved["scaler"]:  # empty where there was nothing to scale
            scaler.load_state_dict(saved["scaler"])
        torch.set_rng_state(saved["rng"])
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"the checkpoint is of another model or optimiser ({reason}); --resume; "
                        "give the old --arch and --optimizer, or start another run with --weights FILE") from None
    for group, values in zip(optimizer.param_groups, options, strict=True):
        group.update(values)
    changed = [f"{name} was {_shown(before[name])}, is {_shown(config[name])}" for name in SAID
               if name in before and _shown(before[name]) != _shown(config[name])]
    if changed:
        yield f"resumed with other flags: {'; '.join(changed)}"


def _lay_out(optimizer: torch.optim.Optimizer) -> None:
    """Give the state of each weight the weight's own strides, which --channels_last changes: fused kernels read memory
    as it lies. Raises ValueError for another shape, beyond which they would read. What has no dimension counts steps.
    """
    for weight, values in optimizer.state.items():
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and value.dim():
                if value.shape != weight.shape:
                    raise ValueError(
                        f"{name} of the optimiser is {tuple(value.shape)} for weights {tuple(weight.shape)}")
                values[name] = torch.empty_like(weight, dtype=value.dtype).copy_(value)


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
