// aclnnMoeInitRoutingV3: token copies for the experts of one rank, as they are or as int8 with a scale for each row.
#include "aclnnop/aclnn_moe_init_routing_v3.h"
#include "kit.hpp"

int main()
{
    Device device;
    // Experts 1 and 2 of four; the scale of a token goes with its rows.
    Tensor<float> x({3, 2}, {0.5f, 1, 1.5f, 2, 2.5f, 3});
    Tensor<int32_t> ids({3, 4}, {1, 2, 0, 3, 0, 2, 1, 3, 0, 1, 3, 2});
    Tensor<float> scale({3}, {0.25f, 0.5f, 0.75f});
    int64_t bounds[] = {1, 3};
    aclIntArray *held = aclCreateIntArray(bounds, 2);
    Tensor<float> rows_of_rank({6, 2});
    Tensor<int32_t> row_idx({12});
    Tensor<int64_t> counts({2});
    Tensor<float> scales({6});
    RUN(MoeInitRoutingV3, x, ids, scale, nullptr, 6, 0, 4, 0, 1, true, -1, held, 0, rows_of_rank, row_idx, counts, scales);
    expect("rows", rows_of_rank, {0.5f, 1, 1.5f, 2, 2.5f, 3, 0.5f, 1, 1.5f, 2, 2.5f, 3});
    expect("row of each slot", row_idx, {0, 3, -1, -1, -1, 4, 1, -1, -1, 2, -1, 5});
    expect("tokens of each expert", counts, {3, 3});
    expect("scales", scales, {0.25f, 0.5f, 0.75f, 0.25f, 0.5f, 0.75f});
    OK(aclDestroyIntArray(held));

    // int8: the largest magnitude of a row becomes 127.
    Tensor<float> tokens({3, 4}, {0.5f, 1.5f, 2.5f, -127, 0, 0, 0, 0, 1, -2, 4, 3});
    Tensor<int32_t> experts({3, 2}, {1, 0, 0, 2, 1, 2});
    Tensor<int8_t> small({6, 4});
    Tensor<int32_t> index({6});
    Tensor<int64_t> numbers({3});
    Tensor<float> factors({6});
    RUN(MoeInitRoutingV3, tokens, experts, nullptr, nullptr, -1, 0, 3, 0, 1, true, 1, nullptr, 0, small, index, numbers,
        factors);
    expect("int8 rows", small,
           {0, 2, 2, -127, 0, 0, 0, 0, 0, 2, 2, -127, 32, -64, 127, 95, 0, 0, 0, 0, 32, -64, 127, 95});
    expect("their scales", factors, {1, 0, 1, 0.031496063f, 0, 0.031496063f}, 1e-9);
    return 0;
}
