"""The operators. This is the map.

The data path, and the folder of each step:

    gating/     logits [T, E] to weights, expert_ids, scores: the K experts of every token
    planning/   expert_ids [T, K] to a plan: the row of every slot
    maps/       a routing map [T, E] to a plan
    indices/    index tensors that exist already to a plan
    rows/       spread (tokens to rows), combine (rows to tokens), row_dots (gradients of weights)
    weights/    weights in the order of slots or rows, and back
    quantization/   rows as int8 with scales
    activations/    what stands between the two products of an expert

`moeroute/permutation.py` makes permute, unpermute and their gradients of rows/ and weights/.

Letters: T tokens, H hidden size, E experts, K experts per token, S slots (S = T * K), R rows, C capacity. A slot is one
choice of one token, a row is one line of the permuted tensor. `row_of_slot` [S] and `slot_of_row` [R] are inverse to
each other, with -1 for none.

Where to look:

    op.py           the public functions, their checks and derivatives
    reference.py    the result, in plain torch
    on_numba.py     the CPU kernels and their launchers; numba_kit/ is what they share
    on_triton.py    the Triton kernels and their launchers; triton_kit.py is what they share
    register.py     how an operator becomes one of torch.library
    layout.py       strides, `out=`, addresses
    *.py            operators in plain torch: balance (losses), experts (a linear map per expert), router_product
                    (logits), exchange and gradient_norm (several ranks); group_topk, half_quantization, replicas and
                    special_experts serve the aclnn operators, init_routing those and torch_npu's
"""
