// aclnnMoeFinalizeRouting: two residuals and the weighted rows with their expert's bias; slots column by column.
#include "aclnnop/aclnn_moe_finalize_routing.h"
#include "kit.hpp"

int main()
{
    Device device;
    Tensor<float> expanded({6, 2}, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11});
    Tensor<float> x1({3, 2}, rows({1, 2, 3}, 2));
    Tensor<float> x2({3, 2}, rows({10, 20, 30}, 2));
    Tensor<float> bias({2, 2}, {0.5f, 1, -0.5f, 2});
    Tensor<float> scales({3, 2}, {1, 0.5f, 2, 0.25f, 0, 1});
    Tensor<int32_t> row_idx({6}, {2, 1, 4, 3, 0, 5});
    Tensor<int32_t> expert_idx({3, 2}, {0, 1, 1, 0, 0, 1});
    Tensor<float> out({3, 2});
    RUN(MoeFinalizeRouting, expanded, x1, x2, bias, scales, row_idx, expert_idx, out);
    expect("out", out, {18.25f, 21.5f, 25.125f, 32.5f, 42.5f, 46});
    RUN(MoeFinalizeRouting, expanded, x1, nullptr, bias, scales, row_idx, expert_idx, out);
    expect("out without x2", out, {8.25f, 11.5f, 5.125f, 12.5f, 12.5f, 16});
    return 0;
}
