// aclnnMoeTokenPermuteWithRoutingMapGrad, not padded: every token's slots, added up; weights back to their places.
#include "aclnnop/aclnn_moe_token_permute_with_routing_map_grad.h"
#include "kit.hpp"

int main()
{
    Device device;
    // Two tokens, three experts: token 0 has experts 0 and 2, token 1 has expert 1. Rows: (0,0), (1,1), (0,2).
    Tensor<float> grad({4, 2}, {1, 2, 3, 4, 5, 6, 0, 0});
    Tensor<float> probs_row_grad({4}, {0.5f, 0.25f, 0.125f, 0});
    Tensor<int32_t> sorted_indices({4}, {0, 2, 1, -1});
    Tensor<int8_t> map({2, 3}, {1, 0, 1, 0, 1, 0});
    Tensor<float> tokens_grad({2, 2});
    Tensor<float> probs_grad({2, 3});
    RUN(MoeTokenPermuteWithRoutingMapGrad, grad, probs_row_grad, sorted_indices, map, 3, 2, false, tokens_grad,
        probs_grad);
    expect("tokens grad", tokens_grad, {6, 8, 3, 4});
    expect("probs grad", probs_grad, {0.5f, 0, 0.125f, 0, 0.25f, 0});
    return 0;
}
