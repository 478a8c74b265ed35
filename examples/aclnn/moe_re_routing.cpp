// aclnnMoeReRouting: chunks of two ranks, expert by expert inside each, become expert by expert over both.
#include "aclnnop/aclnn_moe_re_routing.h"
#include "kit.hpp"

int main()
{
    Device device;
    // Rank 0 sent 1 row for expert 0 and 2 for expert 1; rank 1 sent 2 and 1.
    Tensor<float> tokens({6, 2}, rows({0, 1, 2, 3, 4, 5}, 2));
    Tensor<int32_t> counts({2, 2}, {1, 2, 2, 1});
    Tensor<float> scales({6}, {10, 11, 12, 13, 14, 15});
    Tensor<float> permuted({6, 2});
    Tensor<float> permuted_scales({6});
    Tensor<int32_t> permuted_idx({6});
    Tensor<int32_t> expert_tokens({2});
    RUN(MoeReRouting, tokens, counts, scales, 1, 0, permuted, permuted_scales, permuted_idx, expert_tokens);
    expect("permuted tokens", permuted, rows({0, 3, 4, 1, 2, 5}, 2));
    expect("permuted scales", permuted_scales, {10, 13, 14, 11, 12, 15});
    expect("row ids", permuted_idx, {0, 3, 4, 1, 2, 5});
    expect("tokens of each expert", expert_tokens, {3, 3});
    return 0;
}
