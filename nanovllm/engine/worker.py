"""The processes of a tensor-parallel engine and the channel to them.

Rank 0 runs in the process of the engine and drives; every other rank runs in a spawned process with a `ModelRunner`
of its own, which calls the methods that rank 0 names, with pickled arguments from a pipe. Nothing comes back, but
the report of an error. The end of the pipe ends the process.

It must not know what the methods do. Invariant: all ranks run the same collectives in the same order. After an error
that no longer holds, so it ends all processes of the engine, and the caller gets the error that came first.
"""

import atexit
import multiprocessing
import os
import pickle
import shutil
import signal
import socket
import threading
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection, wait
from tempfile import mkdtemp
from time import monotonic
from typing import Any
from weakref import finalize

import torch

from nanovllm.config import Config
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.results import PendingIds, Pieces
from nanovllm.engine.scheduler import Batch
from nanovllm.errors import EngineError
from nanovllm.utils.device import pick_device
from nanovllm.utils.parallel import Parallel

# How long the processes may take to end by themselves.
EXIT_SECONDS = 5.0
# After an error of rank 0, how long to look for a rank that has died and caused it.
BLAME_SECONDS = 2.0
# Of the traceback of a rank: a longer one might not fit into the pipe while rank 0 waits for something else.
REPORT_CHARS = 20_000
_SIGNALS = tuple(signal.Signals)  # each step goes through them, and an enumeration is slow to go through


class LeadRunner(ModelRunner):
    """Rank 0: what it runs, all ranks run.

    Beside what `ModelRunner` raises, an `EngineError` with the traceback of the rank that failed; the other processes
    have ended then, and the runner cannot be used any more.
    """

    def __init__(self, config: Config) -> None:
        device = pick_device(config.device)
        if reason := _obstacle(config, device):
            raise ValueError(f"tensor_parallel_size={config.tensor_parallel_size}: must be {reason}")
        self.ranks = Ranks(config.tensor_parallel_size)
        self._end = finalize(self, _end, vars(self), self.ranks)  # by itself if nobody calls `exit`
        self._end.atexit = False
        atexit.register(self._end)  # before multiprocessing's own hook, which waits for the processes without end
        with self._guard():
            super().__init__(config, self.ranks.start(config, device))
            self.ranks.wait_for("built")

    def exit(self) -> None:
        if self._end.alive:
            try:
                if hasattr(self, "num_kvcache_blocks"):  # all built
                    super().exit()
            finally:
                self._end()
                atexit.unregister(self._end)

    def launch(self, batch: Batch) -> PendingIds:
        with _delayed_signals(), self._guard():
            return super().launch(batch)

    def prefill(self, *args: Any) -> tuple[torch.Tensor, Pieces]:  # type: ignore[override]
        self.ranks.send("prefill", args)
        return super().prefill(*args)

    def decode(self, *args: Any) -> tuple[torch.Tensor, Pieces]:  # type: ignore[override]
        self.ranks.send("decode", args)
        return super().decode(*args)

    def check(self) -> None:
        if self.ranks.failed:  # every step asks
            with self._guard():
                pass

    @contextmanager
    def _guard(self) -> Iterator[None]:
        """After any error the ranks are not at the same point any more: end them all."""
        if not self._end.alive:
            raise EngineError("a rank of this engine has failed before; build a new one")
        try:
            yield
            if self.ranks.failed:
                raise RuntimeError("a rank has ended")
        except BaseException as error:
            try:
                self.ranks.blame(error)
            finally:
                self.exit()
            raise


class Ranks:
    """The processes of ranks 1 and up, as rank 0 sees them.

    failed: set as soon as one of them has ended by itself.
    """

    def __init__(self, size: int) -> None:
        self.failed = self.closed = False
        self.pid, self.folder = os.getpid(), ""
        self.parallel = Parallel(0, size)
        self.watcher = threading.Thread(target=self._watch, daemon=True)
        self.reports: list[tuple[float, type[EngineError], str]] = []
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []

    def start(self, config: Config, device: torch.device) -> Parallel:
        """Start the processes and connect with them."""
        context, size = multiprocessing.get_context("spawn"), config.tensor_parallel_size
        threads = max(1, torch.get_num_threads() // size)
        for rank in range(1, size):
            ours, theirs = context.Pipe()
            self.pipes.append(ours)
            args = (rank, config, device, threads, theirs)
            process = context.Process(target=serve, args=args, daemon=True)
            process.start()
            self.processes.append(process)
            theirs.close()
        self.wait_for("ready to connect")
        self.folder = mkdtemp(prefix="nanovllm-")  # not before the ranks are there, who delete it if we are killed
        for pipe in self.pipes:
            pipe.send(self.folder)
        errors: list[Exception] = []

        def connect() -> None:
            try:
                self.parallel.connect(device, self.folder)
            except Exception as error:
                errors.append(error)

        thread = threading.Thread(target=connect, daemon=True)  # a rank that dies may leave it waiting
        thread.start()
        while thread.is_alive() and all(process.is_alive() for process in self.processes):
            thread.join(0.01)
        if errors or thread.is_alive():
            raise errors[0] if errors else RuntimeError("a rank has ended")
        self.watcher.start()
        return self.parallel

    def send(self, name: str, args: tuple[Any, ...]) -> None:
        """Let all of them call the method `name` of their runner."""
        message = pickle.dumps((name, args), pickle.HIGHEST_PROTOCOL)
        for pipe in self.pipes:
            pipe.send_bytes(message)

    def wait_for(self, word: str) -> None:
        """Until all have sent `word`; `RuntimeError` or `EOFError` if one has failed."""
        waiting: list[Any] = list(self.pipes)
        while waiting:
            pipe: Any = wait(waiting)[0]
            if (message := pipe.recv()) != word:
                self.reports.append(message)
                raise RuntimeError("a rank has failed")
            waiting.remove(pipe)

    def _watch(self) -> None:
        """The end of a process ends what rank 0 waits for on its GPU."""
        wait([process.sentinel for process in self.processes])
        if not self.closed:
            self.failed = True
            self.parallel.abandon()

    def blame(self, error: BaseException) -> None:
        """After an error of rank 0: raise the first failure of another rank, if there is one behind it."""
        self.failed = True
        if not isinstance(error, Exception) or isinstance(error, (ValueError, EngineError)):
            return
        alive, deadline = [process.sentinel for process in self.processes], monotonic() + BLAME_SECONDS
        while alive and (ended := wait(alive, max(0.0, deadline - monotonic()))):
            alive = [sentinel for sentinel in alive if sentinel not in ended]
            deadline = min(deadline, monotonic() + 0.5)  # the first one takes others along; find out which it was
        for rank, (pipe, process) in enumerate(zip(self.pipes, self.processes), 1):
            process.join(0 if process.sentinel in alive else 1)
            with suppress(EOFError, OSError):
                while pipe.poll():
                    if isinstance(message := pipe.recv(), tuple):
                        self.reports.append(message)
            if (process.exitcode or 0) < 0:  # by a signal: no report, and nobody else's fault
                self.reports.append((0.0, EngineError, f"rank {rank} was ended by signal {-process.exitcode}"))
            elif process.exitcode is not None or process.sentinel not in alive:  # or someone else has reaped it
                text = f"rank {rank} ended; the main module must be a file with `if __name__ == '__main__':`"
                self.reports.append((monotonic(), EngineError, text))
        if self.reports:
            _, kind, text = min(self.reports, key=lambda report: report[0])
            raise kind(text) from error

    def close(self) -> None:
        """End the processes and leave the group."""
        self.closed = True
        for pipe in self.pipes:
            with suppress(OSError), socket.socket(fileno=os.dup(pipe.fileno())) as end:
                end.shutdown(socket.SHUT_RDWR)  # also where a process that was forked holds the pipe
            pipe.close()
        deadline = monotonic() + (0 if self.failed else EXIT_SECONDS)
        for process in self.processes:
            if not wait([process.sentinel], max(0.0, deadline - monotonic())):
                process.kill()
            process.join()
        self.parallel.leave()
        if self.watcher.is_alive():
            self.watcher.join(EXIT_SECONDS)  # gloo's group may never end
        for process in self.processes:
            with suppress(ValueError):  # "still running": someone else has reaped it
                process.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def _obstacle(config: Config, device: torch.device) -> str:
    """What the number of ranks would have to be, if the model cannot be split over so many."""
    hf, size = config.hf, config.tensor_parallel_size
    heads, kv_heads, vocab_size = hf.num_attention_heads, hf.num_key_value_heads, hf.vocab_size
    if heads % size or (kv_heads % size and size % kv_heads):
        return f"a divisor of the {heads} attention heads, and a divisor or a multiple of the {kv_heads} KV heads"
    if -(-vocab_size // size) * (size - 1) >= vocab_size:
        return f"so small that each rank has some of the {vocab_size} token ids"
    if device.type == "cuda" and size > torch.cuda.device_count():
        return f"at most {torch.cuda.device_count()}, the number of GPUs"
    if multiprocessing.current_process().daemon:
        return "1 in a daemonic process, as those of multiprocessing.Pool are: it may not start others"
    return ""


def _end(runner: dict[str, Any], ranks: Ranks) -> None:
    if ranks.pid != os.getpid():  # a process that was forked has only copies
        return
    with _delayed_signals():  # a second Ctrl-C would leave the rest as it is
        runner.get("graphs", {}).clear()  # before the communicators they use
        ranks.close()


@contextmanager
def _delayed_signals() -> Iterator[None]:
    """Ctrl-C and what else has a handler in Python wait for the end of the block: a handler that raises in the middle
    of a step would leave the other ranks waiting."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: handler for number in _SIGNALS if callable(handler := signal.getsignal(number))}
    caught: dict[int, Any] = {}

    def deliver(number: signal.Signals) -> None:
        if number in caught:
            handlers[number](number, caught[number])

    with ExitStack() as at_the_end:  # all is put back and delivered, also if a handler raises
        for number in handlers:
            at_the_end.callback(deliver, number)
        for number, handler in handlers.items():
            at_the_end.callback(signal.signal, number, handler)
            signal.signal(number, caught.setdefault)
        yield


def serve(rank: int, config: Config, lead_device: torch.device, threads: int, pipe: Connection) -> None:
    """The life of a rank above 0, in its own process."""
    os.setsid()  # rank 0 decides about signals to its group, as those of a terminal
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    folder = ""
    try:
        torch.set_num_threads(threads)
        if lead_device.type == "cuda":
            torch.cuda.set_device((lead_device.index + rank) % torch.cuda.device_count())
        device = pick_device(lead_device.type)
        pipe.send("ready to connect")
        folder = pipe.recv()
        threading.Thread(target=_die, args=(folder, True), daemon=True).start()
        parallel = Parallel(rank, config.tensor_parallel_size)
        parallel.connect(device, folder)
        runner = ModelRunner(config, parallel)
        pipe.send("built")
        with suppress(EOFError), torch.inference_mode():
            while True:
                name, args = pickle.loads(pipe.recv_bytes())
                getattr(runner, name)(*args)
        runner.exit()
        parallel.leave()
    except BaseException as error:
        kind = type(error) if isinstance(error, EngineError) else EngineError
        with suppress(OSError):
            pipe.send((monotonic(), kind, f"rank {rank} failed:\n{traceback.format_exc()[-REPORT_CHARS:]}"))
    _die(folder)


def _die(folder: str, with_parent: bool = False) -> None:
    """End this process at once, or `with_parent` when that has ended."""
    if parent := multiprocessing.parent_process():
        parent.join(0.1)  # it may be about to end, which has closed the pipe
        while with_parent and parent.is_alive() and os.getppid() == parent.pid:
            parent.join(1)  # a process that it has forked keeps `is_alive` true
        # rank 0 needs the folder to its end: a thread of NCCL's looks into the store, and would wait a minute for it
        if not parent.is_alive() or os.getppid() != parent.pid:
            shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)  # at once, whatever a GPU waits for; and the interpreter would take a second
