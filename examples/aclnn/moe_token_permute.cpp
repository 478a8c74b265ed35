// aclnnMoeTokenPermute: a copy of the token for each of its experts, in expert order.
#include "aclnnop/aclnn_moe_token_permute.h"
#include "kit.hpp"

int main()
{
    Device device;
    Tensor<float> tokens({3, 4}, rows({0.1f, 0.2f, 0.3f}, 4));
    Tensor<int32_t> indices({3, 2}, {1, 2, 0, 1, 0, 2});
    Tensor<float> permuted({6, 4});
    Tensor<int32_t> sorted_indices({6});
    RUN(MoeTokenPermute, tokens, indices, 0, false, permuted, sorted_indices);
    expect("permuted tokens", permuted, rows({0.2f, 0.3f, 0.1f, 0.2f, 0.1f, 0.3f}, 4));
    expect("sorted indices", sorted_indices, {2, 4, 0, 3, 1, 5});
    return 0;
}
