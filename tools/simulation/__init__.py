"""Runs many random steps under random faults in simulation. Each seed is one run that can be repeated exactly.

``python -m tools.simulation --seeds 0:200 --workers 8`` runs two hundred seeds. Every step must end with the gradients
of plain autograd, or raise an error of Backhaul in time. Afterwards nothing may be left: no context, no pass, no call,
no reference, no thread, no channel.
"""
