// aclnnMoeInitRouting: token copies by expert, for slots that are numbered column by column.
#include "aclnnop/aclnn_moe_init_routing.h"
#include "kit.hpp"

int main()
{
    Device device;
    Tensor<float> x({3, 4}, rows({0.1f, 0.2f, 0.3f}, 4));
    Tensor<int32_t> row_idx({3, 2}, {0, 3, 1, 4, 2, 5});
    Tensor<int32_t> expert_idx({3, 2}, {1, 2, 0, 1, 0, 2});
    Tensor<float> expanded({4, 4});
    Tensor<int32_t> expanded_row_idx({6});
    Tensor<int32_t> expanded_expert_idx({6});
    // activeNum counts tokens: the rows of two tokens' worth of slots.
    RUN(MoeInitRouting, x, row_idx, expert_idx, 2, expanded, expanded_row_idx, expanded_expert_idx);
    expect("expanded rows", expanded, rows({0.2f, 0.3f, 0.1f, 0.2f}, 4));
    expect("row of each slot", expanded_row_idx, {2, 0, 1, 4, 3, 5});
    expect("sorted experts", expanded_expert_idx, {0, 0, 1, 1, 2, 2});
    return 0;
}
