"""The processes of a program: one for each worker, forked from this one, which must not have started threads."""

from __future__ import annotations

import importlib
import multiprocessing
import tempfile
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from programs import api

NAMES = ("rnn", "ddp", "cartpole", "parameter_server", "pipeline", "transformer")


def program(name: str) -> ModuleType:
    """The module of a program."""
    return importlib.import_module(f"programs.{name}")


def run(name: str, drive: Callable[[Any], None]) -> None:
    """Start the workers of a program, call ``drive(driver)`` in the first, and wait until all have ended."""
    module = program(name)
    importlib.import_module("torch._dynamo")  # optimizers import it at first use, which takes each worker seconds
    with tempfile.TemporaryDirectory() as folder:
        meet, count = f"file://{folder}/workers", len(module.WORKERS)
        fork = multiprocessing.get_context("fork")
        workers = [fork.Process(target=serve, args=(name, rank, meet, drive)) for rank in range(count)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    if failed := [worker.exitcode for worker in workers if worker.exitcode]:
        raise RuntimeError(f"workers of {name} ended with {failed}")


def driver_of(name: str) -> Any:
    """Build the model of a program."""
    module = program(name)
    return module.PlainDriver() if api.SYSTEM == "plain" else module.Driver()


def close(driver: Any) -> None:
    """End what a driver has started."""
    if hasattr(driver, "close"):
        driver.close()


def serve(name: str, rank: int, meet: str, drive: Callable[[Any], None]) -> None:
    """The life of a worker."""
    module = program(name)
    torch.set_num_threads(1)
    end = api.join(module.WORKERS[rank], rank, len(module.WORKERS), meet)
    if rank == 0:
        driver = driver_of(name)
        drive(driver)
        close(driver)
        del driver
    end()
