"""Megatron-Core, imported once: it warns about every optional package that is absent."""

import importlib
import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core import parallel_state as parallel_state
    from megatron.core.transformer.moe import moe_utils as moe_utils
    from megatron.core.transformer.moe.router import TopKRouter as TopKRouter
    from megatron.core.transformer.moe.router_replay import RouterReplay as RouterReplay
    from megatron.core.transformer.moe.router_replay import RouterReplayAction as RouterReplayAction
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher as MoEAlltoAllTokenDispatcher
    from megatron.core.transformer.transformer_config import TransformerConfig as TransformerConfig

    importlib.import_module("megatron.core.distributed.finalize_model_grads")
