// aclnnMoeInitRoutingV2Grad: the copies of a token, added up.
#include "aclnnop/aclnn_moe_init_routing_v2_grad.h"
#include "kit.hpp"

int main()
{
    Device device;
    Tensor<float> grad({4, 2}, {0.1f, 0.1f, 0.3f, 0.3f, 0.2f, 0.2f, 0.4f, 0.4f});
    Tensor<int32_t> row_idx({4}, {2, 0, 1, 3});
    Tensor<float> out({2, 2});
    RUN(MoeInitRoutingV2Grad, grad, row_idx, 2, 0, 0, out);
    expect("x grad", out, {0.3f, 0.3f, 0.7f, 0.7f}, 1e-6);
    return 0;
}
