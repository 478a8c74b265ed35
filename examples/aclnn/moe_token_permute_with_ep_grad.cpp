// aclnnMoeTokenPermuteWithEpGrad: rows 1 to 4 are here, the others count as zero.
#include "aclnnop/aclnn_moe_token_permute_with_ep_grad.h"
#include "kit.hpp"

int main()
{
    Device device;
    const int64_t bounds[] = {1, 5};
    aclIntArray *range = aclCreateIntArray(bounds, 2);
    Tensor<float> grad({4, 2}, {2, 2, 1, 1, 3, 3, 2, 2});
    Tensor<int32_t> sorted_indices({6}, {2, 0, 4, 1, 5, 3});
    Tensor<float> permuted_probs_grad({4}, {0.2f, 0.5f, 0.4f, 0.4f});
    Tensor<float> tokens_grad({3, 2});
    Tensor<float> probs_grad({3, 2});
    RUN(MoeTokenPermuteWithEpGrad, grad, sorted_indices, permuted_probs_grad, 2, range, false, tokens_grad, probs_grad);
    expect("tokens grad", tokens_grad, {1, 1, 4, 4, 3, 3});
    expect("probs grad", probs_grad, {0.5f, 0, 0.4f, 0.2f, 0, 0.4f});
    OK(aclDestroyIntArray(range));
    return 0;
}
