// aclnnMoeFinalizeRoutingV2: two residuals and the weighted rows with their expert's bias.
#include "aclnnop/aclnn_moe_finalize_routing_v2.h"
#include "kit.hpp"

int main()
{
    Device device;
    // Two tokens, two slots each; in mode 0 slot k of token i is entry i + k * 2.
    Tensor<float> expanded({4, 2}, {1, 2, 3, 4, 5, 6, 7, 8});
    Tensor<int32_t> row_idx({4}, {2, 1, 0, 3});
    Tensor<float> x1({2, 2}, {100, 200, 300, 400});
    Tensor<float> x2({2, 2}, {0.5f, 0.5f, 0.25f, 0.25f});
    Tensor<float> bias({2, 2}, {1, 1, 0, 2});
    Tensor<float> scales({2, 2}, {2, 1, 0.5f, 4});
    Tensor<int32_t> expert_idx({2, 2}, {0, 1, 1, 0});
    Tensor<float> out({2, 2});
    RUN(MoeFinalizeRoutingV2, expanded, row_idx, x1, x2, bias, scales, expert_idx, 0, out);
    // Token 0: 100.5 + 2 * (5 + 1) + 1 * (1 + 0), 200.5 + 2 * (6 + 1) + 1 * (2 + 2); token 1 likewise.
    expect("out", out, {113.5f, 218.5f, 333.75f, 439.25f});
    return 0;
}
