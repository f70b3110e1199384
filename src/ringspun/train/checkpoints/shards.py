"""Tensors of a model and its optimizer, whole or cut over ranks, in and out of safetensors.

PyTorch's distributed checkpoint (DCP) plans who writes which piece and who reads what of which; each rank writes one
file. DCP's own files are pickles, so these are those of its safetensors writer: where a piece belongs stands in the
file's header, as JSON. (What DCP's ranks send each other while they plan are pickles still.)

    model/<name>                  weights and buffers; of those that are tied, the first name
    optimizer/<name>/<key>        its state of one parameter
    number/<name>/<key>           the same where that is one number, without dimensions: stored as [1]; behind <key>
                                  stands of what type it was, where it was no tensor: "step:int"
    rng/<rank>                    PyTorch's generator on the CPU
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from ringspun.errors import CheckpointError


def is_cut(model: nn.Module) -> bool:
    """Whether the model's parameters are cut over ranks."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def placed(whole: Tensor, like: Tensor) -> Tensor:
    """`whole` cut as `like` is, without a message; as it came where `like` is not cut, or is of another shape."""
    if not isinstance(like, DTensor) or whole.shape != like.shape:
        return whole
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def gathered(tensor: Tensor) -> Tensor:
    """The whole of a tensor. Collective where it is cut."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole_model(model: nn.Module, *, keep: bool = True) -> dict[str, Tensor]:
    """The state dict with every tensor whole, tied ones still one. Collective where tensors are cut.

    Args:
        keep: False: help to gather, and return nothing.
    """
    once: dict[int, Tensor] = {}
    found = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in once:
            whole = gathered(tensor.detach())
            once[id(tensor)] = whole if keep else torch.empty(0)
        found[name] = once[id(tensor)]
    return found if keep else {}


def whole_optimizer(model: nn.Module, optimizer: Optimizer, *, keep: bool = True) -> dict[str, Tensor]:
    """The optimizer's tensors, whole, by parameter name and key. Collective where tensors are cut.

    Args:
        keep: as for `whole_model`.
    """
    found = {}
    for name, key, value in _of_optimizer(model, optimizer):
        whole = gathered(value)
        if keep:
            found[f"{name}/{key}"] = whole.contiguous()
    return found


@dataclass(frozen=True)
class Whole:
    """The tensors of a checkpoint, none of them cut over ranks.

    Args:
        model: its state dict; None: as the model holds it. optimizer: by parameter name and key.
    """

    model: dict[str, Tensor] | None
    optimizer: dict[str, Tensor]

    @classmethod
    def of(cls, model: nn.Module, optimizer: Optimizer, *, keep: bool = True) -> Self:
        """Of a model and its optimizer. Collective where they are cut over ranks.

        Args:
            keep: False: only help to gather; what is returned is empty.
        """
        weights = whole_model(model, keep=keep) if is_cut(model) else None
        return cls(weights, whole_optimizer(model, optimizer, keep=keep))


def write_shards(folder: Path, model: nn.Module, optimizer: Optimizer) -> None:
    """Writes every rank's pieces into `folder`, which all ranks see. Collective.

    Raises:
        CheckpointError: on every rank, with the reason of the first that could not.
    """
    tensors: dict[str, Tensor] = {f"model/{name}": tensor for name, tensor in _of_model(model).items()}
    tensors |= _named(model, optimizer)
    tensors[f"rng/{world_rank()}"] = torch.get_rng_state()
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        save(tensors, storage_writer=writer, no_dist=not dist.is_initialized())
    except CheckpointException as problem:
        raise CheckpointError(f"shards in {folder} must be written by every rank; {_first(problem)}") from None


def read_shards(folder: Path, model: nn.Module, optimizer: Optimizer | None = None) -> None:
    """Reads what `write_shards` wrote, on whatever ranks, into a model (and optimizer) held by these. Collective.

    Args:
        optimizer: None: leave optimizer and generator alone.
    Raises:
        CheckpointError: the files cannot be read, or are of another model.
    """
    from safetensors import SafetensorError

    try:
        reader = HuggingFaceStorageReader(str(folder))
        stored: Any = reader.read_metadata().state_dict_metadata
        targets: dict[str, Tensor] = {f"model/{name}": tensor for name, tensor in _of_model(model).items()}
        _check_fits(folder, targets, stored)
        generator = torch.empty(0, dtype=torch.uint8)
        if optimizer is not None:
            _restart(model, optimizer, stored)
            targets |= _named(model, optimizer)
            saved = sum(name.startswith("rng/") for name in stored)
            name = f"rng/{world_rank() % saved}"
            targets[name] = generator = torch.empty(stored[name].size, dtype=torch.uint8)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # one process is meant
            load(targets, storage_reader=reader, no_dist=not dist.is_initialized())
    except (CheckpointException, SafetensorError, OSError, KeyError, ValueError, ZeroDivisionError) as problem:
        reason = _first(problem) if isinstance(problem, CheckpointException) else problem
        raise CheckpointError(f"shards in {folder} must be readable; {reason}") from None
    if optimizer is not None:
        _take_numbers(model, optimizer, targets)
        torch.set_rng_state(generator)


def _take_numbers(model: nn.Module, optimizer: Optimizer, targets: dict[str, Tensor]) -> None:
    """Of what was read, the Python numbers: they share no memory with the optimizer's state."""
    parameters = dict(model.named_parameters())
    for full_name, tensor in targets.items():
        what, _, place = full_name.partition("/")
        if what == "number":
            name, stored = place.rsplit("/", 1)
            key, value = entry_of(stored, tensor)
            if key != stored:
                optimizer.state[parameters[name]][key] = value


def cast_as_stored(folder: Path, model: nn.Module) -> None:
    """Gives each weight and buffer the dtype that it has in `folder`, whatever the model's config says.

    Raises:
        CheckpointError: the files cannot be read.
    """
    from safetensors import SafetensorError

    try:
        stored: Any = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    except (SafetensorError, OSError, KeyError, ValueError) as problem:
        raise CheckpointError(f"shards in {folder} must be readable; {problem}") from None
    for name, tensor in model.state_dict(keep_vars=True).items():
        if f"model/{name}" in stored:
            tensor.data = tensor.data.to(stored[f"model/{name}"].properties.dtype)


def _of_model(model: nn.Module) -> dict[str, Tensor]:
    """Each weight and persistent buffer once."""
    names: dict[int, str] = {}
    state = model.state_dict(keep_vars=True)
    for name, tensor in state.items():
        names.setdefault(id(tensor), name)
    return {name: state[name].detach() for name in names.values()}


def _of_optimizer(model: nn.Module, optimizer: Optimizer) -> list[tuple[str, str, Tensor]]:
    """Parameter name, key and tensor of all of an optimizer's state, in the model's order, the same on every rank."""
    return [
        (name, *_stored(name, key, value))
        for name, parameter in model.named_parameters()
        for key, value in sorted(optimizer.state.get(parameter, {}).items())
    ]


_NUMBERS: dict[str, type[int | float]] = {kind.__name__: kind for kind in (bool, int, float)}


def _stored(name: str, key: str, value: Any) -> tuple[str, Tensor]:
    """Key and tensor that one entry of an optimizer's state is stored as."""
    if isinstance(value, Tensor):
        return key, value
    if type(value) in _NUMBERS.values():
        return f"{key}:{type(value).__name__}", torch.tensor(
            value, dtype=torch.float64 if type(value) is float else None
        )
    raise CheckpointError(
        f"optimizer must have a state of tensors and numbers to be saved; got {type(value).__name__} for {key!r} of "
        f"{name}. Leave it out, or make it a tensor."
    )


def entry_of(key: str, tensor: Tensor) -> tuple[str, Any]:
    """The entry of an optimizer's state that is stored as this key and tensor: a Python number is one again, for with a
    tensor PyTorch computes in another precision."""
    name, _, kind = key.partition(":")
    return (name, _NUMBERS[kind](tensor.item())) if kind in _NUMBERS else (key, tensor)


def _named(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """An optimizer's tensors as they are stored; they share memory with its state."""
    return {
        f"optimizer/{name}/{key}" if value.ndim else f"number/{name}/{key}": value if value.ndim else value.reshape(1)
        for name, key, value in _of_optimizer(model, optimizer)
    }


def _restart(model: nn.Module, optimizer: Optimizer, stored: dict[str, TensorStorageMetadata]) -> None:
    """Gives an optimizer empty state of the kind that is stored, cut as the parameters are."""
    parameters = dict(model.named_parameters())
    optimizer.state.clear()
    for full_name, kind in stored.items():
        what, _, place = full_name.partition("/")
        if what not in ("optimizer", "number"):
            continue
        name, key = place.rsplit("/", 1)
        parameter, dtype = parameters[name], kind.properties.dtype
        if what == "number":
            key, zero = entry_of(key, torch.zeros((), dtype=dtype))
            optimizer.state[parameter][key] = zero
        elif kind.size == parameter.shape:
            optimizer.state[parameter][key] = torch.zeros_like(parameter.detach(), dtype=dtype)
        else:
            optimizer.state[parameter][key] = torch.zeros(kind.size, dtype=dtype)


def _check_fits(folder: Path, mine: dict[str, Tensor], stored: dict[str, TensorStorageMetadata]) -> None:
    theirs = {name: (tuple(k.size), k.properties.dtype) for name, k in stored.items() if name.startswith("model/")}
    ours = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in mine.items()}
    odd = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    if odd:
        raise CheckpointError(
            f"shards in {folder} must fit the model; {odd[0].removeprefix('model/')} is {theirs.get(odd[0], 'absent')} "
            f"there and {ours.get(odd[0], 'absent')} here ({len(odd)} differ)."
        )


def world_rank() -> int:
    """This process's in the job."""
    return dist.get_rank() if dist.is_initialized() else 0


def _first(problem: CheckpointException) -> str:
    rank, (reason, _) = min(problem.failures.items())
    return f"rank {rank}: {reason}"
