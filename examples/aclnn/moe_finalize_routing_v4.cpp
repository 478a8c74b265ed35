// aclnnMoeFinalizeRoutingV4: experts that compute nothing: zero, a copy of the token, a constant.
#include "aclnnop/aclnn_moe_finalize_routing_v4.h"
#include "kit.hpp"

int main()
{
    Device device;
    Tensor<float> expanded({6, 2}, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11});
    Tensor<int32_t> row_idx({6}, {0, 1, 2, 3, 4, 5});
    Tensor<float> x1({3, 2}, rows({1, 2, 3}, 2));
    Tensor<float> bias({5, 2}, rows({0, 0, 7, 1, 0}, 2));
    Tensor<float> scales({3, 2}, {1, 0.5f, 2, 0.25f, 0, 1});
    Tensor<int32_t> expert_idx({3, 2}, {0, 2, 1, 3, 0, 4});
    Tensor<float> x({3, 2}, {100, 200, 300, 400, 500, 600});
    Tensor<float> alpha1({1, 2}, {0.5f, 0.5f});
    Tensor<float> alpha2({1, 2}, {2, 2});
    Tensor<float> v({1, 2}, {10, 20});
    int64_t bounds[] = {2, 3, 4, 5};  // expert 2 is zero, 3 a copy, 4 a constant
    aclIntArray *zero = aclCreateIntArray(bounds, 2);
    aclIntArray *copy = aclCreateIntArray(bounds + 1, 2);
    aclIntArray *constant = aclCreateIntArray(bounds + 2, 2);
    Tensor<float> out({3, 2});
    RUN(MoeFinalizeRoutingV4, expanded, row_idx, x1, nullptr, bias, scales, expert_idx, x, alpha1, alpha2, v, 2, zero, copy,
        constant, 2, out);
    expect("out", out, {1, 2, 85.25f, 112.25f, 273, 343});

    // Without scales k says how many rows a token has.
    Tensor<int32_t> indices({6}, {2, 1, 4, 3, 0, 5});
    RUN(MoeFinalizeRoutingV4, expanded, indices, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr,
        nullptr, 0, nullptr, nullptr, nullptr, 2, out);
    expect("sums by column", out, {10, 12, 2, 4, 18, 20});
    OK(aclDestroyIntArray(zero));
    OK(aclDestroyIntArray(copy));
    OK(aclDestroyIntArray(constant));
    return 0;
}
