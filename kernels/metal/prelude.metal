// What every kernel file begins with: the runtime puts this text before each.
#include <metal_stdlib>
#include <metal_simdgroup>
#include <metal_simdgroup_matrix>
using namespace metal;

// bfloat16 by its bits: the type `bfloat` needs Metal 3.1, these conversions run anywhere.
struct bf16 { ushort bits; };

// A finite stand-in for minus infinity: exp(LOWEST - x) is an exact zero for every score x.
constant float LOWEST = -1e30f;

inline float number(float x) { return x; }
inline float number(half x) { return float(x); }
inline float number(bf16 x) { return as_type<float>(uint(x.bits) << 16); }

// To the nearest bf16, ties to even; NaN stays NaN.
inline bf16 round_bf16(float x) {
    uint bits = as_type<uint>(x);
    bf16 y;
    y.bits = isnan(x) ? ushort(0x7FC0) : ushort((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
    return y;
}

inline void put(device float& to, float x) { to = x; }
inline void put(device half& to, float x) { to = half(x); }
inline void put(device bf16& to, float x) { to = round_bf16(x); }

// Sets, or adds to what is there.
template <typename T>
inline void store(device T& to, float x, uint add) {
    put(to, add ? number(to) + x : x);
}

// The sum over a threadgroup of up to 1,024 threads, for each of them. All must call; `shared` has 32 places, and may be used
// again right after.
inline float sum_of_group(float x, threadgroup float* shared, uint lane, uint simdgroup, uint simdgroups) {
    x = simd_sum(x);
    if (lane == 0) {
        shared[simdgroup] = x;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float sum = 0.0f;
    for (uint i = 0; i < simdgroups; ++i) {
        sum += shared[i];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    return sum;
}

inline float max_of_group(float x, threadgroup float* shared, uint lane, uint simdgroup, uint simdgroups) {
    x = simd_max(x);
    if (lane == 0) {
        shared[simdgroup] = x;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float most = shared[0];
    for (uint i = 1; i < simdgroups; ++i) {
        most = max(most, shared[i]);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    return most;
}

// 1 / (1 + e^-x) without overflow.
inline float sigmoid(float x) {
    float e = exp(-fabs(x));
    return (x >= 0.0f ? 1.0f : e) / (1.0f + e);
}

// Philox4x32-10, as src/random.rs has it: integers only, so every device draws the same words.
inline uint4 philox4x32(uint4 counter, uint2 key) {
    for (uint round = 0; round < 10; ++round) {
        uint a = counter.x, b = counter.z;
        counter = uint4(mulhi(b, 0xCD9E8D57u) ^ counter.y ^ key.x, b * 0xCD9E8D57u,
                        mulhi(a, 0xD2511F53u) ^ counter.w ^ key.y, a * 0xD2511F53u);
        key = uint2(key.x + 0x9E3779B9u, key.y + 0xBB67AE85u);
    }
    return counter;
}

#define instantiate(name, function, ...) \
    template [[host_name(name)]] [[kernel]] decltype(function<__VA_ARGS__>) function<__VA_ARGS__>;
// A kernel template for each type of its numbers.
#define instantiate_types(name, function) \
    instantiate(name "_f32", function, float) \
    instantiate(name "_f16", function, half) \
    instantiate(name "_bf16", function, bf16)
