"""Memory that ranks share, with shared memory of the host and threads in place of GPUs and processes."""

import ctypes
import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nanovllm.utils.peer_memory import PeerMemory

SIZE, RANKS = 2 << 20, 3
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mmap.restype = ctypes.c_void_p
LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
READ_WRITE, FIXED = mmap.PROT_READ | mmap.PROT_WRITE, 0x10


class Driver:
    """What `PeerMemory` calls, with a file in memory for the memory of a GPU. fails: (call, thread's name) that does"""

    def __init__(self, fails: tuple[str, str] = ("", "")) -> None:
        self.fails, self.mapped = fails, 0

    def __call__(self, name: str, *args: Any) -> None:
        if (name, threading.current_thread().name) == self.fails:
            raise OSError(f"{name}: CUDA error 1")
        getattr(self, name)(*args)

    def cuDeviceGetP2PAttribute(self, value: Any, attribute: int, device: int, peer: int) -> None:
        assert device != peer
        value._obj.value = 1

    def cuMemCreate(self, handle: Any, size: Any, properties: Any, flags: Any) -> None:
        assert len(properties) == 32  # sizeof(CUmemAllocationProp)
        handle._obj.value = os.memfd_create("memory")
        os.ftruncate(handle._obj.value, size.value)

    def cuMemExportToShareableHandle(self, fd: Any, handle: Any, kind: int, flags: Any) -> None:
        fd._obj.value = os.dup(handle.value)

    def cuMemImportFromShareableHandle(self, handle: Any, fd: Any, kind: int) -> None:
        handle._obj.value = os.dup(fd.value)

    def cuMemAddressReserve(self, address: Any, size: Any, *_: Any) -> None:
        address._obj.value = LIBC.mmap(None, size.value, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        self.mapped += 1

    def cuMemMap(self, address: Any, size: Any, offset: Any, handle: Any, flags: Any) -> None:
        LIBC.mmap(address.value, size.value, READ_WRITE, mmap.MAP_SHARED | FIXED, handle.value, 0)

    def cuMemSetAccess(self, address: Any, size: Any, access: Any, count: Any) -> None:
        assert len(access) == 12  # sizeof(CUmemAccessDesc)

    def cuMemRelease(self, handle: Any) -> None:
        os.close(handle.value)

    def cuMemUnmap(self, address: Any, size: Any) -> None:
        pass

    def cuMemAddressFree(self, address: Any, size: Any) -> None:
        LIBC.munmap(ctypes.c_void_p(address.value), ctypes.c_size_t(size.value))
        self.mapped -= 1


def on_all_ranks(folder: Path) -> list[PeerMemory | OSError]:
    barrier, said, results = threading.Barrier(RANKS), [True] * RANKS, [None] * RANKS

    def agree_for(rank: int) -> Callable[[bool], bool]:
        def agree(mine: bool) -> bool:
            said[rank] = mine
            barrier.wait(30)
            all_agree = all(said)
            barrier.wait(30)
            return all_agree

        return agree

    def run(rank: int) -> None:
        try:
            results[rank] = PeerMemory(SIZE, rank, list(range(RANKS)), str(folder), agree_for(rank))  # type: ignore
        except OSError as error:
            results[rank] = error  # type: ignore[call-overload]

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank{rank}") for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results  # type: ignore[return-value]


def num_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def short_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("m")  # the path of a socket has at most 107 bytes


def test_what_one_rank_writes_all_ranks_read_and_nothing_is_left(
    short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, before = Driver(), num_open_files()
    monkeypatch.setattr(PeerMemory, "_call", staticmethod(driver))
    ranks = on_all_ranks(short_folder)
    for writer, memory in enumerate(ranks):
        assert isinstance(memory, PeerMemory)
        for owner in range(RANKS):
            ctypes.memset(memory.addresses[owner] + 100 * writer, 10 * writer + owner + 1, 100)
    for memory in ranks:
        for owner in range(RANKS):
            for writer in range(RANKS):
                data = ctypes.string_at(memory.addresses[owner] + 100 * writer, 100)
                assert data == bytes([10 * writer + owner + 1]) * 100
    assert driver.mapped == RANKS**2
    for memory in ranks:
        memory.free()
    assert driver.mapped == 0 and num_open_files() == before


CALLS = ["cuDeviceGetP2PAttribute", "cuMemCreate", "cuMemExportToShareableHandle", "cuMemImportFromShareableHandle"]


@pytest.mark.parametrize("call", [*CALLS, "cuMemMap", "cuMemSetAccess"])
def test_if_one_rank_cannot_all_say_so_and_nothing_is_left(
    short_folder: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    driver, before = Driver(fails=(call, "rank1")), num_open_files()
    monkeypatch.setattr(PeerMemory, "_call", staticmethod(driver))
    errors = on_all_ranks(short_folder)
    assert call in str(errors[1]) and "another rank" in str(errors[0]) and "another rank" in str(errors[2])
    assert driver.mapped == 0 and num_open_files() == before
