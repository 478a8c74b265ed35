// aclnnMoeInitRoutingV2: three experts that take two rows each, and the counts before the cut.
#include "aclnnop/aclnn_moe_init_routing_v2.h"
#include "kit.hpp"

int main()
{
    Device device;
    Tensor<float> x({3, 4}, rows({0.1f, 0.2f, 0.3f}, 4));
    Tensor<int32_t> expert_idx({3, 2}, {1, 2, 0, 1, 0, 2});
    Tensor<float> expanded({3, 2, 4});
    Tensor<int32_t> row_idx({6});
    Tensor<int32_t> before({3});
    RUN(MoeInitRoutingV2, x, expert_idx, 0, 2, 3, 1, 0, true, expanded, row_idx, nullptr, before);
    expect("expanded x", expanded, rows({0.2f, 0.3f, 0.1f, 0.2f, 0.1f, 0.3f}, 4));
    expect("row indices", row_idx, {2, 4, 0, 3, 1, 5});
    expect("counts before the cut", before, {2, 2, 2});

    // Nothing dropped, cumulative counts.
    Tensor<float> flat({6, 4});
    Tensor<int32_t> cumulative({3});
    RUN(MoeInitRoutingV2, x, expert_idx, 0, 0, 3, 0, 1, false, flat, row_idx, cumulative, nullptr);
    expect("expanded x, flat", flat, rows({0.2f, 0.3f, 0.1f, 0.2f, 0.1f, 0.3f}, 4));
    expect("cumulative counts", cumulative, {2, 4, 6});
    return 0;
}
