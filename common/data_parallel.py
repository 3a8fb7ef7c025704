"""Replicas of a model in one process: nn.DataParallel on GPUs, and the same thing on the CPU.

The CPU version cuts, copies and joins as nn.DataParallel does, so that train_dp.py can be read, traced and tested
on a laptop. It makes nothing faster; it makes everything visible.

    model = data_parallel(module, [torch.device("cpu")] * 3)     # a batch of 14 -> 5, 5, 4
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from common.errors import UserError

_thread = threading.local()


def current_replica() -> int:
    """The number of the replica whose forward runs on this thread; 0 outside. The trace asks from inside the model."""
    return getattr(_thread, "replica", 0)


def chunk_sizes(num_rows: int, num_parts: int) -> list[int]:
    """Rows of each part as `torch.chunk` cuts them, and so every scatter: all but the last equal, maybe fewer parts."""
    if num_rows == 0:
        return [0] * num_parts
    size = -(-num_rows // num_parts)
    return [min(size, num_rows - start) for start in range(0, num_rows, size)]


def padded_size(num_rows: int, num_parts: int) -> int:
    """The fewest rows, from `num_rows` up, that give each part two or more: BatchNorm refuses to train on one."""
    while min(chunk_sizes(num_rows, num_parts)) < 2:
        num_rows += 1
    return num_rows


def data_parallel(module: nn.Module, devices: list[torch.device]) -> nn.Module:
    """One replica of `module` (which is on devices[0]) per device; on the CPU the length of `devices` counts them."""
    if any("_orig_mod" in part._modules or part._compiled_call_impl is not None for part in module.modules()):
        raise UserError("replicas cannot share one compiled model; --compile; leave it out, or use train_ddp.py")
    kinds = {device.type for device in devices}
    if kinds == {"cpu"}:
        return DataParallel(module, len(devices))
    if kinds != {"cuda"} or len(set(devices)) != len(devices):
        raise UserError(f"each GPU once, or the CPU alone; --gpu {' '.join(map(str, devices))}; correct the list")
    return _NumberedDataParallel(module, device_ids=list(devices))


class _Modes(NamedTuple):
    """What a thread does not inherit from the one that starts it."""

    inference: bool
    grad: bool
    amp: tuple[str, torch.dtype, bool, bool]

    @classmethod
    def of_this_thread(cls, device_type: str) -> _Modes:
        amp = torch.get_autocast_dtype(device_type), torch.is_autocast_enabled(device_type)
        return cls(torch.is_inference_mode_enabled(), torch.is_grad_enabled(),
                   (device_type, *amp, torch.is_autocast_cache_enabled()))

    @contextmanager
    def as_replica(self, number: int) -> Iterator[None]:
        """These modes, and this replica's number, on the current thread."""
        _thread.replica = number
        try:
            with torch.inference_mode(self.inference), torch.set_grad_enabled(self.grad), torch.autocast(*self.amp):
                yield
        finally:
            _thread.replica = 0  # a lone replica runs on the caller's thread


class _NumberedDataParallel(nn.DataParallel[Any]):
    """nn.DataParallel whose replicas know their number, and the precision: it alone would take float16 for bf16."""

    def parallel_apply(self, replicas: Sequence[Any], inputs: Any, kwargs: Any) -> list[Any]:
        modes = _Modes.of_this_thread("cuda")

        def numbered(number: int, replica: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                with modes.as_replica(number):
                    return replica(*args, **kwargs)

            return run

        return super().parallel_apply([numbered(i, replica) for i, replica in enumerate(replicas)], inputs, kwargs)


class DataParallel(nn.Module):
    """`module` on `num_replicas` threads of the CPU.

    Tensors among the arguments, nested ones too, are cut along dim 0 by `torch.chunk`; everything else is handed to
    each replica as it is. Parameters are shared, so gradients add up in `module` itself. Replica 0 works on the
    buffers of `module`, the others on copies that are thrown away: running statistics come from replica 0 alone.

    The replicas run one after the other, each on its own thread. Side by side they would race for torch's one
    generator, and dropout would differ from run to run; and there is no time to win, as the operators already use
    all cores. The backward pass runs on the caller's thread, in an order that the graph fixes. So equal seeds give
    equal weights, bit for bit.
    """

    def __init__(self, module: nn.Module, num_replicas: int) -> None:
        super().__init__()
        if num_replicas < 1:
            raise UserError(f"at least one replica; --gpu {num_replicas}; name one id per replica")
        self.module = module
        self.num_replicas = num_replicas

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        parts = _scatter((args, kwargs), self.num_replicas)
        if len(parts) == 1:
            return self.module(*args, **kwargs)
        replicas = [_replicate(self.module, copy_buffers=number > 0) for number in range(len(parts))]
        outputs = [_run_on_thread(number, replicas[number], *parts[number]) for number in range(len(parts))]
        return tree_map(_join, *outputs)


def _scatter(inputs: Any, num_parts: int) -> list[Any]:
    """`inputs` once per part, each with its rows; one part where there is no tensor to cut."""
    leaves, structure = tree_flatten(inputs)
    cut = [leaf.chunk(num_parts) if isinstance(leaf, Tensor) else None for leaf in leaves]
    lengths = {len(chunks) for chunks in cut if chunks is not None}
    if len(lengths) > 1:
        rows = sorted({len(leaf) for leaf in leaves if isinstance(leaf, Tensor)})
        raise ValueError(f"tensors of {rows} rows cannot be cut alike for {num_parts} replicas")
    num_used = max(lengths, default=1)
    columns = [[leaf] * num_used if chunks is None else chunks for leaf, chunks in zip(leaves, cut, strict=True)]
    return [tree_unflatten([column[part] for column in columns], structure) for part in range(num_used)]


def _replicate(module: nn.Module, copy_buffers: bool) -> nn.Module:
    """A second module over the same parameters, with the same buffers or copies of them."""
    copies: dict[nn.Module, nn.Module] = {}  # by original: what is used in two places stays one thing
    buffers: dict[Tensor, Tensor] = {}
    for original in module.modules():
        copies[original] = replica = original._replicate_for_data_parallel()
        replica._parameters = original._parameters.copy()
        for name, buffer in original._buffers.items():
            if copy_buffers and buffer is not None:
                if buffer not in buffers:
                    buffers[buffer] = buffer.detach().clone()
                replica._buffers[name] = buffers[buffer]
    for replica in copies.values():
        for name, child in replica._modules.items():
            replica._modules[name] = None if child is None else copies[child]
    return copies[module]


def _run_on_thread(number: int, replica: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """replica(*args, **kwargs) on a new thread, in the caller's modes; what it raises is raised here."""
    modes = _Modes.of_this_thread("cpu")
    outputs: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            with modes.as_replica(number):
                outputs.append(replica(*args, **kwargs))
        except BaseException as error:  # left alone, a thread would print it and end
            errors.append(error)

    thread = threading.Thread(target=run, name=f"replica-{number}")
    thread.start()
    thread.join()
    if errors and not isinstance(errors[0], Exception):  # SystemExit and the like: not an error of the model
        raise errors[0]
    if errors:
        raise _numbered(errors[0], number) from errors[0]
    return outputs[0]


def _numbered(error: BaseException, number: int) -> BaseException:
    """An error of the same kind with the replica in its text, or a RuntimeError where that kind takes no text."""
    message = f"{error} (in replica {number})"
    try:
        return type(error)(message)
    except TypeError:
        return RuntimeError(f"{type(error).__name__}: {message}")


def _join(*outputs: Any) -> Any:
    """One output of all replicas: rows put together, scalars made rows as nn.DataParallel does, None stays."""
    if isinstance(outputs[0], Tensor):
        return torch.cat([output.reshape(1) if output.ndim == 0 else output for output in outputs])
    if all(output is None for output in outputs):
        return None
    raise TypeError(f"replicas return tensors, or tuples and dicts of them, not {type(outputs[0]).__name__}")
