// aclnnMoeGatingTopK: sigmoid scores, two groups of which one is kept, weights that sum to the scaling factor.
#include "aclnnop/aclnn_moe_gating_top_k.h"
#include "kit.hpp"

int main()
{
    Device device;
    // Group 0 has experts 0 and 1, group 1 experts 2 and 3. The bias makes the second row choose group 0.
    Tensor<float> x({2, 4}, {0, 1, 2, 3, 0, 1, 2, 3});
    Tensor<float> bias({4}, {0, 0, 0, 0});
    Tensor<float> y({2, 2});
    Tensor<int32_t> expert_idx({2, 2});
    Tensor<float> scores({2, 4});
    RUN(MoeGatingTopK, x, bias, 2, 1, 2, 1, 0, 1, true, 2.5, 1e-20, y, expert_idx, scores);
    const double s[] = {0.5, 0.7310585786300049, 0.8807970779778823, 0.9525741268224334};
    const float high = float(2.5 * s[3] / (s[3] + s[2])), low = float(2.5 * s[2] / (s[3] + s[2]));
    expect("weights", y, {high, low, high, low}, 1e-6);
    expect("expert ids", expert_idx, {3, 2, 3, 2});
    expect("scores", scores, {0.5f, float(s[1]), float(s[2]), float(s[3]), 0.5f, float(s[1]), float(s[2]), float(s[3])},
           1e-6);

    Tensor<float> other_bias({4}, {5, 0, 0, 0});
    RUN(MoeGatingTopK, x, other_bias, 2, 1, 2, 1, 0, 1, false, 1.0, 1e-20, y, expert_idx, scores);
    const float first = float(s[0] / (s[0] + s[1])), second = float(s[1] / (s[0] + s[1]));
    expect("weights with a bias", y, {first, second, first, second}, 1e-6);
    expect("expert ids with a bias", expert_idx, {0, 1, 0, 1});
    return 0;
}
