"""Checks that need torch, in a process of their own: prints a finding as JSON on each line.

Starts two worker processes, and lets them call each other and compute a gradient.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from dataclasses import asdict

from backhaul._command.findings import Finding

_SECONDS = 60.0


def say(finding: Finding) -> None:
    """Print it at once: a later check may crash."""
    print(json.dumps(asdict(finding)), flush=True)


def main() -> None:
    """All checks."""
    import backhaul as bh

    try:
        bh.init  # noqa: B018 (the first public name that is used imports torch)
    except Exception as error:  # a broken installation may raise anything
        kind = "" if isinstance(error, ImportError) else f"{type(error).__name__}: "
        say(Finding("torch", "wrong", f"Backhaul cannot use it: {kind}{error}", "install one of the tested versions"))
        return
    say(Finding("torch", "good", "it has all private names that Backhaul uses"))
    _check_loaded_core()
    _check_devices()
    _check_tls()
    began = time.monotonic()
    try:
        bh.launch(work, 2, timeout=_SECONDS)
    except Exception as error:
        what = f"two workers on this host failed: {type(error).__name__}: {error}"
        say(Finding("workers", "wrong", what, "docs/errors.md says what each error means"))
    else:
        seconds = time.monotonic() - began
        say(Finding("workers", "good", f"two on this host called each other, with gradients, in {seconds:.1f} s"))


def work() -> None:
    """In each of the two workers."""
    import torch

    import backhaul as bh

    if bh.get_worker_info().id == 0:
        x = torch.arange(3.0, requires_grad=True)
        bh.rpc_sync("worker1", torch.square, args=(x,)).sum().backward()
        if x.grad is None or x.grad.tolist() != [0.0, 2.0, 4.0]:
            raise RuntimeError(f"the gradient of x * x at 0, 1, 2 came out as {x.grad}")


def _check_loaded_core() -> None:
    from backhaul import _native
    from backhaul._command import machine

    if machine.core_state()[0] == "ready" and _native.core is None:
        why = _native.check() or "it cannot be loaded"
        say(Finding("native core", "note", why, "run: python -m backhaul._native"))


def _check_devices() -> None:
    import torch

    if not torch.version.cuda:
        return
    try:
        count = torch.cuda.device_count()
        names = [torch.cuda.get_device_name(index) for index in range(count)]
        if names:
            torch.ones(1, device="cuda").add_(1).item()
    except (RuntimeError, AssertionError) as error:
        say(Finding("GPUs", "wrong", f"torch cannot use them: {error}", "see whether nvidia-smi works on this host"))
        return
    if names:
        say(Finding("GPUs", "good", f"torch uses {count}: {', '.join(sorted(set(names)))}"))
    else:
        say(Finding("GPUs", "note", "torch is built for CUDA, and there is no GPU", "none is needed for the CPU"))


def _check_tls() -> None:
    """A TLS connection with itself, with a certificate made from a secret, as workers on several hosts make it."""
    from backhaul._transport.sockets.certificates import issue
    from backhaul._transport.sockets.tls import Credentials

    ours, theirs = socket.socketpair()
    failures: list[Exception] = []
    try:
        credentials = Credentials(issue(b"the secret of a test", "doctor"))

        def serve() -> None:
            try:
                credentials.accept(ours).do_handshake()
            except OSError as error:
                failures.append(error)

        server = threading.Thread(target=serve, daemon=True)
        server.start()
        theirs.settimeout(_SECONDS)
        version = credentials.connect(theirs).version()
        server.join(_SECONDS)
    except Exception as error:
        failures.append(error)
    if failures:
        say(Finding("TLS", "wrong", f"a connection failed: {failures[0]}", "pip install --upgrade cryptography"))
    else:
        say(Finding("TLS", "good", f"{version}, with certificates made from the secret"))


if __name__ == "__main__":
    main()
