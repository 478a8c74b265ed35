// aclnnMoeTokenUnpermuteGrad: three rows of one token.
#include "aclnnop/aclnn_moe_token_unpermute_grad.h"
#include "kit.hpp"

int main()
{
    Device device;
    Tensor<float> permuted({3, 2}, {1, 1, 2, 2, 3, 3});
    Tensor<float> grad({1, 2}, {1, 1});
    Tensor<int32_t> sorted_indices({3}, {0, 2, 1});
    Tensor<float> probs({1, 3}, {1, 0.5f, 0.25f});
    Tensor<float> permuted_grad({3, 2});
    Tensor<float> probs_grad({1, 3});
    RUN(MoeTokenUnpermuteGrad, permuted, grad, sorted_indices, probs, false, nullptr, permuted_grad, probs_grad);
    expect("permuted tokens grad", permuted_grad, {1, 1, 0.25f, 0.25f, 0.5f, 0.5f});
    expect("probs grad", probs_grad, {2, 6, 4});
    return 0;
}
