"""Peer memory: device memory of each rank that kernels of all ranks of one host read and write directly.

By CUDA's virtual memory management, without anything that the groups of a process share: a rank allocates, hands the
others a file descriptor through a socket, and maps what they hand it. It must not know what the memory is for.
Invariant: a constructor ends the same way on all ranks, and then either all have mapped everything or nothing is left.
"""

import array
import ctypes
import os
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p
from typing import Any

import torch

SECONDS = 60.0  # to wait for another rank
# of cuda.h
_PINNED, _FILE_DESCRIPTOR, _DEVICE, _READ_WRITE, _NATIVE_ATOMICS = 1, 1, 1, 3, 3


class PeerMemory:
    """`size` bytes of each rank; `OSError` on all ranks if that cannot be had on one of them.

    size: a multiple of 2 MiB. devices: of each rank, its GPU. folder: one that all ranks have for themselves.
    agree: a collective, whether all ranks call it with `True`.
    addresses: of each rank, where its memory is for this process.
    """

    def __init__(self, size: int, rank: int, devices: list[int], folder: str, agree: Callable[[bool], bool]) -> None:
        self.size, self.rank, self.devices, self.folder = size, rank, devices, folder
        self.addresses, self.fd = [0] * len(devices), -1
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as mailbox:
            for step in (self._allocate, self._exchange):
                error = None
                try:
                    step(mailbox)
                except Exception as e:
                    error = e
                if not agree(error is None):
                    self.free()
                    raise OSError(f"no memory that all ranks can use: {error or 'another rank has none'}")

    def tensor(self) -> torch.Tensor:
        """Our own part, uint8 [size], of any content; it does not keep the memory."""
        interface = {"shape": (self.size,), "typestr": "|u1", "data": (self.addresses[self.rank], False), "version": 3}
        array_like = type("", (), {"__cuda_array_interface__": interface})()
        return torch.as_tensor(array_like, device=torch.device("cuda", self.devices[self.rank]))

    def free(self) -> None:
        """To be called when no kernel of this process uses the memory any more."""
        for address in filter(None, self.addresses):
            for name in ("cuMemUnmap", "cuMemAddressFree"):
                with suppress(OSError):  # reserved, but nothing mapped there
                    self._call(name, c_uint64(address), c_size_t(self.size))
        self.addresses = [0] * len(self.devices)
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _allocate(self, mailbox: socket.socket) -> None:
        device, atomics = self.devices[self.rank], c_int()
        for peer in self.devices[: self.rank] + self.devices[self.rank + 1 :]:
            self._call("cuDeviceGetP2PAttribute", byref(atomics), _NATIVE_ATOMICS, device, peer)
            if not atomics.value:
                raise OSError(f"no NVLink between GPUs {device} and {peer}")
        handle = c_uint64()
        # CUmemAllocationProp: type, type of handles, location, what Windows needs, flags
        properties = struct.pack("4iPQ", _PINNED, _FILE_DESCRIPTOR, _DEVICE, device, 0, 0)
        self._call("cuMemCreate", byref(handle), c_size_t(self.size), properties, c_uint64())
        self._map(self.rank, handle)
        mailbox.bind(f"{self.folder}/memory-{self.rank}")
        mailbox.settimeout(SECONDS)

    def _exchange(self, mailbox: socket.socket) -> None:
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [self.fd]))
        for peer in range(len(self.devices)):
            if peer != self.rank:
                mailbox.sendmsg([bytes([self.rank])], [rights], 0, f"{self.folder}/memory-{peer}")
        for _ in self.devices[1:]:
            sender, (fd,), *_ = socket.recv_fds(mailbox, 1, 1)
            handle = c_uint64()
            try:
                self._call("cuMemImportFromShareableHandle", byref(handle), c_void_p(fd), _FILE_DESCRIPTOR)
            finally:
                os.close(fd)
            self._map(sender[0], handle)

    def _map(self, rank: int, handle: c_uint64) -> None:
        """Map the memory of `rank`, which keeps it, and set `fd` if it is ours."""
        address, size, fd = c_uint64(), c_size_t(self.size), c_int()
        access = struct.pack("3i", _DEVICE, self.devices[self.rank], _READ_WRITE)  # CUmemAccessDesc: location, flags
        try:
            if rank == self.rank:
                self._call("cuMemExportToShareableHandle", byref(fd), handle, _FILE_DESCRIPTOR, c_uint64())
                self.fd = fd.value
            self._call("cuMemAddressReserve", byref(address), size, c_size_t(), c_uint64(), c_uint64())
            self.addresses[rank] = address.value
            self._call("cuMemMap", address, size, c_size_t(), handle, c_uint64())
            self._call("cuMemSetAccess", address, size, access, c_size_t(1))
        finally:
            self._call("cuMemRelease", handle)

    @staticmethod
    def _call(name: str, *args: Any) -> None:
        if code := getattr(ctypes.CDLL("libcuda.so.1"), name)(*args):
            raise OSError(f"{name}: CUDA error {code}")
