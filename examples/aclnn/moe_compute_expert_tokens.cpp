// aclnnMoeComputeExpertTokens: how many of the sorted ids are at most i.
#include "aclnnop/aclnn_moe_compute_expert_tokens.h"
#include "kit.hpp"

int main()
{
    Device device;
    Tensor<int32_t> sorted_experts({6}, {0, 0, 1, 1, 2, 2});
    Tensor<int32_t> out({3});
    RUN(MoeComputeExpertTokens, sorted_experts, 3, out);
    expect("cumulative counts", out, {2, 4, 6});
    return 0;
}
