// aclnnMoeTokenPermute of quantised tokens: the bytes are copied, here the first four rows of six.
#include "aclnnop/aclnn_moe_token_permute.h"
#include "kit.hpp"

int main()
{
    Device device;
    Tensor<int8_t> tokens({3, 2}, {1, -2, 3, 4, 5, -128});
    Tensor<int32_t> indices({3, 2}, {1, 2, 0, 1, 0, 2});
    Tensor<int8_t> permuted({4, 2});
    Tensor<int32_t> sorted_indices({6});
    RUN(MoeTokenPermute, tokens, indices, 4, false, permuted, sorted_indices);
    expect("permuted tokens", permuted, {3, 4, 5, -128, 1, -2, 3, 4});
    expect("sorted indices, of all rows", sorted_indices, {2, 4, 0, 3, 1, 5});
    return 0;
}
