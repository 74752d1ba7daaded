"""Tools to test programs and transports. Importing this package does not need pytest.

- ``leaks``: a pytest plugin that fails tests which leave threads, descriptors, processes or shared memory behind. Turn
  it on with ``pytest_plugins = ["backhaul.testing.leaks"]`` in a ``conftest.py``.
- ``transport_conformance``: the pytest suite that every transport must pass.
- ``oracle``: random distributed programs, compared with plain autograd.
- ``faults``: calls of a worker that are lost or late.
- ``proxy``: a TCP proxy that breaks connections on command.
"""
