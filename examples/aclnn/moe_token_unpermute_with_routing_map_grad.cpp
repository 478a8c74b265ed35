// aclnnMoeTokenUnpermuteWithRoutingMapGrad: rows get the token's gradient times their weight, weights a dot product.
#include "aclnnop/aclnn_moe_token_unpermute_with_routing_map_grad.h"
#include "kit.hpp"

int main()
{
    Device device;
    // Tokens 0 and 1 with experts {0, 1} and {1}: rows are expert 0's token 0, expert 1's tokens 0 and 1.
    Tensor<float> grad({2, 2}, {1, 2, 10, 20});
    Tensor<int32_t> out_index({4}, {0, 1, 2, -1});
    Tensor<int32_t> token_id({4}, {0, 0, 1, 1});
    Tensor<int8_t> map({2, 2}, {1, 1, 0, 1});
    Tensor<float> permuted({4, 2}, {1, 1, 2, 2, 3, 3, 0, 0});
    Tensor<float> probs({2, 2}, {0.5f, 0.25f, 9, 2});
    Tensor<float> permuted_grad({4, 2});
    Tensor<float> probs_grad({2, 2});
    RUN(MoeTokenUnpermuteWithRoutingMapGrad, grad, out_index, token_id, map, permuted, probs, false, nullptr,
        permuted_grad, probs_grad);
    expect("permuted tokens grad", permuted_grad, {0.5f, 1, 0.25f, 0.5f, 20, 40, 0, 0});
    expect("probs grad", probs_grad, {3, 6, 0, 90});

    // Without probs: plain copies; the map and the rows are not read, and what lies in probs_grad stays.
    RUN(MoeTokenUnpermuteWithRoutingMapGrad, grad, out_index, token_id, map, permuted, nullptr, false, nullptr,
        permuted_grad, probs_grad);
    expect("permuted tokens grad without probs", permuted_grad, {1, 2, 1, 2, 10, 20, 0, 0});
    expect("probs grad without probs", probs_grad, {3, 6, 0, 90});

    // Fewer rows than slots: the unused slot of token 1 needs none.
    Tensor<float> three_grad({3, 2});
    Tensor<float> three({3, 2}, {1, 1, 2, 2, 3, 3});
    RUN(MoeTokenUnpermuteWithRoutingMapGrad, grad, out_index, token_id, map, three, probs, false, nullptr, three_grad,
        probs_grad);
    expect("three rows' grad", three_grad, {0.5f, 1, 0.25f, 0.5f, 20, 40});
    expect("three rows' probs grad", probs_grad, {3, 6, 0, 90});

    // Padded: two experts with capacity 1; expert 0 has token 1, expert 1 token 0.
    Tensor<int32_t> padded_index({2}, {1, 0});
    Tensor<int32_t> padded_token({2}, {0, 1});
    Tensor<int8_t> padded_map({2, 2}, {0, 1, 1, 0});
    Tensor<float> padded_rows({2, 2}, {1, 2, 3, 4});
    Tensor<float> padded_grad({2, 2});
    RUN(MoeTokenUnpermuteWithRoutingMapGrad, grad, padded_index, padded_token, padded_map, padded_rows, probs, true,
        nullptr, padded_grad, probs_grad);
    expect("padded permuted tokens grad", padded_grad, {90, 180, 0.25f, 0.5f});
    expect("padded probs grad", probs_grad, {0, 11, 50, 0});
    return 0;
}
