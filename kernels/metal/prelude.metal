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

// Loops over arrays that must stay in registers. The emulator compiles faster without.
#ifdef __METAL_VERSION__
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL
#endif

// Four numbers that lie at an address for one.
inline float4 four(device const float* x) {
    float4 y = *(device const packed_float4*)x;
    return y;
}
inline float4 four(device const half* x) {
    half4 y = *(device const packed_half4*)x;
    return float4(y);
}
inline float4 four(device const bf16* x) {
    ushort4 bits = *(device const packed_ushort4*)x;
    return as_type<float4>(uint4(bits) << 16);
}

// Numbers at..at + 8 of a row of plain numbers, zeros past its end.
template <typename T>
inline void load_eight(device const T* row, uint at, uint columns, thread float* to) {
    if (at + 8 <= columns) {
        float4 a = four(row + at), b = four(row + at + 4);
        UNROLL for (uint i = 0; i < 4; ++i) {
            to[i] = a[i];
            to[i + 4] = b[i];
        }
    } else {
        UNROLL for (uint i = 0; i < 8; ++i) {
            to[i] = at + i < columns ? number(row[at + i]) : 0.0f;
        }
    }
}

// The formats of weights, plain ones and GGUF's blocks (ggml-common.h): `eight` gives the numbers of weights at..at + 8 of a row,
// `at` being a multiple of 8. Rows of blocks are whole blocks at even addresses, so eight weights never leave the row.
template <typename T>
struct Plain {
    static void eight(device const uchar* row, uint at, uint columns, thread float* w) {
        load_eight((device const T*)row, at, columns, w);
    }
};

inline float half_at(device const uchar* from) { return float(*(device const half*)from); }

inline float signed_byte(uint bits) { return float(int(bits << 24) >> 24); }

// Four bits of each of the eight bytes from `from` on, from bit `shift` on.
inline void nibbles(device const uchar* from, uint shift, thread uint* to) {
    ushort4 pairs = *(device const packed_ushort4*)from;
    UNROLL for (uint i = 0; i < 4; ++i) {
        uint pair = pairs[i];
        to[2 * i] = (pair >> shift) & 15;
        to[2 * i + 1] = (pair >> (shift + 8)) & 15;
    }
}

// 32 weights: a scale and as many bytes.
struct Q8_0 {
    static void eight(device const uchar* row, uint at, uint, thread float* w) {
        device const uchar* block = row + ulong(at / 32) * 34;
        ushort4 pairs = *(device const packed_ushort4*)(block + 2 + at % 32);
        float scale = half_at(block);
        UNROLL for (uint i = 0; i < 4; ++i) {
            w[2 * i] = scale * signed_byte(pairs[i]);
            w[2 * i + 1] = scale * signed_byte(uint(pairs[i]) >> 8);
        }
    }
};

// 32 weights: a scale, in some formats a minimum, in some a fifth bit of each weight, and 16 bytes whose low halves are the first
// 16 weights.
template <bool MINIMUM, bool FIFTH_BIT>
struct Nibbles {
    static void eight(device const uchar* row, uint at, uint, thread float* w) {
        uint head = MINIMUM ? 4 : 2, body = head + (FIFTH_BIT ? 4 : 0), part = at / 8 % 4, q[8];
        device const uchar* block = row + ulong(at / 32) * (body + 16);
        nibbles(block + body + part % 2 * 8, part / 2 * 4, q);
        uint fifth = FIFTH_BIT ? uint(block[head + part]) : 0u;
        float scale = half_at(block), least = MINIMUM ? half_at(block + 2) : 0.0f;
        int zero = MINIMUM ? 0 : (FIFTH_BIT ? 16 : 8);
        UNROLL for (uint i = 0; i < 8; ++i) {
            float steps = float(int(q[i] | ((fifth >> i) & 1) << 4) - zero);
            w[i] = MINIMUM ? fma(scale, steps, least) : scale * steps;
        }
    }
};
typedef Nibbles<false, false> Q4_0;
typedef Nibbles<true, false> Q4_1;
typedef Nibbles<false, true> Q5_0;
typedef Nibbles<true, true> Q5_1;

// 256 weights: two scales for the scales and minima of eight blocks, which have 6 bits, and 128 bytes, each 32 of which are two
// blocks.
struct Q4_K {
    static void eight(device const uchar* row, uint at, uint, thread float* w) {
        device const uchar* block = row + ulong(at / 256) * 144;
        uint part = at / 32 % 8, q[8];
        nibbles(block + 16 + part / 2 * 32 + at % 32, part % 2 * 4, q);
        // The first four blocks have their bits together; those of the others are the upper halves and what these have left.
        device const uchar* six = block + 4 + part % 4;
        uint a = six[0], b = six[4], c = six[8];
        uint scale_bits = part < 4 ? a & 63 : (c & 15) | (a >> 6) << 4;
        uint least_bits = part < 4 ? b & 63 : (c >> 4) | (b >> 6) << 4;
        float scale = half_at(block) * float(scale_bits), least = half_at(block + 2) * float(least_bits);
        UNROLL for (uint i = 0; i < 8; ++i) {
            w[i] = fma(scale, float(q[i]), -least);
        }
    }
};

// 256 weights in two halves of four blocks: 128 bytes with four bits of each, 64 with two more, 16 scales, and one for these.
struct Q6_K {
    static void eight(device const uchar* row, uint at, uint, thread float* w) {
        device const uchar* block = row + ulong(at / 256) * 210;
        uint upper = at / 128 % 2, part = at / 32 % 4, place = at % 32, q[8];
        nibbles(block + upper * 64 + part % 2 * 32 + place, part / 2 * 4, q);
        ushort4 pairs = *(device const packed_ushort4*)(block + 128 + upper * 32 + place);
        float scale = half_at(block + 208) * signed_byte(block[192 + upper * 8 + part * 2 + place / 16]);
        UNROLL for (uint i = 0; i < 8; ++i) {
            uint two = (uint(pairs[i / 2]) >> (i % 2 * 8 + part * 2)) & 3;
            w[i] = scale * float(int(q[i] | two << 4) - 32);
        }
    }
};

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
