"""The state of a module on another worker. torch's ``state_dict`` and ``load_state_dict`` call these methods on every
module of a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from backhaul._remote_tensors.on_owner import on_cpu
from backhaul._rpc.compression import as_it_is
from backhaul._rpc.move_progress import shown_move
from backhaul.nn import owner
from backhaul.nn.listed_tensors import ListedTensors


class RemoteState(ListedTensors):
    """Copies the module's state from its owner, and loads it there."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if keep_vars:
            raise ValueError(
                f"state_dict(keep_vars=True) is not possible: the module is on worker '{self.on}', and its state is a "
                "copy; use remote_parameters() for references to its parameters"
            )
        with shown_move("copying state from", [self.on]):
            state, versions = self._ask_owner(owner.save)
        destination.update({prefix + name: value for name, value in state.items()})
        if hasattr(destination, "_metadata"):
            destination._metadata.update({(prefix + name).rstrip("."): value for name, value in versions.items()})

    def _load_from_state_dict(  # noqa: PLR0917 (torch's signature)
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        for hook in self._load_state_dict_pre_hooks.values():
            hook(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        state = {name: value for name, value in state_dict.items() if name.startswith(prefix)}
        state = tree_map_only(torch.Tensor, lambda tensor: on_cpu(tensor.detach()), state)
        metadata = getattr(state_dict, "_metadata", {})
        versions = {name: value for name, value in metadata.items() if f"{name}.".startswith(prefix)}
        assign = bool(local_metadata.get("assign_to_params_buffers", False))
        with as_it_is(), shown_move("loading state to", [self.on]):
            missing, unexpected, errors, description = self._ask_owner(owner.load, state, versions, assign, prefix)
        self._describe_again(description)
        missing_keys.extend(missing)
        if strict:
            unexpected_keys.extend(unexpected)
        error_msgs.extend(errors)
