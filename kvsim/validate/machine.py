"""Devices and free memory for real runs."""

import re

import torch

from kvsim.errors import InputError
from kvsim.validate.processor import available_memory


def find_device(name: str) -> torch.device:
    """Find a device by its name, and make it the current one.

    Parameters
    ----------
    name
        ``cpu``, ``cuda`` or ``cuda:N``.

    Raises
    ------
    InputError
        If there is no such device.
    """
    if name == "cpu":
        return torch.device("cpu")
    place = re.fullmatch(r"cuda(?::([0-9]{1,3}))?", name)
    if not place:
        raise InputError(f"--device: got {name[:40]!r}; expected cpu, cuda or cuda:N")
    count = torch.cuda.device_count()
    if int(place[1] or 0) >= count:
        there = f"{count} GPUs" if count else "no GPU"
        raise InputError(f"--device: {name} is not there, PyTorch sees {there}; try --device cpu")
    torch.cuda.set_device(int(place[1] or 0))  # kernels and streams are made on the current one
    torch.backends.cuda.enable_cudnn_sdp(False)  # it would plan anew for every length of a cache
    return torch.device("cuda", int(place[1] or 0))


def refusals(*more: type[Exception]) -> tuple[type[Exception], ...]:
    """Return the exceptions that mean that something cannot run, such as out of memory.

    Triton's errors, such as a kernel that needs more shared memory than the card has, are not
    RuntimeErrors.
    """
    from kvsim.validate.kernels.language import TritonError

    return RuntimeError, TritonError, *more


def free_memory(device: torch.device) -> int:
    """Measure the memory that can be had now. [B]

    Parameters
    ----------
    device
        A GPU, or the CPU for the host's memory.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return available_memory()


def check_memory(device: torch.device, needed: float) -> None:
    """Check that enough memory is free.

    Raises
    ------
    InputError
        If less is free.
    """
    free = free_memory(device)
    if needed > free:
        raise InputError(
            f"--model: about {needed / 2**30:.1f} GiB are needed on {device}, "
            f"{free / 2**30:.1f} GiB are free; choose a smaller model, --layers or --batch"
        )
