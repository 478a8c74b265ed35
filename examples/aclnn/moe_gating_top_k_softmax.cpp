// aclnnMoeGatingTopKSoftmax: the two largest of a softmax, and the row numbers that older operators take.
#include "aclnnop/aclnn_moe_gating_top_k_softmax.h"
#include "kit.hpp"

int main()
{
    Device device;
    Tensor<float> x({3, 4}, {0.1f, 1.1f, 2.1f, 3.1f, 4.1f, 5.1f, 6.1f, 7.1f, 8.1f, 9.1f, 10.1f, 11.1f});
    Tensor<float> y({3, 2});
    Tensor<int32_t> expert_idx({3, 2});
    Tensor<int32_t> row_idx({3, 2});
    RUN(MoeGatingTopKSoftmax, x, nullptr, 2, y, expert_idx, row_idx);
    expect("weights", y, {0.643914f, 0.236883f, 0.643914f, 0.236883f, 0.643914f, 0.236883f}, 1e-6);
    expect("expert ids", expert_idx, {3, 2, 3, 2, 3, 2});
    expect("row ids", row_idx, {0, 3, 1, 4, 2, 5});
    return 0;
}
