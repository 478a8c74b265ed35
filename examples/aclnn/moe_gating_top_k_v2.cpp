// aclnnMoeGatingTopKV2: experts looked up by token id, weights from the scores all the same.
#include "aclnnop/aclnn_moe_gating_top_k_v2.h"
#include "kit.hpp"

int main()
{
    Device device;
    std::vector<float> logits(3 * 256, 1), zeros(256, 0);
    logits[10] = 0;  // row 0's first expert
    Tensor<float> x({3, 256}, logits);
    Tensor<float> bias({256}, zeros);
    Tensor<int32_t> input_ids({3}, {0, 2, 1});
    Tensor<int32_t> tid2eid({3, 2}, {10, 42, 33, 127, 5, 88});
    Tensor<float> y({3, 2});
    Tensor<int32_t> expert_idx({3, 2});
    Tensor<float> scores({3, 256});
    RUN(MoeGatingTopKV2, x, bias, input_ids, tid2eid, 2, 1, 1, 1, 0, 1, false, 1.0, 1e-20, y, expert_idx, scores);
    expect("expert ids", expert_idx, {10, 42, 5, 88, 33, 127});
    const double half = 0.5, other = 0.7310585786300049;
    expect("weights", y, {float(half / (half + other)), float(other / (half + other)), 0.5f, 0.5f, 0.5f, 0.5f}, 1e-6);
    return 0;
}
