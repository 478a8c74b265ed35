// aclnnMoeTokenPermuteWithRoutingMap: all tokens to both experts, then two tokens an expert in the padded mode.
#include "aclnnop/aclnn_moe_token_permute_with_routing_map.h"
#include "kit.hpp"

int main()
{
    Device device;
    Tensor<float> tokens({3, 4}, rows({0.1f, 0.2f, 0.3f}, 4));
    Tensor<int8_t> everything({3, 2}, {1, 1, 1, 1, 1, 1});
    Tensor<float> permuted({6, 4});
    Tensor<int32_t> sorted_indices({6});
    RUN(MoeTokenPermuteWithRoutingMap, tokens, everything, nullptr, 6, false, permuted, nullptr, sorted_indices);
    expect("permuted tokens", permuted, rows({0.1f, 0.2f, 0.3f, 0.1f, 0.2f, 0.3f}, 4));
    expect("sorted indices", sorted_indices, {0, 3, 1, 4, 2, 5});

    // Expert 0 has tokens 1 and 2; expert 1 only token 0, so the first token without it fills up.
    Tensor<int8_t> map({3, 2}, {0, 1, 1, 0, 1, 0});
    Tensor<float> probs({3, 2}, {1, 2, 3, 4, 5, 6});
    Tensor<float> padded({4, 4});
    Tensor<float> padded_probs({4});
    Tensor<int32_t> token_ids({4});
    RUN(MoeTokenPermuteWithRoutingMap, tokens, map, probs, 4, true, padded, padded_probs, token_ids);
    expect("padded tokens", padded, rows({0.2f, 0.3f, 0.1f, 0.2f}, 4));
    expect("padded probs", padded_probs, {3, 5, 2, 4});
    expect("token ids", token_ids, {1, 2, 0, 1});
    return 0;
}
