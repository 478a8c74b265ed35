// aclnnMoeInitRoutingQuant: aclnnMoeInitRouting with rows as int8, x * scale + offset in half precision.
#include "aclnnop/aclnn_moe_init_routing_quant.h"
#include "kit.hpp"

int main()
{
    Device device;
    Tensor<float> x({3, 2}, {4.952f, 10, 0.37f, -300, 1.001f, 5});
    Tensor<int32_t> row_idx({3, 2}, {0, 3, 1, 4, 2, 5});
    Tensor<int32_t> expert_idx({3, 2}, {1, 2, 0, 1, 0, 2});
    Tensor<int8_t> expanded({6, 2});
    Tensor<int32_t> expanded_row_idx({6});
    Tensor<int32_t> expanded_expert_idx({6});
    RUN(MoeInitRoutingQuant, x, row_idx, expert_idx, 9, 10.3, 1.5, expanded, expanded_row_idx, expanded_expert_idx);
    expect("int8 rows", expanded, {5, -128, 12, 53, 52, 104, 5, -128, 52, 104, 12, 53});
    expect("row of each slot", expanded_row_idx, {2, 0, 1, 4, 3, 5});
    expect("sorted experts", expanded_expert_idx, {0, 0, 1, 1, 2, 2});
    return 0;
}
