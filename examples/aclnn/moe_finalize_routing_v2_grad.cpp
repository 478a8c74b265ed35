// aclnnMoeFinalizeRoutingV2Grad: gradients of the rows and of the scales.
#include "aclnnop/aclnn_moe_finalize_routing_v2_grad.h"
#include "kit.hpp"

int main()
{
    Device device;
    Tensor<float> grad({2, 2}, {0.3816f, 0.3939f, 0.8474f, 0.1652f});
    Tensor<int32_t> row_idx({4}, {1, 3, 0, 2});
    Tensor<float> expanded({4, 2}, {0.6049f, 0.3315f, 0.4954f, 0.3284f, 0.7060f, 0.4359f, 0.6514f, 0.9476f});
    Tensor<float> scales({2, 2}, {0.4708f, 0.0656f, 0.9652f, 0.9512f});
    Tensor<int32_t> expert_idx({2, 2}, {0, 1, 0, 1});
    Tensor<float> bias({2, 2}, {0.6452f, 0.1981f, 0.4159f, 0.9575f});
    Tensor<float> expanded_grad({4, 2});
    Tensor<float> scales_grad({2, 2});
    RUN(MoeFinalizeRoutingV2Grad, grad, row_idx, expanded, scales, expert_idx, bias, 0, 0, 0, 0, expanded_grad,
        scales_grad);
    expect("expanded x grad", expanded_grad,
           {0.9652f * 0.8474f, 0.9652f * 0.1652f, 0.4708f * 0.3816f, 0.4708f * 0.3939f, 0.9512f * 0.8474f,
            0.9512f * 0.1652f, 0.0656f * 0.3816f, 0.0656f * 0.3939f},
           1e-6);
    expect("scales grad", scales_grad, {0.6426413f, 1.1577006f, 1.1468247f, 1.1808877f}, 1e-6);
    return 0;
}
