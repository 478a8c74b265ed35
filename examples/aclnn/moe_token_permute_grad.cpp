// aclnnMoeTokenPermuteGrad: the copies of a token, added up.
#include "aclnnop/aclnn_moe_token_permute_grad.h"
#include "kit.hpp"

int main()
{
    Device device;
    // Token 0 has rows 2 and 0, token 1 rows 1 and 3.
    Tensor<float> grad({4, 2}, {1, 2, 3, 4, 5, 6, 7, 8});
    Tensor<int32_t> sorted_indices({4}, {2, 0, 1, 3});
    Tensor<float> out({2, 2});
    RUN(MoeTokenPermuteGrad, grad, sorted_indices, 2, false, out);
    expect("tokens grad", out, {6, 8, 10, 12});

    // bfloat16 by its bits: 1, 2, 3, 4 become 1 + 3 and 2 + 4.
    Tensor<uint16_t> half_grad({2, 2}, {0x3F80, 0x4000, 0x4040, 0x4080}, ACL_BF16);
    Tensor<int32_t> half_indices({2}, {0, 1});
    Tensor<uint16_t> half_out({1, 2}, ACL_BF16);
    RUN(MoeTokenPermuteGrad, half_grad, half_indices, 2, false, half_out);
    expect<uint16_t>("bfloat16 tokens grad", half_out, {0x4080, 0x40C0});
    return 0;
}
