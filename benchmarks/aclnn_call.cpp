// What one call of both phases costs through C: prints microseconds. See aclnn_call.py.
#include <chrono>
#include "aclnnop/aclnn_moe_token_permute_grad.h"
#include "kit.hpp"
int main()
{
    Device device;
    Tensor<float> grad({4, 2}, {1, 2, 3, 4, 5, 6, 7, 8});
    Tensor<int32_t> indices({4}, {2, 0, 1, 3});
    Tensor<float> out({2, 2});
    double best = 1e9;
    for (int round = 0; round < 20; round++) {
        auto start = std::chrono::steady_clock::now();
        for (int i = 0; i < 100; i++) RUN(MoeTokenPermuteGrad, grad, indices, 2, false, out);
        std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - start;
        best = std::min(best, took.count() / 100);
    }
    std::printf("%.2f\n", best);
    return 0;
}
