"""Worker processes that stay up: importing torch once per rank and case is what would cost."""

import contextlib
import multiprocessing
import os
import tempfile
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist

TIMEOUT_SECONDS = 300  # a machine may stand still for minutes; a layout takes seconds


class Pool:
    """`world` forked ranks with a gloo group between them. `run(function, *arguments)` calls it on every rank."""

    def __init__(self, world: int):
        self.world = world
        self._start()

    def _start(self):
        context = multiprocessing.get_context("fork")
        self._folder = tempfile.TemporaryDirectory()
        store = os.path.join(self._folder.name, "store")
        self._pipes, self._ranks = [], []
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.world, store, theirs), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._ranks.append(process)

    def run(self, function, *arguments):
        """Results in rank order. A failure on any rank is raised here, and the pool starts anew."""
        if not all(process.is_alive() for process in self._ranks):  # something else on the machine killed one
            self.close()
            self._start()
        for pipe in self._pipes:
            pipe.send((function, arguments))
        answers, failures = [], []
        for rank, pipe in enumerate(self._pipes):
            # once one rank has failed the others may wait for it for ever
            if pipe.poll(5 if failures else TIMEOUT_SECONDS):
                ok, answer = pipe.recv()
                (answers if ok else failures).append(answer)
            else:
                failures.append(f"rank {rank} gave no answer")
        if failures:
            self.close()
            self._start()
            raise AssertionError("\n".join(failures))
        return answers

    def close(self):
        for process in self._ranks:
            process.kill()
            process.join()
        self._folder.cleanup()


def _serve(rank, world, store, pipe):
    torch.set_num_threads(1)
    timeout = timedelta(seconds=TIMEOUT_SECONDS)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world, timeout=timeout)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world))
    while True:
        with contextlib.suppress(EOFError):
            function, arguments = pipe.recv()
            try:
                pipe.send((True, function(*arguments)))
            except BaseException:
                pipe.send((False, f"rank {rank}:\n{traceback.format_exc()}"))
            continue
        return
