"""What is set once for the device before the model is built, and which flags need which device.

    set_up_device(world, deterministic=True, amp="bf16", sync_bn=False)
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn

from common.distributed import World
from common.errors import UsageError


def set_up_device(world: World, *, deterministic: bool, amp: str, sync_bn: bool) -> None:
    """Check the flags against the device, and choose its algorithms. Every rank calls it, before the model is built.

    Raises UsageError, on every rank alike, for a flag that the device cannot follow.
    """
    if amp == "fp16" and world.device.type != "cuda":
        raise UsageError(f"half precision needs a GPU, this is {world.device}; --amp fp16; "
                         "use --amp bf16, which a CPU computes too, or none")
    if sync_bn and not (world.device.type == "cuda" and dist.is_initialized()):
        group = "in" if dist.is_initialized() else "without"
        raise UsageError(f"ranks on GPUs alone share statistics, this is {world.device} {group} a process group; "
                         "--sync_bn; use torchrun and train_ddp.py on GPUs, or a model without BatchNorm")
    torch.backends.cudnn.benchmark = not deterministic  # tries out algorithms on the first batch
    if deterministic:
        make_deterministic()


def make_deterministic() -> None:
    """Let torch use algorithms only that give the same bits each time; one that has none raises, and names itself.

    A GPU computes up to a tenth slower then. A CPU is deterministic as it is.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA's linear algebra starts
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def with_sync_bn(module: nn.Module, wanted: bool) -> nn.Module:
    """The module, with BatchNorms over the samples of all ranks if `wanted`. Their names stay."""
    return nn.SyncBatchNorm.convert_sync_batchnorm(module) if wanted else module
