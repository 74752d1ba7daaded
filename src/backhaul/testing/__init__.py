"""What helps to test programs and transports: a leak checker for pytest, and the conformance kit of transports.

``pytest_plugins = ["backhaul.testing.leaks"]`` in a ``conftest.py`` turns the leak checker on.
"""
