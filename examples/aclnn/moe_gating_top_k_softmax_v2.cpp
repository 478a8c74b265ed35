// aclnnMoeGatingTopKSoftmaxV2: softmax then selection, and selection then softmax.
#include "aclnnop/aclnn_moe_gating_top_k_softmax_v2.h"
#include "kit.hpp"

int main()
{
    Device device;
    Tensor<float> x({1, 4}, {0.1f, 1.1f, 2.1f, 3.1f});
    Tensor<float> y({1, 2});
    Tensor<int32_t> expert_idx({1, 2});
    Tensor<float> softmax({1, 4});
    RUN(MoeGatingTopKSoftmaxV2, x, nullptr, 2, 0, true, y, expert_idx, softmax);
    expect("weights", y, {0.643914f, 0.236883f}, 1e-6);
    expect("expert ids", expert_idx, {3, 2});
    expect("softmax", softmax, {0.0320586f, 0.0871443f, 0.2368828f, 0.6439143f}, 1e-6);

    RUN(MoeGatingTopKSoftmaxV2, x, nullptr, 2, 1, false, y, expert_idx, nullptr);
    expect("weights of the chosen", y, {0.7310586f, 0.2689414f}, 1e-6);
    return 0;
}
