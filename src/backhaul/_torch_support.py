"""Which torch Backhaul works with: the versions it was tested with, and the private names of torch that it uses.

torch may change a private name in any version. Importing this module checks the names that all of Backhaul needs, and
``require`` those of one feature when it is first used. So a missing name is one error at once that lists all missing
names, not an ``AttributeError`` in the middle of a step. ``tests/test_torch_support.py`` compares the lists with the
sources.
"""

from __future__ import annotations

import functools
import importlib
import re
from types import ModuleType

import torch

from backhaul.errors import UnsupportedTorchError

OLDEST = (2, 11)
"""The oldest torch that the tests pass with. Older ones have the names but behave differently."""

NEWEST = (2, 15)
"""The newest torch that was tested. A newer one is accepted if it has all names."""

CORE = "backhaul"

NAMES: dict[str, tuple[str, ...]] = {
    CORE: (
        "Tensor._backward_hooks",
        "Tensor._base",
        "Tensor._indices",
        "Tensor._is_zerotensor",
        "Tensor._make_subclass",
        "Tensor._make_wrapper_subclass",
        "Tensor._post_accumulate_grad_hooks",
        "Tensor._values",
        "UntypedStorage._cdata",
        "_C.CompilationUnit",
        "_C.DisableTorchFunctionSubclass",
        "_C.Future._set_unwrap_func",
        "_C.Future.add_done_callback",
        "_C.Future.done",
        "_C.Future.set_result",
        "_C.Future.wait",
        "_C.TensorBase.data",
        "_C.TensorBase.grad",
        "_C.TensorBase.requires_grad",
        "_C._FunctionBase",
        "_C._current_graph_task_id",
        "_C._disabled_torch_function_impl",
        "_C._dispatch_keys",
        "_C._functions.AccumulateGrad._register_hook_dict",
        "_C._functions.AccumulateGrad._set_sequence_nr",
        "_C._functions.DelayedError",
        "_C._functions.Error",
        "_C._functorch.is_batchedtensor",
        "_C._functorch.is_legacy_batchedtensor",
        "_C._is_multithreading_enabled",
        "_C._nn._parse_to",
        "_C._set_grad_enabled",
        "_C._set_multithreading_enabled",
        "_C._storage_Use_Count",
        "_C._will_engine_execute_node",
        "_C.import_ir_module_from_buffer",
        "_amp_foreach_non_finite_check_and_unscale_",
        "_is_any_true",
        "_jit_internal._qualified_name",
        "_make_per_channel_quantized_tensor",
        "_make_per_tensor_quantized_tensor",
        "_ops.OpOverload",
        "_ops.OpOverloadPacket",
        "_subclasses.fake_tensor.FakeTensor",
        "autograd.forward_ad._current_level",
        "autograd.function._HookMixin",
        "autograd.graph._engine_run_backward",
        "autograd.variable.Variable._execution_engine.run_backward",
        "jit._recursive.wrap_cpp_module",
        "jit._state._python_cu.find_function",
        "nn.modules.batchnorm._BatchNorm",
        "nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model",
        "nn.utils.stateless._reparametrize_module",
        "ops.aten._amp_foreach_non_finite_check_and_unscale_",
        "ops.aten._foreach_zero_",
        "ops.aten._to_copy",
        "ops.aten.add._qualified_op_name",
        "ops.aten.add.default._overloadname",
        "ops.aten.add.default._schema",
        "utils._foreach_utils._foreach_supported_types",
        "utils._pytree.tree_flatten",
        "utils._pytree.tree_leaves",
        "utils._pytree.tree_map",
        "utils._pytree.tree_map_only",
        "utils._pytree.tree_unflatten",
    ),
    "backhaul.compat": (
        "_C.FutureType",
        "_C.ScriptDict",
        "_C.ScriptList",
        "_C._autograd._profiler_enabled",
        "_C._autograd._profiler_type",
        "_C._profiler.ActiveProfilerType",
        "autograd.profiler.record_function._call_end_callbacks_on_future",
        "autograd.profiler_legacy._parse_legacy_records",
        "autograd.profiler_legacy.profile._start_trace",
        "autograd.profiler_util.EventList._build_tree",
        "distributed._create_store_from_options",
        "jit._builtins._find_builtin",
    ),
    "backhaul.cuda": (
        "_C._construct_CUDA_Tensor_From_Storage_And_Metadata",
        "_C._construct_storage_from_data_pointer",
        "_C._cuda_getCurrentRawStream",
        "_C._cuda_isCurrentStreamCapturing",
        "_C._cuda_setStream",
        "cuda._is_compiled",
        "cuda._is_in_bad_fork",
    ),
    "backhaul.jit": (
        "_C.AnyType.get",
        "_C.DictType",
        "_C.FutureType",
        "_C.InferredType",
        "_C.ListType",
        "_C.PyObjectType.get",
        "_C.RRefType",
        "_C.ScriptFunction",
        "_C.ScriptMethod",
        "_C.ScriptModule._get_method",
        "_C.ScriptModule._method_names",
        "_C.ScriptObject._type",
        "_C.StringType.get",
        "_C.TensorType.get",
        "_C.TupleType",
        "_C.Type",
        "_C._get_obj_in_tls",
        "_C._is_key_in_tls",
        "_C._jit_get_emit_hooks",
        "_C._jit_set_emit_hooks",
        "_C._jit_try_infer_type",
        "_C._stash_obj_in_tls",
        "_jit_internal.createResolutionCallbackForClassMethods",
        "_jit_internal.get_closure",
        "_sources.fake_range",
        "jit._builtins._get_builtin_table",
        "jit._script._compile_and_register_class",
        "jit._script._script_impl",
        "jit._state._get_script_class",
        "jit._state._name_to_pyclass",
        "jit._state._python_cu.get_class",
    ),
    "backhaul.remote_op": (
        "_C._AutoDispatchBelowAutograd",
        "_C._after_autograd_keyset",
        "_functorch.utils.enable_single_level_autograd_function",
        "_guards.detect_fake_mode",
        "Tensor._is_view",
        "Tensor._version",
        "autograd.forward_ad._current_level",
        "autograd.forward_ad._set_fwd_grad_enabled",
        "autograd.function._SingleLevelFunction",
        "utils._python_dispatch.TorchDispatchMode",
    ),
    "torch.distributed.fsdp.fully_shard": (
        "distributed._composable_state._module_state_mapping",
        "distributed.fsdp._fully_shard._fsdp_param_group.RegisterPostBackwardFunction._backward_cls",
        "distributed.fsdp._fully_shard._fsdp_state.FSDPState._fsdp_param_group",
        "distributed.fsdp._fully_shard._fsdp_state.FSDPState._register_root_post_backward_final_callback",
        "distributed.fsdp._fully_shard._fsdp_state.FSDPState._root_post_backward_final_callback",
    ),
    "backhaul.profile": (
        "_C._autograd._profiler_enabled",
        "_C._profiler._ExperimentalConfig",
        "autograd.profiler._is_profiler_enabled",
        "autograd.profiler.profile._ensure_function_events",
        "autograd.profiler_util.EventList._build_tree",
    ),
}
"""Private names by the feature that uses them, below ``torch``."""

UNCHECKED = (
    # The code that uses these does without them where they are missing.
    "_C._cuda_hasPrimaryContext",
    "_C._dynamo.eval_frame._FrameAction.SKIP",
    "_C._dynamo.eval_frame._FrameExecStrategy",
    "_C._dynamo.eval_frame.set_code_exec_strategy",
    "autograd._is_checkpoint_valid",
    "autograd.function._HookMixin._register_hook",
    "nn.parallel.distributed._DDPSink",
    "nn.utils.clip_grad._group_tensors_by_device_and_dtype",
    "utils._python_dispatch.TorchDispatchMode.ignore_compile_internals",
    # Only an instance has these.
    "distributed.fsdp._fully_shard._fsdp_param.FSDPParam._unsharded_param",
    "distributed.fsdp._fully_shard._fsdp_state.FSDPState._fsdp_param_groups",
    "distributed.fsdp._fully_shard._fsdp_state.FSDPState._state_ctx",
    "jit.RecursiveScriptModule._c",
    "jit.RecursiveScriptModule._concrete_type",
    "autograd.profiler.profile._function_events",
    "nn.Module._is_full_backward_hook",
    "nn.Module._load_state_dict_pre_hooks",
    "nn.Module._non_persistent_buffers_set",
    "nn.Module._version",
    "nn.parallel.DistributedDataParallel._ddp_params_and_buffers_to_ignore",
    "optim.Optimizer._optimizer_step_post_hooks",
    "optim.Optimizer._optimizer_step_pre_hooks",
    "nn.Module.state_dict._metadata",
    # torch's compiler looks for these marks on functions.
    "compiler._dynamo_marked_constant",
    "compiler._torchdynamo_disable",
    "compiler._torchdynamo_disable_msg",
    "compiler._torchdynamo_orig_callable",
)
"""Private names that cannot be looked up, or need not be there."""


def require(feature: str) -> None:
    """Check that this torch has the private names that a feature uses. Only the first call takes time.

    Args:
        feature: A key of ``NAMES``.

    Raises:
        UnsupportedTorchError: The torch is too old, or names are missing; the error lists them.
    """
    _check(feature, torch.__version__)


@functools.cache  # what is raised is not kept
def _check(feature: str, version: str) -> None:
    if _release(version) < OLDEST:
        raise _error(f"torch {version} is older than {_text(OLDEST)}, the oldest that {feature} works with", version)
    lacking = tuple(f"torch.{name}" for name in NAMES[feature] if not _exists(name))
    if lacking:
        what = f"torch {version} lacks {len(lacking)} of the private names that {feature} uses: {', '.join(lacking)}"
        raise _error(what, version, lacking)


def _error(what: str, version: str, lacking: tuple[str, ...] = ()) -> UnsupportedTorchError:
    beyond = f"{NEWEST[0]}.{NEWEST[1] + 1}"
    return UnsupportedTorchError(
        f"{what}. Tested versions are {_text(OLDEST)} to {_text(NEWEST)}: install one of them "
        f"(pip install 'torch>={_text(OLDEST)},<{beyond}'), or a Backhaul that supports this torch.",
        torch_version=version,
        missing=lacking,
    )


def _text(release: tuple[int, int]) -> str:
    return ".".join(map(str, release))


def _release(version: str) -> tuple[int, int]:
    """The first two numbers of a version.

    Example:
        >>> _release("2.15.0+cpu")
        (2, 15)
    """
    major, minor = re.match(r"(\d+)\.(\d+)", version).groups()  # type: ignore[union-attr]
    return int(major), int(minor)


def _exists(name: str) -> bool:
    """Whether torch has a name. Imports modules on the way.

    Example:
        >>> _exists("nn.Linear"), _exists("nn.Nonsuch")
        (True, False)
    """
    place: object = torch
    path = "torch"
    for part in name.split("."):
        path += f".{part}"
        try:
            place = getattr(place, part)
        except AttributeError:
            if not isinstance(place, ModuleType):
                return False
            try:
                place = importlib.import_module(path)
            except ImportError:
                return False
    return True


require(CORE)
