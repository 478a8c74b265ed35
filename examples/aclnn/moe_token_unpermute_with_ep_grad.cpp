// aclnnMoeTokenUnpermuteWithEpGrad: with a range, and without one as aclnnMoeTokenUnpermuteGrad.
#include "aclnnop/aclnn_moe_token_unpermute_with_ep_grad.h"
#include "kit.hpp"

int main()
{
    Device device;
    const int64_t bounds[] = {1, 3};
    aclIntArray *range = aclCreateIntArray(bounds, 2);
    Tensor<float> grad({1, 2}, {1, 3});
    Tensor<int32_t> sorted_indices({3}, {0, 1, 2});
    Tensor<float> permuted({2, 2}, {1, 1, 2, 2});
    Tensor<float> probs({1, 3}, {9, 0.5f, 2});
    Tensor<float> permuted_grad({2, 2});
    Tensor<float> probs_grad({1, 3});
    RUN(MoeTokenUnpermuteWithEpGrad, grad, sorted_indices, permuted, probs, false, nullptr, range, 3, permuted_grad,
        probs_grad);
    expect("permuted tokens grad", permuted_grad, {0.5f, 1.5f, 2, 6});
    expect("probs grad", probs_grad, {0, 4, 8});
    OK(aclDestroyIntArray(range));
    return 0;
}
