// aclnnMoeTokenUnpermuteWithEp: this rank's part of every token's sum.
#include "aclnnop/aclnn_moe_token_unpermute_with_ep.h"
#include "kit.hpp"

int main()
{
    Device device;
    const int64_t bounds[] = {1, 5};
    aclIntArray *range = aclCreateIntArray(bounds, 2);
    Tensor<float> permuted({4, 2}, {2, 2, 1, 1, 3, 3, 2, 2});
    Tensor<int32_t> sorted_indices({6}, {2, 0, 4, 1, 5, 3});
    Tensor<float> probs({3, 2}, {1, 1, 1, 1, 1, 1});
    Tensor<float> out({3, 2});
    RUN(MoeTokenUnpermuteWithEp, permuted, sorted_indices, probs, 2, range, false, nullptr, out);
    expect("tokens", out, {1, 1, 4, 4, 3, 3});
    OK(aclDestroyIntArray(range));
    return 0;
}
