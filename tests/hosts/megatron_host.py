"""Megatron-Core, imported once: it warns about every optional package that is absent."""

import importlib
import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core import parallel_state as parallel_state
    from megatron.core.transformer.moe import moe_utils as moe_utils

    for name in ("distributed.finalize_model_grads", "transformer.moe.router", "transformer.moe.token_dispatcher"):
        importlib.import_module(f"megatron.core.{name}")
