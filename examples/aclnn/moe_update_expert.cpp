// aclnnMoeUpdateExpert: the instance of each chosen expert, and which slots are worth computing.
#include "aclnnop/aclnn_moe_update_expert.h"
#include "kit.hpp"

int main()
{
    Device device;
    Tensor<int32_t> ids({3, 2}, {0, 1, 1, 2, 2, 3});
    // Experts 1 and 2 have two instances: a count, then the instances.
    Tensor<int32_t> table({4, 3}, {1, 0, -1, 2, 1, 4, 2, 2, 5, 1, 3, -1});
    Tensor<float> scales({3, 2}, {0.6f, 0.4f, 0.9f, 0.1f, 0.75f, 0.25f});
    Tensor<float> threshold({2}, {0, 0.25f});
    Tensor<uint8_t> active({3}, {1, 1, 0}, ACL_BOOL);
    Tensor<int32_t> balanced({3, 2});
    Tensor<uint8_t> kept({3, 2}, ACL_BOOL);

    RUN(MoeUpdateExpert, ids, table, scales, threshold, active, 2, 4, 0, balanced, kept);
    expect("ids for rank 2 of 4", balanced, {0, 4, 4, 5, 5, 3});
    expect("active mask", kept, {1, 1, 1, 0, 0, 0});

    // Token by token in turn, whatever the rank; without scales no mask is written.
    RUN(MoeUpdateExpert, ids, table, nullptr, nullptr, nullptr, -1, -1, 1, balanced, kept);
    expect("ids in turn", balanced, {0, 1, 4, 5, 2, 3});
    return 0;
}
