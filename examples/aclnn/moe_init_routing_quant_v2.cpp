// aclnnMoeInitRoutingQuantV2: aclnnMoeInitRoutingV2 with rows as int8, with a scale for each row or one for all.
#include "aclnnop/aclnn_moe_init_routing_quant_v2.h"
#include "kit.hpp"

int main()
{
    Device device;
    Tensor<float> tokens({3, 4}, {0.5f, 1.5f, 2.5f, -127, 0, 0, 0, 0, 1, -2, 4, 3});
    Tensor<int32_t> experts({3, 2}, {1, 0, 0, 2, 1, 2});
    Tensor<int8_t> expanded({4, 4});
    Tensor<int32_t> row_idx({6});
    Tensor<int32_t> ends({3});
    Tensor<float> scales({4});
    RUN(MoeInitRoutingQuantV2, tokens, experts, nullptr, nullptr, 4, 0, 3, 0, 1, false, 1, expanded, row_idx, ends, nullptr,
        scales);
    expect("int8 rows", expanded, {0, 2, 2, -127, 0, 0, 0, 0, 0, 2, 2, -127, 32, -64, 127, 95});
    expect("row of each slot", row_idx, {2, 0, 1, 4, 3, 5});
    expect("where each expert ends", ends, {2, 4, 6});
    expect("scales", scales, {1, 0, 1, 0.031496063f}, 1e-9);

    // One row for each expert, one scale and one offset for all.
    Tensor<float> x({3, 2}, {0.1f, 0.1f, 0.2f, 0.2f, 0.3f, 30});
    Tensor<int32_t> ids({3, 2}, {1, 2, 0, 1, 0, 2});
    Tensor<float> scale({1}, {10.3f});
    Tensor<float> offset({1}, {1.5f});
    Tensor<int8_t> padded({3, 1, 2});
    Tensor<int32_t> before({3});
    RUN(MoeInitRoutingQuantV2, x, ids, scale, offset, 0, 1, 3, 1, 0, true, 0, padded, row_idx, nullptr, before, nullptr);
    expect("rows by capacity", padded, {4, 4, 3, 3, 3, 3});
    expect("row of each slot", row_idx, {1, 2, 0, -1, -1, -1});
    expect("slots of each expert", before, {2, 2, 2});
    return 0;
}
