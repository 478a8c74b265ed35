// aclnnMoeTokenPermuteWithEp: of six rows, this rank keeps those from 1 to 4.
#include "aclnnop/aclnn_moe_token_permute_with_ep.h"
#include "kit.hpp"

int main()
{
    Device device;
    const int64_t bounds[] = {1, 5};
    aclIntArray *range = aclCreateIntArray(bounds, 2);
    Tensor<float> tokens({3, 4}, rows({0.1f, 0.2f, 0.3f}, 4));
    Tensor<int32_t> indices({3, 2}, {1, 2, 3, 1, 2, 3});
    Tensor<float> probs({3, 2}, {0.5f, 0.3f, 0.4f, 0.2f, 0.5f, 0.4f});
    Tensor<float> permuted({4, 4});
    Tensor<int32_t> sorted_indices({6});
    Tensor<float> permuted_probs({4});
    RUN(MoeTokenPermuteWithEp, tokens, indices, probs, range, 6, false, permuted, sorted_indices, permuted_probs);
    expect("sorted indices", sorted_indices, {0, 2, 4, 1, 3, 5});
    expect("permuted tokens", permuted, rows({0.2f, 0.1f, 0.3f, 0.2f}, 4));
    expect("permuted probs", permuted_probs, {0.2f, 0.3f, 0.5f, 0.4f});
    OK(aclDestroyIntArray(range));
    return 0;
}
