// aclnnMoeTokenUnpermute: the weighted sum of a token's rows.
#include "aclnnop/aclnn_moe_token_unpermute.h"
#include "kit.hpp"

int main()
{
    Device device;
    Tensor<float> permuted({4, 2}, {1, 2, 3, 4, 5, 6, 7, 8});
    Tensor<int32_t> sorted_indices({4}, {3, 0, 1, 2});
    Tensor<float> probs({2, 2}, {0.5f, 2, 1, 0.25f});
    Tensor<float> out({2, 2});
    RUN(MoeTokenUnpermute, permuted, sorted_indices, probs, false, nullptr, out);
    expect("tokens", out, {5.5f, 8, 4.25f, 5.5f});
    return 0;
}
