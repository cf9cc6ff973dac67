"""Machines with a drive behind the host."""

from dataclasses import replace

from kvsim.machines.hardware import Hardware, Link


def with_drive(
    hardware: Hardware, size: float = 1e14, read: float = 2e9, write: float = 1e9
) -> Hardware:
    """The same with one of that size and these rates. [B] [B/s]"""
    drive = {"disk_read": Link(read), "disk_write": Link(write)}
    return replace(hardware, disk_memory=size, links={**hardware.links, **drive})
