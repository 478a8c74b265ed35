// aclnnMoeFusedTopk: groups of experts by their best scores, then experts, then the instances that serve them.
#include "aclnnop/aclnn_moe_fused_topk.h"
#include "kit.hpp"

int main()
{
    Device device;
    Tensor<float> x({2, 6}, {0, 1, -1, 2, 0, 0, -4, -3, -2, -1, -2, -2});
    Tensor<float> add({6}, {0, 0, 0.5f, 0, 0.25f, 0.25f});
    Tensor<float> y({2, 3});
    Tensor<int32_t> indices({2, 3});
    // Three groups of two; the two groups whose two experts have the largest sum; three experts of theirs.
    RUN(MoeFusedTopk, x, add, nullptr, nullptr, 3, 2, 2, 3, 0, false, 1.0f, false, y, indices);
    expect("experts", indices, {3, 2, 4, 2, 4, 5});
    expect("scores", y, {0.8807971f, 0.26894143f, 0.5f, 0.11920292f, 0.11920292f, 0.11920292f}, 1e-6);

    Tensor<int32_t> mapping_num({6}, {1, 2, 2, 0, 1, 3});
    Tensor<int32_t> mapping({6, 3}, {10, 0, 0, 11, 21, 0, 12, 22, 0, 13, 0, 0, 14, 0, 0, 15, 25, 35});
    RUN(MoeFusedTopk, x, add, mapping_num, mapping, 3, 2, 2, 3, 0, true, 2.5f, true, y, indices);
    expect("instances", indices, {13, 12, 14, 22, 14, 25});
    expect("weights", y, {1.3347526f, 0.40755159f, 0.75769579f, 0.83333325f, 0.83333325f, 0.83333325f}, 1e-6);
    return 0;
}
